"""The program of a base stack, from one value: the same for `pulumi up`, a preview in a pull request and a test."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from orca_infra.stack.base_guards import guard_objects
from orca_infra.stack.base_model import API, LOOP, Base, BaseObject, Manifest, named
from orca_infra.stack.base_rights import rights_objects
from orca_infra.stack.base_workloads import database_secret, workload_objects
from orca_infra.stack.program import Program, Registered, Registrar, secret

IDENTITY = "orca:index:Identity"
#: Declares more of the base once its identity is there, such as what machines need in a cloud.
More = Callable[[Registrar, Registered], object]


def base_objects(base: Base) -> list[list[BaseObject]]:
    """What the base has in the cluster, in the order in which it is made: what stands later needs what stands earlier."""
    namespaces = [_namespace(base, name) for name in base.namespaces]
    objects: list[BaseObject] = []
    if base.runs_namespace and base.secrets.database_url is not None:
        objects.append(database_secret(base, base.runs_namespace, base.run_secret))
    objects += guard_objects(base)
    if base.deployed is not None:
        objects += rights_objects(base)
    workloads = workload_objects(base)
    # A Deployment is waited for, and comes up only with all else there.
    last = [item for item in workloads if item.manifest["kind"] == "Deployment"]
    objects += [item for item in workloads if item not in last]
    objects += [named(dict(manifest)) for manifest in base.declared]
    return [namespaces + _definitions(base), objects, last]


def base_outputs(base: Base) -> dict[str, Any]:
    """What the stack gives out: `pulumi stack output`."""
    outputs: dict[str, Any] = {"id": base.stack_id, "family": base.family}
    named_namespaces = {
        "runs": base.runs_namespace,
        "runtimes": base.runtimes_namespace,
        "system": base.system_namespace,
    }
    if base.uses_cluster:
        outputs["namespaces"] = {key: name for key, name in named_namespaces.items() if name}
    deployed = base.deployed
    if deployed is not None:
        outputs["image"] = deployed.image
        if deployed.loop_replicas is not None:
            outputs["loop"] = f"deployment/{LOOP} in {base.system_namespace}"
            outputs["loopAccount"] = f"system:serviceaccount:{base.system_namespace}:{LOOP}"
        if deployed.api_replicas is not None:
            outputs["api"] = f"http://{API}.{base.system_namespace}.svc"
    return outputs


def base_program(base: Base, more: Sequence[More] = ()) -> Program:
    """The identity, which makes the engine refuse a database of another state; what the cluster has; and `more`."""

    def program(registrar: Registrar) -> None:
        identity = registrar.register(IDENTITY, "identity", {"id": base.stack_id, "stack": base.family}).result()
        if identity is None:
            return
        if base.uses_cluster:
            _declare_cluster(registrar, base, identity)
        for declare in more:
            declare(registrar, identity)
        # A `destroy` begins with what nothing stands on: this alone, which it may not remove before a drain.
        properties = {"id": base.stack_id, "stack": base.family}
        registrar.register(IDENTITY, "drained-first", properties, depends_on=registrar.made, protect=True).result()
        registrar.outputs |= base_outputs(base)

    return program


def _declare_cluster(registrar: Registrar, base: Base, identity: Registered) -> None:
    provider = registrar.register(
        "pulumi:providers:kubernetes", "cluster", {"clusterIdentifier": base.stack_id, "enableServerSideApply": "true"}
    ).result()
    if provider is None:
        return
    after: list[Registered] = [identity]
    for group in base_objects(base):
        pending = [
            registrar.register(
                item.type,
                item.resource,
                sealed(item.manifest),
                provider=provider,
                depends_on=after,
                protect=item.protect,
                retain_on_delete=item.retain,
            )
            for item in group
        ]
        made = [registration.result() for registration in pending]
        after = [*after, *(one for one in made if one is not None)]


def sealed(manifest: Manifest) -> Manifest:
    """The manifest as the engine gets it: a Secret's values are secrets to the engine, too."""
    if manifest["kind"] != "Secret":
        return manifest
    return {**manifest, "data": {key: secret(value) for key, value in manifest["data"].items()}}


def _namespace(base: Base, name: str) -> BaseObject:
    """Kept whatever becomes of the stack: what people put into it would go with it."""
    metadata = base.metadata(name)
    metadata["annotations"]["pulumi.com/skipAwait"] = "true"
    manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}
    return BaseObject(manifest=manifest, resource=name, protect=True, retain=True)


def _definitions(base: Base) -> list[BaseObject]:
    """The runtime pools' definitions, which are kept: losing them loses all pools, of every stack of the cluster."""
    if base.runtimes_namespace is None:
        return []
    from orca_infra.runtimes.crds import runtime_environment_crd, runtime_pool_crd

    manifests: list[Manifest] = [runtime_pool_crd(), runtime_environment_crd()]
    return [BaseObject(manifest=manifest, resource=manifest["metadata"]["name"], retain=True) for manifest in manifests]
