"""The keys of a stack's file (stacks/Pulumi.STACK.yaml): what each means, said once.

The `config:` block of Pulumi.yaml and the reference page are held to `KEYS`. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

NAMESPACE = "orca-infra"


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key of a stack's file.

    Attributes:
        name: without the project's name before it.
        type: as Pulumi.yaml names it: string, integer, boolean, array (of strings) or object.
        default: what leaving it off means.
        meaning: a sentence, or two.
        secret: set with `--secret` only. Pulumi.yaml cannot say so: there, a key that is secret cannot be left off.
        variable: the environment variable that says the same; one of the two is enough, and they may not differ.

    """

    name: str
    type: str
    default: Any
    meaning: str
    variable: str | None = None
    secret: bool = False


KEYS = (
    Key(
        name="orcaToml",
        type="string",
        default="",
        meaning="The orca.toml that declares the pools, seen from the project's folder. Empty: ORCA_CONFIG, else orca.toml.",
        variable="ORCA_CONFIG",
    ),
    Key(
        name="runner",
        type="string",
        default="",
        meaning="kubernetes: runs that are placed on no worker pool get a run cluster each. Empty: ORCA_RUNNER, else none.",
        variable="ORCA_RUNNER",
    ),
    Key(
        name="runsNamespace",
        type="string",
        default="",
        meaning="The namespace of run clusters, this stack's alone. Empty: ORCA_RUNS_NAMESPACE, else orca-runs.",
        variable="ORCA_RUNS_NAMESPACE",
    ),
    Key(
        name="runtimesNamespace",
        type="string",
        default="",
        meaning="The namespace of runtime pools, this stack's alone. Empty: ORCA_RUNTIMES_NAMESPACE, else none.",
        variable="ORCA_RUNTIMES_NAMESPACE",
    ),
    Key(
        name="systemNamespace",
        type="string",
        default="orca-system",
        meaning="The namespace of the loop and the API where `loop` or `api` is set. It belongs to this stack alone.",
    ),
    Key(
        name="db",
        type="string",
        default="",
        meaning="The database's URL as Pods reach it; it becomes the Secret orca-db. Empty: ORCA_DB, unless that is local.",
        secret=True,
    ),
    Key(
        name="tokenKey",
        type="string",
        default="",
        meaning="The key from which machines' tokens are made. Empty: ORCA_TOKEN_KEY.",
        variable="ORCA_TOKEN_KEY",
        secret=True,
    ),
    Key(
        name="backendUrl",
        type="string",
        default="",
        meaning="Where the loop's engine keeps its state. Empty: PULUMI_BACKEND_URL of this shell, or beside the database.",
        secret=True,
    ),
    Key(name="loop", type="boolean", default=False, meaning="Whether the cluster runs the loop."),
    Key(
        name="api",
        type="boolean",
        default=False,
        meaning="Whether the cluster runs the runtimes' HTTP API; needs runtimesNamespace.",
    ),
    Key(
        name="image",
        type="string",
        default="",
        meaning="The image of the loop and the API, best by digest; needed where `loop` or `api` is set.",
    ),
    Key(name="imagePullSecrets", type="array", default=[], meaning="Secrets of systemNamespace that pull the image."),
    Key(name="loopReplicas", type="integer", default=2, meaning="How many loops run; one leads, the others follow."),
    Key(name="apiReplicas", type="integer", default=2, meaning="How many processes serve the API."),
    Key(
        name="logsClaim",
        type="string",
        default="",
        meaning="A PersistentVolumeClaim of systemNamespace for the runs' logs, writable from every node. Empty: logs are "
        "kept as long as the loop's Pod lives.",
    ),
    Key(
        name="serviceAccountAnnotations",
        type="object",
        default={},
        meaning="Annotations of the loop's service account, such as iam.gke.io/gcp-service-account for pools on Google.",
    ),
    Key(
        name="settings",
        type="object",
        default={},
        meaning="Further settings of the loop and the API, by the names of docs/reference/settings.md, and the variables "
        "that ORCA_RUN_ENV names.",
    ),
    Key(
        name="networkPolicies",
        type="boolean",
        default=False,
        meaning="Whether network policies keep drivers, heads, workers, runtimes, the loop and the API apart. They need a "
        "network plugin that carries them out.",
    ),
    Key(
        name="runtimesFrom",
        type="array",
        default=[],
        meaning="With networkPolicies: the namespaces whose Pods reach runtimes. None: all, but no other runtime.",
    ),
    Key(
        name="runsQuota",
        type="object",
        default={},
        meaning='What all of runsNamespace may use (a ResourceQuota\'s `hard`), e.g. {"requests.cpu": "64", "pods": "500"}.',
    ),
    Key(name="runtimesQuota", type="object", default={}, meaning="The same for runtimesNamespace."),
    Key(
        name="runsLimits",
        type="object",
        default={},
        meaning="What each container of runsNamespace is given or held to (a LimitRange): default, defaultRequest, max, min, "
        "maxLimitRequestRatio; each by resource.",
    ),
    Key(name="runtimesLimits", type="object", default={}, meaning="The same for runtimesNamespace."),
)
