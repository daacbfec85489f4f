"""The machine providers. A provider is named in orca.toml, and nowhere else decides anything by its name but here."""

from __future__ import annotations


def resource_types() -> dict[str, str]:
    """The Pulumi type of a machine, by provider."""
    from orca_infra.machines.providers.gcp import GcpProvider
    from orca_infra.machines.providers.local import LocalProvider

    return {"gcp": GcpProvider.resource_type, "local": LocalProvider.resource_type}
