"""What the Kubernetes API can answer that a caller tells apart, beyond the meanings of orca_infra.errors.

OrcaError
├── Refused
│   ├── NamespaceMissing     the namespace is not there, or is being deleted
│   └── KindMissing          the API server does not serve this kind: its CRD is not installed
├── Transient
│   ├── Busy                 429, or 503: says after how long to try again
│   ├── Expired              410: this version or continuation is forgotten; list anew
│   ├── Silent               a stream in which nothing was heard for too long
│   └── ContainerWaiting     the log of a container that has not started yet
└── Conflict
    └── ObjectMissing        the object that was to be changed, or whose log was to be read, is not there

A Transient from a write says nothing about whether it was carried out: the caller observes anew.
"""

from __future__ import annotations

from orca_infra.errors import Conflict, Refused, Transient


class NamespaceMissing(Refused):
    """The namespace is not there or is going away; the caller makes nothing in it until it is back."""


class KindMissing(Refused):
    """The API server serves no such kind; the caller has the base stack applied, which brings the CRD."""


class Busy(Transient):
    """The API server asks to be left alone for a while.

    Attributes:
        retry_after_seconds: for how long, as it says itself; None when it does not say.

    """

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Expired(Transient):
    """The version or continuation that was given is forgotten; the caller lists anew."""


class Silent(Transient):
    """Nothing was heard in a stream for longer than allowed; the caller connects anew."""


class ContainerWaiting(Transient):
    """The container has not started, so it has no log yet; the caller tries again later."""


class ObjectMissing(Conflict):
    """The object is not there (any more); the caller observes anew."""
