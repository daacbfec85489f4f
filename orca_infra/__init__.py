"""orca-infra makes and removes what orca's runs need: worker machines, warm runtimes and run clusters, through Pulumi."""

__version__ = "0.1.0"
