"""The objects of a run's cluster as they are declared: rendered once, kept in the row. Standard library only, pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from orca_infra.kube.labels import (
    JOB_UID_PLACEHOLDER,
    PIPELINE_LABEL,
    ROLE_LABEL,
    RUN_LABEL,
    STACK_LABEL,
    START_LABEL,
    object_annotations,
)
from orca_infra.names import label_value
from orca_infra.runs.model import Manifest, PodPlacement, Role, RunSpec, Sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What every run's objects share.

    Attributes:
        secret: the Secret of that namespace whose key `url` is the driver's database.
        environment: variables of the scheduler that every Pod gets.
        non_root: whether containers must not run as root, unless a pipeline's placement says otherwise.
        deadline_seconds: a Job is ended after this.
        ttl_seconds: a finished Job is deleted after this, if nothing else did.

    """

    namespace: str
    binary: str
    secret: str
    dista_port: int
    deadline_seconds: int
    sizes: Sizes
    ttl_seconds: int = 600
    non_root: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


def cluster_name(run: int, start: int) -> str:
    """The name of the Job, and the beginning of all others' names."""
    return f"orca-{run}-{start}"


def render(
    spec: RunSpec, settings: RunSettings, stack_id: str, placement: PodPlacement | None = None
) -> tuple[Manifest, ...]:
    """The Job first; with tasks also the head's Service, the head and the workers, owned by the Job."""
    name = cluster_name(spec.run, spec.start)
    renderer = _Renderer(spec, settings, stack_id, name, placement or PodPlacement())
    objects = [renderer.job()]
    if spec.workers:
        objects += [renderer.service(), renderer.head()]
        objects += [renderer.worker(number) for number in range(spec.workers)]
    return tuple(objects)


@dataclass(frozen=True, slots=True)
class _Renderer:
    spec: RunSpec
    settings: RunSettings
    stack_id: str
    name: str
    placement: PodPlacement

    def job(self) -> Manifest:
        command = [self.settings.binary, "resume", str(self.spec.run)]
        if self.spec.allow_new_code:
            command.append("--allow-new-code")
        database = {
            "name": "ORCA_DB",
            "valueFrom": {"secretKeyRef": {"name": self.settings.secret, "key": "url"}},
        }
        pod = self._pod_spec(Role.DRIVER, command, [*self._head_variable(), database])
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": self._metadata(self.name, Role.DRIVER, owned=False),
            "spec": {
                "activeDeadlineSeconds": self.settings.deadline_seconds,
                "ttlSecondsAfterFinished": self.settings.ttl_seconds,
                # orca retries runs itself. Never two drivers at a time: a replacement waits for the Pod before it to end.
                "backoffLimit": 0,
                "podReplacementPolicy": "Failed",
                "template": {"metadata": {"labels": self._labels(Role.DRIVER)}, "spec": pod},
            },
        }

    def service(self) -> Manifest:
        selector = {STACK_LABEL: self.stack_id, RUN_LABEL: str(self.spec.run), START_LABEL: str(self.spec.start)}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": self._metadata(f"{self.name}-head", Role.HEAD),
            "spec": {
                # Headless: the name is the head's own address, and no address of the cluster's range is used up.
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {**selector, ROLE_LABEL: Role.HEAD.value},
                "ports": [{"name": "dista", "port": self.settings.dista_port, "protocol": "TCP"}],
            },
        }

    def head(self) -> Manifest:
        command = [self.settings.binary, "dista", "head"]
        port = {"name": "DISTA_PORT", "value": str(self.settings.dista_port)}
        return self._pod(f"{self.name}-head", Role.HEAD, self._pod_spec(Role.HEAD, command, [port]))

    def worker(self, number: int) -> Manifest:
        command = [self.settings.binary, "dista", "worker"]
        spec = self._pod_spec(Role.WORKER, command, self._head_variable())
        return self._pod(f"{self.name}-worker-{number}", Role.WORKER, spec)

    def _pod(self, name: str, role: Role, spec: Manifest) -> Manifest:
        return {"apiVersion": "v1", "kind": "Pod", "metadata": self._metadata(name, role), "spec": spec}

    def _pod_spec(self, role: Role, command: list[str], variables: list[Mapping[str, Any]]) -> Manifest:
        sizes = self.settings.sizes
        cpu = {Role.DRIVER: sizes.driver_cpu, Role.HEAD: sizes.head_cpu, Role.WORKER: sizes.worker_cpu}[role]
        shared = [{"name": name, "value": value} for name, value in sorted(self.settings.environment.items())]
        security: dict[str, Any] = {"seccompProfile": {"type": "RuntimeDefault"}}
        stated = self.placement.non_root
        if stated or (stated is None and self.settings.non_root):
            security["runAsNonRoot"] = True
        return {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": security,
            **self._where(),
            "containers": [
                {
                    "name": role.value,
                    "image": self.spec.image,
                    "command": command,
                    "env": [*shared, *variables],
                    "resources": {"requests": {"cpu": cpu, "memory": sizes.memory}},
                    "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                }
            ],
        }

    def _where(self) -> dict[str, Any]:
        """Where the Pods go and what they are pulled with, as far as the pipeline's table says anything."""
        placement = self.placement
        said = {
            "imagePullSecrets": [{"name": name} for name in placement.image_pull_secrets],
            "nodeSelector": dict(placement.node_selector),
            "tolerations": [dict(toleration) for toleration in placement.tolerations],
            "priorityClassName": placement.priority_class,
        }
        return {key: value for key, value in said.items() if value}

    def _head_variable(self) -> list[Mapping[str, Any]]:
        if not self.spec.workers:
            return []
        return [{"name": "DISTA_HEAD", "value": f"{self.name}-head:{self.settings.dista_port}"}]

    def _labels(self, role: Role) -> dict[str, str]:
        return {
            STACK_LABEL: self.stack_id,
            RUN_LABEL: str(self.spec.run),
            START_LABEL: str(self.spec.start),
            PIPELINE_LABEL: label_value(self.spec.pipeline),
            ROLE_LABEL: role.value,
        }

    def _metadata(self, name: str, role: Role, *, owned: bool = True) -> dict[str, Any]:
        metadata: dict[str, Any] = {
            "name": name,
            "namespace": self.settings.namespace,
            "labels": self._labels(role),
            "annotations": object_annotations(self.stack_id),
        }
        if owned:
            # `controller` stays unset: the Job controller would release Pods that it did not make.
            metadata["ownerReferences"] = [
                {"apiVersion": "batch/v1", "kind": "Job", "name": self.name, "uid": JOB_UID_PLACEHOLDER}
            ]
        return metadata
