"""The kinds of object that this package works with, and how one very object is named.

Objects themselves are plain JSON: what the API server sends is handed on as it is, and what is sent was rendered elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from orca_infra.errors import Refused

Object = dict[str, Any]

# What a segment of a path may be (k8s.io/apimachinery, pkg/api/validation/path): without this, `..` as a name would make
# the deletion of a Pod that of its namespace.
_UNFIT_SEGMENT = re.compile(r"\A\.{0,2}\Z|[/%]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind as the API server serves it.

    Attributes:
        api_version: `v1`, or group and version with a slash.
        kind: its name in an object.
        plural: its name in a path.
        namespaced: whether its objects live in namespaces.

    """

    api_version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def group(self) -> str:
        """The API group; empty for the core."""
        return self.api_version.rpartition("/")[0]

    def path(self, namespace: str | None = None) -> str:
        """The path of its collection, in one namespace or (None) in all."""
        root = "apis" if self.group else "api"
        inside = f"namespaces/{quote(_fit(namespace), safe='')}/" if namespace is not None else ""
        return f"/{root}/{self.api_version}/{inside}{self.plural}"

    def __str__(self) -> str:
        return self.kind


POD = Kind(api_version="v1", kind="Pod", plural="pods")
SERVICE = Kind(api_version="v1", kind="Service", plural="services")
SECRET = Kind(api_version="v1", kind="Secret", plural="secrets")
JOB = Kind(api_version="batch/v1", kind="Job", plural="jobs")
NAMESPACE = Kind(api_version="v1", kind="Namespace", plural="namespaces", namespaced=False)
NODE = Kind(api_version="v1", kind="Node", plural="nodes", namespaced=False)
EVENT = Kind(api_version="v1", kind="Event", plural="events")
RESOURCE_QUOTA = Kind(api_version="v1", kind="ResourceQuota", plural="resourcequotas")
CRD = Kind(
    api_version="apiextensions.k8s.io/v1",
    kind="CustomResourceDefinition",
    plural="customresourcedefinitions",
    namespaced=False,
)
RUNTIME_POOL = Kind(api_version="datalayer.io/v1", kind="RuntimePool", plural="runtime-pools")
RUNTIME_ENVIRONMENT = Kind(api_version="datalayer.io/v1", kind="RuntimeEnvironment", plural="runtime-environments")

_KNOWN = {
    (kind.api_version, kind.kind): kind
    for kind in (
        *(POD, SERVICE, SECRET, JOB, NAMESPACE, NODE, EVENT, RESOURCE_QUOTA, CRD),
        *(RUNTIME_POOL, RUNTIME_ENVIRONMENT),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ref:
    """One object by its name; which of those that had this name one after the other, its uid says.

    Raises:
        Refused: the name or the namespace cannot be one, or a namespace is missing or too many; nothing was sent.

    """

    kind: Kind
    namespace: str | None = None
    name: str

    def __post_init__(self) -> None:
        _fit(self.name)
        if self.kind.namespaced != (self.namespace is not None):
            raise Refused(f"{self.kind} {self.name!r} {'needs a' if self.kind.namespaced else 'has no'} namespace")
        if self.namespace is not None:
            _fit(self.namespace)

    @property
    def path(self) -> str:
        """The object's own path."""
        return f"{self.kind.path(self.namespace)}/{quote(self.name, safe='')}"

    def __str__(self) -> str:
        return f"{self.kind} {self.namespace}/{self.name}" if self.namespace else f"{self.kind} {self.name}"


def kind_of(obj: Object) -> Kind:
    """The kind that an object says it is of.

    Raises:
        Refused: it is none of the kinds named here; the caller states the kind.

    """
    stated = (str(obj.get("apiVersion")), str(obj.get("kind")))
    if stated not in _KNOWN:
        raise Refused(f"an object says that it is a {stated[1]} of {stated[0]}, a kind that orca-infra does not know")
    return _KNOWN[stated]


def ref_of(obj: Object, kind: Kind | None = None) -> Ref:
    """The name by which an object is found; `kind` where it is none of those named here.

    Raises:
        Refused: the object states no name, or no known kind.

    """
    metadata = obj.get("metadata") or {}
    return Ref(kind=kind or kind_of(obj), namespace=metadata.get("namespace"), name=str(metadata.get("name") or ""))


def _fit(segment: str) -> str:
    if _UNFIT_SEGMENT.search(segment):
        raise Refused(f"{segment!r} cannot be the name of an object")
    return segment
