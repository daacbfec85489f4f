"""What the base of a stack is declared from, and one object of it. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from orca_infra.kube.labels import STACK_LABEL, field_manager

Manifest = dict[str, Any]

#: The Secret of every namespace that has the database's URL under `url`.
DATABASE_SECRET = "orca-db"  # noqa: S105  (a name)
#: The Secret of the system namespace with what else the loop needs.
LOOP_SECRET = "orca-infra"  # noqa: S105
LOOP = "orca-loop"
API = "orca-api"
HEALTH_PORT = 8471
API_PORT = 8470


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSecrets:
    """What becomes Secrets; None and empty: there is none of it."""

    database_url: str | None = field(default=None, repr=False)
    token_key: str = field(default="", repr=False)
    passphrase: str = field(default="", repr=False)
    backend_url: str = field(default="", repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """How the loop and the API are deployed.

    Attributes:
        environment: settings of both beside those that the base knows itself.
        toml: the text of orca.toml, which the loop reloads when it changes.

    """

    image: str
    loop_replicas: int | None
    api_replicas: int | None
    pull_secrets: Sequence[str] = ()
    logs_claim: str = ""
    account_annotations: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    toml: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """Everything that the base's program declares, in one value; made from configuration, environment and identity.

    Attributes:
        runs_namespace, runtimes_namespace, system_namespace: None: the stack has none of it.
        deployed: None: neither loop nor API runs in the cluster.
        run_secret: the name under which drivers look for the database.
        runtimes_from: the namespaces whose Pods reach runtimes; none: all.
        declared: the environments and runtime pools of orca.toml.
        quotas, limits: by namespace, what a ResourceQuota and a LimitRange say.

    """

    stack_id: str
    family: str
    runs_namespace: str | None = None
    runtimes_namespace: str | None = None
    system_namespace: str | None = None
    deployed: Deployed | None = None
    secrets: BaseSecrets = field(default_factory=BaseSecrets)
    run_secret: str = DATABASE_SECRET
    dista_port: int = 6390
    network_policies: bool = False
    runtimes_from: Sequence[str] = ()
    declared: Sequence[Manifest] = ()
    quotas: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    limits: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Each once."""
        named = (self.runs_namespace, self.runtimes_namespace, self.system_namespace)
        return tuple(dict.fromkeys(name for name in named if name))

    @property
    def uses_cluster(self) -> bool:
        return bool(self.namespaces)

    def metadata(self, name: str, namespace: str | None = None, **labels: str) -> Manifest:
        """Of a base object: the stack's id, its name among Kubernetes' own labels, and the stack as the one who applies it.

        It never carries the label orca.role: what does can be a stray.
        """
        metadata: Manifest = {
            "name": name,
            "labels": {STACK_LABEL: self.stack_id, "app.kubernetes.io/managed-by": "orca-infra", **labels},
            "annotations": {
                "pulumi.com/patchFieldManager": field_manager(self.stack_id),
                # What somebody changed by hand in a base object is put back.
                "pulumi.com/patchForce": "true",
            },
        }
        return metadata if namespace is None else {**metadata, "namespace": namespace}


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseObject:
    """One Kubernetes object of the base.

    Attributes:
        resource: its name in Pulumi's state; it never changes, or the object would be replaced.
        protect: `pulumi destroy` refuses, until `orca-infra drain --all`.
        retain: `pulumi destroy` forgets it and leaves it in the cluster.

    """

    manifest: Manifest
    resource: str
    protect: bool = False
    retain: bool = False

    @property
    def type(self) -> str:
        """Its type in Pulumi's words, e.g. kubernetes:core/v1:Secret."""
        version = self.manifest["apiVersion"]
        return f"kubernetes:{version if '/' in version else f'core/{version}'}:{self.manifest['kind']}"


def named(manifest: Manifest, **options: bool) -> BaseObject:
    """The object under a name that tells kind and place."""
    metadata = manifest["metadata"]
    place = f"{metadata['namespace']}:" if "namespace" in metadata else ""
    return BaseObject(manifest=manifest, resource=f"{manifest['kind'].lower()}:{place}{metadata['name']}", **options)
