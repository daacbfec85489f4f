"""Google's compute API as the `gcp` provider needs it: five calls over REST, with google-auth's credentials.

Not google-cloud-compute: it registers google.rpc.Status, as Pulumi's SDK does too, and protobuf refuses the second of them in
one process; besides it takes 4 s and 170 MB to import, and its 1.57 has no returnPartialSuccess.

No call is repeated here and each has a deadline: the next pass asks again. What could not be read is never taken for empty.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

from orca_infra.errors import AuthFailed, OrcaError, Transient
from orca_infra.machines.model import MachineState, SeenMachine
from orca_infra.machines.providers.gcp_errors import classify

GOOGLE = "https://compute.googleapis.com/compute/v1"

#: Instances that carry this label, of whatever stack: ours, our strays, and whose names could collide with ours.
_FILTER = "labels.orca-stack:*"
_SCOPE = "https://www.googleapis.com/auth/compute"
_CONNECT_SECONDS = 10.0
_CALL_SECONDS = 30.0
_PAGE = 500
_PAGES_MAX = 200
_CONSOLE_BYTES = 65536
_POLL_SECONDS = 0.5
_NOT_FOUND = 404
_FIRST_ERROR = 400

# https://cloud.google.com/compute/docs/instances/instance-lifecycle
_RUNNING = frozenset({"PROVISIONING", "STAGING", "RUNNING", "REPAIRING"})
_WHOLE = frozenset({"", "NO_RESULTS_ON_PAGE"})

_Machines = list[SeenMachine]  # named here: inside the class below, `list` is its verb
_Json = dict[str, Any]


class _Missing(Exception):
    """Google says 404 of the very instance or operation that was asked for, and not of its project or zone."""


class ComputeApi:
    """One project's instances. Every verb raises by meaning, as the port says."""

    def __init__(self, project: str, endpoint: str = "") -> None:
        """`endpoint`: another than Google's; over plain http no credentials are sent, as to the fake of the tests.

        Raises AuthFailed when there are no credentials.
        """
        self._base = f"{(endpoint or GOOGLE).rstrip('/')}/projects/{project}"
        self._session = _session(is_anonymous=endpoint.startswith("http://"))

    def list(self, zones: Collection[str] = ()) -> _Machines:
        """Every instance that carries a stack's label, in all zones.

        `zones`: those that matter; none named: all do. Raises Transient when one of them could not be read.
        """
        found: _Machines = []
        query = {"filter": _FILTER, "maxResults": str(_PAGE), "returnPartialSuccess": "true"}
        for _ in range(_PAGES_MAX):
            page = self._call("GET", "/aggregated/instances", query)
            _check_whole(page, zones)
            for scope in page.get("items", {}).values():
                found += [_seen(instance) for instance in scope.get("instances", [])]
            if not page.get("nextPageToken"):
                return found
            query["pageToken"] = page["nextPageToken"]
        raise Transient(
            f"Google's list of instances has more than {_PAGES_MAX} pages of {_PAGE}, and none of it is used"
        )

    def get(self, name: str, zone: str) -> SeenMachine | None:
        """The instance of this name; None only when Google says 404 of it."""
        try:
            return _seen(self._call("GET", f"/zones/{zone}/instances/{name}"))
        except _Missing:
            return None

    def delete(self, uid: str, zone: str, *, wait_seconds: float) -> None:
        """Have this very instance deleted, by its id, which no other ever has; one that is gone is fine.

        Returns once it is gone, or after `wait_seconds` while Google is still at it.
        """
        with contextlib.suppress(_Missing):
            self._wait(zone, self._call("DELETE", f"/zones/{zone}/instances/{uid}"), wait_seconds)

    def relabel(self, uid: str, zone: str, labels: Mapping[str, str], *, wait_seconds: float) -> None:
        """Give this very instance these labels besides those it has; one that is gone is fine.

        Raises Transient when its labels were changed by somebody else meanwhile.
        """
        with contextlib.suppress(_Missing):
            instance = self._call("GET", f"/zones/{zone}/instances/{uid}")
            body = {
                "labels": {**instance.get("labels", {}), **labels},
                "labelFingerprint": instance.get("labelFingerprint", ""),
            }
            operation = self._call("POST", f"/zones/{zone}/instances/{uid}/setLabels", body=body)
            self._wait(zone, operation, wait_seconds)

    def console(self, name: str, zone: str) -> str:
        """The end of its first serial port's output; empty when there is no such instance."""
        query = {"port": "1", "start": str(-_CONSOLE_BYTES)}
        try:
            return str(self._call("GET", f"/zones/{zone}/instances/{name}/serialPort", query).get("contents", ""))
        except _Missing:
            return ""

    def _wait(self, zone: str, operation: _Json, wait_seconds: float) -> None:
        """Look at an operation until it is done or the time is over. Raises by meaning when it failed."""
        deadline = time.monotonic() + wait_seconds
        while True:
            errors = operation.get("error", {}).get("errors", [])
            if errors:
                raise classify(" ".join(f"{item.get('code')}: {item.get('message')}" for item in errors))
            if operation.get("status") == "DONE" or time.monotonic() >= deadline:
                return
            time.sleep(_POLL_SECONDS)
            operation = self._call("GET", f"/zones/{zone}/operations/{operation['name']}")

    def _call(
        self, method: str, path: str, query: Mapping[str, str] | None = None, *, body: _Json | None = None
    ) -> _Json:
        import google.auth.exceptions
        import requests

        try:
            answer = self._session.request(
                method,
                self._base + path,
                params=query,
                json=body,
                timeout=(_CONNECT_SECONDS, _CALL_SECONDS),
                allow_redirects=False,
            )
            value = answer.json() if answer.content else {}
        except google.auth.exceptions.GoogleAuthError as error:
            raise _auth_meaning(error) from error
        except (requests.RequestException, ValueError) as error:  # no answer, or one that is no JSON
            raise Transient(f"Google's API could not be reached: {type(error).__name__}: {error}") from error
        if answer.status_code < _FIRST_ERROR and isinstance(value, dict):
            return value
        said = _words(value)
        if answer.status_code == _NOT_FOUND and ("/instances/" in said or "/operations/" in said):
            raise _Missing
        raise classify(f"Error {answer.status_code}: {said}".strip())


@lru_cache(maxsize=8)
def compute_api(project: str, endpoint: str) -> ComputeApi:
    """The same session for the same project, so that its access token serves many passes. Raises AuthFailed."""
    return ComputeApi(project, endpoint)


def _session(*, is_anonymous: bool) -> Any:
    # Imported here: a third of a second, and only pools on Google Cloud need it.
    import google.auth
    import google.auth.exceptions
    import requests
    from google.auth.transport.requests import AuthorizedSession

    if is_anonymous:
        return requests.Session()
    try:
        credentials, _ = google.auth.default(scopes=[_SCOPE])
    except google.auth.exceptions.GoogleAuthError as error:
        raise _auth_meaning(error) from error
    return AuthorizedSession(credentials)


def _auth_meaning(error: Exception) -> OrcaError:
    import google.auth.exceptions

    if isinstance(error, google.auth.exceptions.TransportError):
        return Transient(f"Google's credentials could not be fetched: {error}")
    known = classify(str(error))
    return known if isinstance(known, AuthFailed) else classify(f"no credentials: {error}")


def _words(value: object) -> str:
    """Google's own words and reasons, of either form of its errors."""
    error = value.get("error") if isinstance(value, dict) else None
    if not isinstance(error, dict):
        return str(error or "")
    reasons = [
        str(item["reason"])
        for part in ("errors", "details")
        for item in error.get(part) or []
        if isinstance(item, dict) and item.get("reason")
    ]
    return ", ".join(dict.fromkeys([str(error.get("message", "")), *reasons]))


def _check_whole(page: _Json, zones: Collection[str]) -> None:
    """Raises Transient when the page lacks a place that matters, which looks like an empty one otherwise."""
    lacking = {str(scope).rpartition("/")[2] for scope in page.get("unreachables", [])}
    for scope, content in page.get("items", {}).items():
        if content.get("warning", {}).get("code", "") not in _WHOLE:
            lacking.add(scope.rpartition("/")[2])
    warning = page.get("warning", {})
    if warning.get("code", "") not in _WHOLE and not lacking:
        raise Transient(f"Google's list of instances is not whole: {warning.get('code')} {warning.get('message', '')}")
    if zones:
        lacking = {place for place in lacking if place in zones or place.count("-") < 2}  # a region has its zones
    if lacking:
        raise Transient(f"Google could not list the instances of {', '.join(sorted(lacking))}")


def _seen(instance: _Json) -> SeenMachine:
    scheduling = instance.get("scheduling", {})
    is_spot = scheduling.get("provisioningModel") == "SPOT" or bool(scheduling.get("preemptible"))
    if instance["status"] in _RUNNING:
        state = MachineState.RUNNING
    else:
        state = MachineState.PREEMPTED if is_spot else MachineState.STOPPED
    return SeenMachine(
        name=instance["name"],
        uid=str(instance["id"]),
        location=instance["zone"].rpartition("/")[2],
        type=instance["machineType"].rpartition("/")[2],
        state=state,
        created_at=datetime.fromisoformat(instance["creationTimestamp"]),
        labels=dict(instance.get("labels", {})),
    )
