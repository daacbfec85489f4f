"""The program that `pulumi preview` and `pulumi up` run: the base of a stack, and a look at the stacks that the loop owns."""

from __future__ import annotations

import os

import pulumi

from orca_infra.config import Config, load_config
from orca_infra.errors import OrcaError, UserError
from orca_infra.kube.labels import STACK_LABEL
from orca_infra.machines.account import claim_account
from orca_infra.machines.observe import SQL, machine_stack
from orca_infra.machines.program import with_token
from orca_infra.machines.providers import resource_types
from orca_infra.machines.tokens import worker_token
from orca_infra.settings import Settings, read_settings
from orca_infra.surroundings import Surroundings, open_surroundings


def main() -> None:
    """Declare what this stack owns. A user's mistake becomes one sentence, without a traceback."""
    stack = pulumi.get_stack()
    try:
        settings = read_settings(os.environ)
        surroundings = open_surroundings(settings, say=pulumi.log.info)
        try:
            if stack == settings.stack:
                _declare_base(surroundings)
            elif stack.startswith(f"{settings.stack}."):
                _show_derived(stack, surroundings)
            else:
                raise UserError(
                    f"this shell is set for stack {settings.stack!r}, and pulumi was asked for {stack!r}: "
                    f'run `export ORCA_STACK={stack}`, then `eval "$(orca-infra env)"`'
                )
        finally:
            surroundings.close()
    except OrcaError as error:
        raise pulumi.RunError(str(error)) from None


def _declare_base(surroundings: Surroundings) -> None:
    """The identity, which makes the engine refuse a database of another state; and what the loop needs on a cluster."""
    settings, stack_id = surroundings.settings, surroundings.stack_id
    # First: a file that is no good is refused before anything is registered.
    config = load_config(settings.config_path) if settings.config_path.exists() else None
    if config is not None and config.gcp is not None:
        claim_account(surroundings.database, "gcp", config.gcp.project, remember=not pulumi.runtime.is_dry_run())
    identity = pulumi.CustomResource("orca:index:Identity", "identity", {"id": stack_id, "stack": settings.stack})
    if settings.uses_cluster:
        _declare_cluster(settings, stack_id, identity)
    if config is not None:
        _declare_clouds(config, stack_id, identity)
    pulumi.export("id", stack_id)
    pulumi.export("family", settings.stack)


def _declare_clouds(config: Config, stack_id: str, identity: pulumi.CustomResource) -> None:
    """What the pools of orca.toml need where they are; without the file there are no pools yet."""
    zones = [zone for pool in config.pools if pool.provider == "gcp" for kind in pool.types for zone in kind.locations]
    if config.gcp is not None and zones:
        # Imported here: it brings Pulumi's provider for Google Cloud along, which is heavy.
        from orca_infra.machines.providers.gcp_base import declare_gcp_base

        declare_gcp_base(stack_id, config.gcp, zones, depends_on=[identity])


def _declare_cluster(settings: Settings, stack_id: str, identity: pulumi.CustomResource) -> None:
    """Namespaces, which belong to this stack, and the runtime pools' CRDs, which are kept: losing them loses all pools."""
    provider = pulumi.ProviderResource(
        "kubernetes", "cluster", {"clusterIdentifier": stack_id, "enableServerSideApply": "true"}
    )
    options = pulumi.ResourceOptions(provider=provider, depends_on=[identity], retain_on_delete=True)
    namespaces = [settings.runs_namespace] if settings.runner else []
    if settings.runtimes_namespace:
        from orca_infra.runtimes.crds import runtime_environment_crd, runtime_pool_crd

        namespaces.append(settings.runtimes_namespace)
        for manifest in (runtime_pool_crd(), runtime_environment_crd()):
            pulumi.CustomResource(
                "kubernetes:apiextensions.k8s.io/v1:CustomResourceDefinition",
                manifest["metadata"]["name"],
                {**manifest},
                options,
            )
    protected = pulumi.ResourceOptions.merge(options, pulumi.ResourceOptions(protect=True, retain_on_delete=False))
    for namespace in dict.fromkeys(namespaces):
        metadata = {"name": namespace, "labels": {STACK_LABEL: stack_id}}
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
        pulumi.CustomResource("kubernetes:core/v1:Namespace", namespace, manifest, protected)


def _show_derived(stack: str, surroundings: Surroundings) -> None:
    """Preview what the rows of a pool want against what its stack's state holds; only the loop changes it."""
    if not pulumi.runtime.is_dry_run():
        raise UserError(
            f"stack {stack} is the loop's: `orca-infra run --once` makes one pass over it; by hand it is only previewed"
        )
    with surroundings.database.snapshot() as transaction:
        rows = transaction.dicts(SQL["declared_machines"])
    types = resource_types()
    for row in rows:
        if machine_stack(surroundings.settings.stack, row["pool"]) == stack:
            token = worker_token(surroundings.token_key, surroundings.stack_id, row["name"])
            declaration = with_token(row["rendered"], pulumi.Output.secret, token)
            pulumi.CustomResource(types[row["provider"]], row["name"], declaration)
