"""The policies of Pods and of what makes Pods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from orca_infra.allowed import Allowed
from orca_infra.kube.labels import ROLE_LABEL
from orca_infra.policy.model import UNKNOWN, Resource, Rule, Values, Violation, matches, rows, table, texts

#: Where the Pod's template is in a kind; a Pod is its own.
_TEMPLATES: Mapping[str, tuple[str, ...]] = {
    "Pod": (),
    "PodTemplate": ("template",),
    "Deployment": ("spec", "template"),
    "StatefulSet": ("spec", "template"),
    "DaemonSet": ("spec", "template"),
    "ReplicaSet": ("spec", "template"),
    "ReplicationController": ("spec", "template"),
    "Job": ("spec", "template"),
    "CronJob": ("spec", "jobTemplate", "spec", "template"),
}
_HOST = {"hostNetwork": "the host's network", "hostPID": "the host's processes", "hostIPC": "the host's memory"}
_STRONG = frozenset({"ALL", "SYS_ADMIN", "NET_ADMIN", "SYS_PTRACE", "SYS_MODULE", "DAC_READ_SEARCH", "BPF"})
_ENVIRONMENT = "RuntimeEnvironment"
_POOL = "RuntimePool"
_DIGEST_CHARACTERS = 64


def _templates(resource: Resource) -> Iterator[Values]:
    """The Pods, or the templates of Pods, that a resource is, makes, patches or lists; none for another kind."""
    kind = resource.kind.removesuffix("Patch")
    of = kind.removesuffix("List")
    if not resource.type.startswith("kubernetes:") or of not in _TEMPLATES:
        return
    for value in [resource.props] if kind == of else rows(resource.props.get("items")):
        template: Values = value
        for key in _TEMPLATES[of]:
            template = table(template.get(key))
        yield template


def _containers(template: Values) -> Iterator[tuple[str, Values]]:
    spec = table(template.get("spec"))
    for key in ("initContainers", "containers", "ephemeralContainers"):
        for position, container in enumerate(rows(spec.get(key)), 1):
            yield str(container.get("name") or f"#{position} of {key}"), container


def check_resources(resource: Resource, values: Values) -> Iterator[Violation]:
    """Every container states what it requests and what it may use at the most."""
    if resource.kind.endswith("Patch"):
        return  # it states only what it changes
    places: list[tuple[str, object, list[str]]] = []
    for template in _templates(resource):
        role = table(table(template.get("metadata")).get("labels")).get(ROLE_LABEL)
        limits = [] if role in values["limitsExemptRoles"] else values["limits"]
        places += [(f"container {name}", one.get("resources"), limits) for name, one in _containers(template)]
    if resource.kind == _ENVIRONMENT and resource.type.startswith("kubernetes:"):
        ranges = table(table(resource.props.get("spec")).get("resourcesRanges"))
        places.append(("spec.resourcesRanges.default", ranges.get("default"), values["limits"]))
    elif resource.kind == _POOL and resource.type.startswith("kubernetes:"):
        # Without resources of its own a pool has its environment's, which is looked at by itself.
        own = table(resource.props.get("spec")).get("resources")
        places += [("spec.resources", own, values["limits"])] if own else []
    for where, said, limits in places:
        if said is UNKNOWN:
            continue
        wanted = [("requests", values["requests"]), ("limits", limits)]
        lacking = [
            f"{part}.{name}"
            for part, names in wanted
            for name in names
            if table(table(said).get(part)).get(name) is None
        ]
        if lacking:
            yield Violation(
                resource=resource,
                what=f"{where} has no {', '.join(lacking)}",
                remedy="state it in its resources, or lower what container-resources asks for",
            )


def check_privileges(resource: Resource, values: Values) -> Iterator[Violation]:
    """No Pod is privileged or reaches into its host, but what is named in `allow`."""
    if matches(resource.name, values["allow"]):
        return
    for what, remedy in (found for template in _templates(resource) for found in _privileges(template)):
        also = "or name the resource in `allow` of pod-privileges"
        yield Violation(resource=resource, what=what, remedy=f"{remedy}, {also}")


def _privileges(template: Values) -> Iterator[tuple[str, str]]:
    spec = table(template.get("spec"))
    for key, what in _HOST.items():
        if spec.get(key) is True:
            yield f"its Pods use {what} ({key})", f"take {key} out"
    for volume in rows(spec.get("volumes")):
        if volume.get("hostPath") is not None:
            path = table(volume["hostPath"]).get("path", "?")
            yield f"volume {volume.get('name', '?')} is the host's path {path}", "use a volume that is not the host's"
    for name, container in _containers(template):
        security = table(container.get("securityContext"))
        if security.get("privileged") is True:
            yield f"container {name} is privileged", "take privileged out of its securityContext"
        added = table(security.get("capabilities")).get("add")
        strong = sorted(_STRONG.intersection(added if isinstance(added, list) else []))
        if strong:
            yield f"container {name} has the capabilities {', '.join(strong)}", "take them out of its securityContext"
        if any(port.get("hostPort") for port in rows(container.get("ports"))):
            yield f"container {name} has a port of the host", "take hostPort out, and use a Service"


def _images(resource: Resource) -> Iterator[tuple[str, str]]:
    for template in _templates(resource):
        for name, container in _containers(template):
            if isinstance(container.get("image"), str):
                yield f"container {name}", container["image"]
    if resource.kind == _ENVIRONMENT and resource.type.startswith("kubernetes:"):
        image = table(resource.props.get("spec")).get("dockerImage")
        if isinstance(image, str):
            yield "spec.dockerImage", image


def check_registries(resource: Resource, values: Values) -> Iterator[Violation]:
    """Images are from registries that are allowed."""
    allowed = Allowed(registries=tuple(values["registries"]))
    for where, image in _images(resource):
        if not allowed.has_image(image):
            yield Violation(
                resource=resource,
                what=f"{where} has image {image}, which is from no allowed registry ({', '.join(values['registries'])})",
                remedy="copy the image to one of them and name it there, or add its registry to image-registries",
            )


def check_digests(resource: Resource, values: Values) -> Iterator[Violation]:
    """Images are named by their digest, so that the same name is always the same image."""
    for where, image in _images(resource):
        _, _, digest = image.partition("@sha256:")
        if len(digest) != _DIGEST_CHARACTERS and not matches(image, values["exempt"]):
            yield Violation(
                resource=resource,
                what=f"{where} has image {image}, which is named by a tag that can be pushed again",
                remedy="name it with @sha256:… (`docker buildx imagetools inspect IMAGE` shows it)",
            )


def _resource_names(description: str, default: list[str]) -> dict[str, Any]:
    return {
        **texts(description, default),
        "items": {"type": "string", "enum": ["cpu", "memory", "ephemeral-storage"]},
    }


RULES = (
    Rule(
        name="container-resources",
        description="Every container states its requests and limits.",
        check=check_resources,
        properties={
            "requests": _resource_names("What every container has to request.", ["cpu", "memory"]),
            "limits": _resource_names("What every container has to limit.", ["memory"]),
            "limitsExemptRoles": texts(
                "Values of label orca.role whose Pods need no limits: what a run uses is its pipeline's business.",
                ["driver", "head", "worker"],
            ),
        },
    ),
    Rule(
        name="pod-privileges",
        description="No Pod is privileged or uses its host's network, processes or paths.",
        check=check_privileges,
        properties={"allow": texts("Resources whose Pods may, by name; * stands for anything.")},
    ),
    Rule(
        name="image-registries",
        description="Images are from allowed registries.",
        check=check_registries,
        properties={
            "registries": texts(
                "Hosts, or beginnings of repositories, such as europe-docker.pkg.dev/my-project. Empty: all."
            )
        },
    ),
    Rule(
        name="image-digests",
        description="Images are named by digest.",
        check=check_digests,
        properties={"exempt": texts("Images that need no digest; * stands for anything.")},
        advisory=True,
    ),
)
