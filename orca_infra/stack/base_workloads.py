"""The loop and the API as the cluster runs them. Standard library only.

Both run as a user of no rights on a root file system that they cannot write; what they write is in volumes of their Pod.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

from orca_infra.kube.labels import STACK_LABEL
from orca_infra.stack.base_model import (
    API,
    API_PORT,
    DATABASE_SECRET,
    HEALTH_PORT,
    LOOP,
    LOOP_SECRET,
    Base,
    BaseObject,
    BaseSecrets,
    Deployed,
    Manifest,
    named,
)

USER = 10001
_HOME = "/var/lib/orca-infra"
_CONFIG = "/etc/orca-infra"
_PASSPHRASE = "/var/run/secrets/orca-infra"  # noqa: S105  (a folder)
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_LOGS = "/var/log/orca"
#: The loop ends by itself within 26 s of a SIGTERM (loop/run.py); the kubelet waits for longer.
_LOOP_GRACE_SECONDS = 60
_API_GRACE_SECONDS = 45
_ROLLOUT_SECONDS = 300
_TOKEN_SECONDS = 3607


def workload_objects(base: Base) -> list[BaseObject]:
    """What `base.deployed` asks for: configuration and Secrets first, then what uses them."""
    deployed = base.deployed
    if deployed is None or base.system_namespace is None:
        return []
    objects = [named(_secret(base, base.system_namespace, DATABASE_SECRET, {"url": base.secrets.database_url or ""}))]
    if deployed.loop_replicas is not None:
        objects += [
            named(_secret(base, base.system_namespace, LOOP_SECRET, _loop_secrets(base.secrets))),
            named(_config_map(base, deployed)),
            named(_disruption_budget(base, LOOP)),
            named(_deployment(base, LOOP, deployed.loop_replicas, _loop_pod(base, deployed), _LOOP_GRACE_SECONDS)),
        ]
    if deployed.api_replicas is not None:
        objects += [
            named(_service(base)),
            named(_disruption_budget(base, API)),
            named(_deployment(base, API, deployed.api_replicas, _api_pod(base, deployed), _API_GRACE_SECONDS)),
        ]
    return objects


def database_secret(base: Base, namespace: str, name: str) -> BaseObject:
    """The Secret with the database's URL that drivers get."""
    return named(_secret(base, namespace, name, {"url": base.secrets.database_url or ""}))


def _loop_secrets(secrets: BaseSecrets) -> dict[str, str]:
    values = {
        "token-key": secrets.token_key,
        "passphrase": secrets.passphrase,
        "backend-url": secrets.backend_url,
    }
    return {name: value for name, value in values.items() if value}


def _secret(base: Base, namespace: str, name: str, values: dict[str, str]) -> Manifest:
    data = {key: base64.b64encode(value.encode(errors="surrogateescape")).decode() for key, value in values.items()}
    metadata = base.metadata(name, namespace)
    return {"apiVersion": "v1", "kind": "Secret", "type": "Opaque", "metadata": metadata, "data": data}


def _config_map(base: Base, deployed: Deployed) -> Manifest:
    metadata = base.metadata(LOOP, base.system_namespace)
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"orca.toml": deployed.toml}}


def _disruption_budget(base: Base, name: str) -> Manifest:
    """One at a time leaves: with two, another is there; with one alone, a node can still be drained."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": base.metadata(name, base.system_namespace),
        "spec": {"maxUnavailable": 1, "selector": {"matchLabels": _selector(base, name)}},
    }


def _service(base: Base) -> Manifest:
    metadata = base.metadata(API, base.system_namespace)
    metadata["annotations"]["pulumi.com/skipAwait"] = "true"  # its Deployment is waited for
    port = {"name": "http", "port": 80, "targetPort": "http", "protocol": "TCP"}
    spec = {"selector": _selector(base, API), "ports": [port]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}


def _selector(base: Base, name: str) -> dict[str, str]:
    return {STACK_LABEL: base.stack_id, "app.kubernetes.io/name": name}


def _deployment(base: Base, name: str, replicas: int, pod: Manifest, grace_seconds: int) -> Manifest:
    selector = _selector(base, name)
    metadata = base.metadata(name, base.system_namespace)
    metadata["annotations"]["pulumi.com/timeoutSeconds"] = str(_ROLLOUT_SECONDS)
    spread = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector},
    }
    spec = {
        "serviceAccountName": name,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "topologySpreadConstraints": [spread],
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **pod,
    }
    pull_secrets = base.deployed.pull_secrets if base.deployed else ()
    if pull_secrets:
        spec["imagePullSecrets"] = [{"name": secret} for secret in pull_secrets]
    # A Secret's new value reaches a process only by its restart; the digest, under a key that is secret, tells nothing of it.
    annotations = {"orca-infra/secrets": _digest(base.secrets)}
    if name == LOOP:  # metrics are where the loop's health is
        annotations |= {"prometheus.io/scrape": "true", "prometheus.io/port": str(HEALTH_PORT)}
    template = {"labels": selector, "annotations": annotations}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata,
        "spec": {
            "replicas": replicas,
            "revisionHistoryLimit": 3,
            "selector": {"matchLabels": selector},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
            "template": {"metadata": template, "spec": spec},
        },
    }


def _digest(secrets: BaseSecrets) -> str:
    values = (secrets.database_url or "", secrets.token_key, secrets.passphrase, secrets.backend_url)
    key = (secrets.token_key + secrets.passphrase).encode(errors="surrogateescape")
    text = "\0".join(values).encode(errors="surrogateescape")
    return hmac.new(key, text, hashlib.sha256).hexdigest()[:16]


def _loop_pod(base: Base, deployed: Deployed) -> Manifest:
    secrets = base.secrets
    environment: list[Manifest] = [
        _from_secret("ORCA_TOKEN_KEY", LOOP_SECRET, "token-key"),
        _value("PULUMI_CONFIG_PASSPHRASE_FILE", f"{_PASSPHRASE}/passphrase"),
        *([_from_secret("PULUMI_BACKEND_URL", LOOP_SECRET, "backend-url")] if secrets.backend_url else []),
        _value("ORCA_CONFIG", f"{_CONFIG}/orca.toml"),
        _value("ORCA_HEALTH_PORT", str(HEALTH_PORT)),
        _value("ORCA_LOGS", _LOGS),
        *([_value("ORCA_RUNNER", "kubernetes")] if base.runs_namespace else []),
        *([_value("ORCA_RUNS_NAMESPACE", base.runs_namespace)] if base.runs_namespace else []),
    ]
    volumes: list[Manifest] = [
        {"name": "config", "configMap": {"name": LOOP}},
        {
            "name": "passphrase",
            "secret": {"secretName": LOOP_SECRET, "items": [{"key": "passphrase", "path": "passphrase"}]},
        },
        {"name": "logs", "persistentVolumeClaim": {"claimName": deployed.logs_claim}}
        if deployed.logs_claim
        else {"name": "logs", "emptyDir": {}},
    ]
    mounts: list[Manifest] = [
        # The whole folder: the kubelet changes it in one step, and the loop reads it anew.
        {"name": "config", "mountPath": _CONFIG, "readOnly": True},
        {"name": "passphrase", "mountPath": _PASSPHRASE, "readOnly": True},
        {"name": "logs", "mountPath": _LOGS},
    ]
    container = _container(base, deployed, ["run"], environment=environment, mounts=mounts)
    container |= {
        "name": LOOP,
        "ports": [{"name": "health", "containerPort": HEALTH_PORT, "protocol": "TCP"}],
        "resources": _resources("250m", "512Mi", "2Gi"),
        **_probes("health"),
    }
    # The schema first: of two Pods that begin at once, one waits for the other.
    migrate = _container(base, deployed, ["db", "migrate"], environment=environment, mounts=mounts)
    migrate |= {"name": "migrate", "resources": _resources("100m", "128Mi", "512Mi")}
    return {"initContainers": [migrate], "containers": [container], "volumes": [*_volumes(), *volumes]}


def _api_pod(base: Base, deployed: Deployed) -> Manifest:
    arguments = ["runtimes", "serve", "--host", "0.0.0.0", "--port", str(API_PORT)]  # noqa: S104  (the container's own)
    container = _container(base, deployed, arguments, environment=[], mounts=[])
    container |= {
        "name": API,
        "ports": [{"name": "http", "containerPort": API_PORT, "protocol": "TCP"}],
        "resources": _resources("100m", "256Mi", "1Gi"),
        **_probes("http"),
    }
    return {"containers": [container], "volumes": _volumes()}


def _container(
    base: Base,
    deployed: Deployed,
    arguments: list[str],
    *,
    environment: list[Manifest],
    mounts: list[Manifest],
) -> Manifest:
    known = [
        _value("ORCA_STACK", base.family),
        _from_secret("ORCA_DB", DATABASE_SECRET, "url"),
        _value("ORCA_HOME", _HOME),
        _value("ORCA_LOG", "json"),
        *([_value("ORCA_RUNTIMES_NAMESPACE", base.runtimes_namespace)] if base.runtimes_namespace else []),
        *environment,
    ]
    names = {variable["name"] for variable in known}
    given = [_value(name, value) for name, value in sorted(deployed.environment.items())]
    return {
        "image": deployed.image,
        "args": arguments,
        "env": [*known, *(variable for variable in given if variable["name"] not in names)],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            {"name": "home", "mountPath": _HOME},
            {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  (the container's own)
            {"name": "account", "mountPath": _ACCOUNT, "readOnly": True},
            *mounts,
        ],
    }


def _volumes() -> list[Manifest]:
    token = {"serviceAccountToken": {"path": "token", "expirationSeconds": _TOKEN_SECONDS}}
    authority = {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}}
    field = {"path": "namespace", "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    sources = [token, authority, {"downwardAPI": {"items": [field]}}]
    return [
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
        # What would be mounted by itself, but into these containers alone.
        {"name": "account", "projected": {"sources": sources, "defaultMode": 0o444}},
    ]


def _probes(port: str) -> dict[str, Any]:
    def get(path: str, period: int, failures: int) -> Manifest:
        return {
            "httpGet": {"path": path, "port": port},
            "periodSeconds": period,
            "timeoutSeconds": 5,
            "failureThreshold": failures,
        }

    return {
        # Until it answers for the first time, nothing else is asked: a first start makes the state's tables.
        "startupProbe": get("/healthz", 2, 60),
        "livenessProbe": get("/healthz", 20, 3),
        "readinessProbe": get("/readyz", 5, 3),
    }


def _resources(cpu: str, memory: str, memory_most: str) -> Manifest:
    """CPU has no limit: an engine that is throttled holds its stack's lock for longer."""
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": memory_most}}


def _value(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def _from_secret(name: str, secret: str, key: str) -> Manifest:
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}
