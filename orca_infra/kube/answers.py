"""From an answer of the API server to an error by its meaning; the one place that reads its words.

The API server explains itself in a `Status` object (k8s.io/apimachinery, pkg/apis/meta/v1). Codes alone do not tell enough:
a 403 is missing rights, a full quota or an object that a policy refuses, and a 404 is the object, its namespace or its kind.
What is no Status was answered by something else (a proxy, a login page) and says nothing about the object.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from orca_infra.errors import AuthFailed, Conflict, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.kube.decoding import decode
from orca_infra.kube.errors import Busy, ContainerWaiting, Expired, KindMissing, NamespaceMissing, ObjectMissing
from orca_infra.kube.kinds import SECRET, Kind, Object

_WORDS_CHARACTERS = 400
# kubernetes 1.36: pkg/registry/authorization and apiserver/pkg/endpoints/handlers/responsewriters/errors.go,
# pkg/registry/rbac/escalation_check.go, plugin/pkg/admission/gc/gc_admission.go
_NO_RIGHTS = re.compile(
    r'\bforbidden: User ".*" cannot |is attempting to grant RBAC permissions not currently held|'
    r"cannot set (?:blockOwnerDeletion|an ownerRef)"
)
# apiserver/pkg/admission/plugin/resourcequota/controller.go; `failed quota: q: must specify` is the object's own fault
_QUOTA_FULL = re.compile(r"is forbidden: exceeded quota: ")
_QUOTA_UNKNOWN = re.compile(r"is forbidden: status unknown for quota: ")
_WEBHOOK = re.compile(r'\Aadmission webhook "')
_WAITING = re.compile(r"is waiting to start")
# What the engine's provider and the Job controller pass on are words alone, without their code.
_TERMINATING = re.compile(r"because it is being terminated")
_NEVER_SENT = re.compile(r"cluster is unreachable|connection refused|no such host|no route to host")
_OUTAGE = re.compile(r"Internal error occurred|failed calling webhook|etcdserver|context deadline exceeded")
_TAKES_NOT = re.compile(
    r"is forbidden: |is invalid: |denied the request|strict decoding error|unknown field|failed to create typed patch"
    r"|cannot be handled as|json: cannot unmarshal|Apply failed with \d+ conflict|the server rejected our request"
)


class Refusal(StrEnum):
    """What it means, in words alone, that an object was not made.

    FINAL, QUOTA and RIGHTS are the API server's answer (400, 409, 422 or 403), ABSENT says that nothing was sent or that the
    namespace is not there, and after UNKNOWN the object may be there all the same.
    """

    FINAL = "final"
    QUOTA = "quota"
    RIGHTS = "rights"
    ABSENT = "absent"
    UNKNOWN = "unknown"


def refusal_of(message: str) -> Refusal:
    """What another program's words of a failed create mean; they quote the API server's."""
    if _NEVER_SENT.search(message) or _TERMINATING.search(message):
        return Refusal.ABSENT
    if _OUTAGE.search(message) or _QUOTA_UNKNOWN.search(message):
        return Refusal.UNKNOWN
    if _QUOTA_FULL.search(message):
        return Refusal.QUOTA
    if _NO_RIGHTS.search(message):
        return Refusal.RIGHTS
    return Refusal.FINAL if _TAKES_NOT.search(message) else Refusal.UNKNOWN


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is asked for, as messages name it.

    Attributes:
        verb: get, list, create, apply, patch, delete, watch or logs.
        kind: of what.
        namespace: where; None for all or for what lives in none.
        name: of one object; None for a collection.

    """

    verb: str
    kind: Kind
    namespace: str | None = None
    name: str | None = None

    def __str__(self) -> str:
        where = "/".join(part for part in (self.namespace, self.name) if part)
        return f"{self.verb} {self.kind}{' ' if where else ''}{where}"


def error_of(call: Call, code: int, body: bytes, retry_after: str | None = None) -> OrcaError:
    """The error that an answer other than a success means. `retry_after` is the header of this name."""
    status = _status(body)
    if status is None:
        return _from_elsewhere(call, code, body, retry_after)
    return error_of_status(call, code, status, retry_after)


def error_of_status(call: Call, code: int, status: Object, retry_after: str | None = None) -> OrcaError:
    """The error that a Status means, also one that comes in the middle of a watch."""
    message = str(status.get("message") or "")
    said = f"cannot {call}: {_words(call, status)} ({code} {status.get('reason') or 'without a reason'})"
    if code == 401:
        return AuthFailed(f"cannot {call}: the API server does not take the credentials (401 Unauthorized)")
    if code == 403:
        return _forbidden(said, message, status)
    if code == 404:
        return _not_found(call, said, status)
    if code == 409 or (code == 422 and any(cause.get("field") == "metadata.uid" for cause in _causes(status))):
        return Conflict(said)  # a patch for another uid is refused as a change of the uid (tried with 1.36)
    if code == 410 or status.get("reason") == "Expired":
        return Expired(said)
    if code == 400 and call.verb == "logs" and _WAITING.search(message):
        return ContainerWaiting(said)
    return _by_code(said, code, _seconds(retry_after) or _seconds(_details(status).get("retryAfterSeconds")))


def words(text: str) -> str:
    """Somebody else's words as they may stand in a message: one line, printable, of a bounded length."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return line if len(line) <= _WORDS_CHARACTERS else line[: _WORDS_CHARACTERS - 1] + "…"


def _forbidden(said: str, message: str, status: Object) -> OrcaError:
    if _WEBHOOK.search(message):  # somebody else's words, which may quote anything
        return Refused(said)
    if any(cause.get("reason") == "NamespaceTerminating" for cause in _causes(status)):
        return NamespaceMissing(said)
    if _QUOTA_FULL.search(message):
        return QuotaExceeded(said)
    if _QUOTA_UNKNOWN.search(message):  # the quota is so new that nobody has counted yet
        return Transient(said)
    return AuthFailed(said) if _NO_RIGHTS.search(message) else Refused(said)


def _not_found(call: Call, said: str, status: Object) -> OrcaError:
    details = _details(status)
    missing = (details.get("kind"), details.get("name"))
    if (
        call.name is not None
        and missing == (call.kind.plural, call.name)
        and details.get("group", "") == call.kind.group
    ):
        return ObjectMissing(said)
    if missing == ("namespaces", call.namespace):
        return NamespaceMissing(said)
    if not details.get("name"):
        return _kind_missing(call)
    return Refused(said)


def _kind_missing(call: Call) -> KindMissing:
    kind = f"{call.kind.plural} of {call.kind.api_version}"
    return KindMissing(f"cannot {call}: the cluster does not serve {kind} (404); is its CRD installed?")


def _from_elsewhere(call: Call, code: int, body: bytes, retry_after: str | None) -> OrcaError:
    said = f"cannot {call}: an answer {code} that is not the API server's own"
    if code == 404 and body.strip() == b"404 page not found":  # the API server's word for a path that nobody serves
        return _kind_missing(call)
    if code in (401, 403):
        return AuthFailed(said)
    if code in (400, 413):  # refused by size or form before it came to a Status
        return Refused(said)
    return _by_code(said, code if code == 429 or code >= 500 else 500, _seconds(retry_after))


def _by_code(said: str, code: int, retry_after_seconds: float | None) -> OrcaError:
    if code in (429, 503):
        return Busy(said, retry_after_seconds)
    if code == 408 or code >= 500 or code < 400:
        return Transient(said)
    return Refused(said)


def _words(call: Call, status: Object) -> str:
    """What the API server says; of Secrets only what cannot hold a value.

    It quotes what it refuses (`Invalid value: "..."`), and a webhook may quote the whole object. Denied rights and full
    quotas it words from names alone.
    """
    message = str(status.get("message") or "")
    told = _NO_RIGHTS.search(message) or _QUOTA_FULL.search(message)
    if call.kind != SECRET or (told and not _WEBHOOK.search(message)):
        return words(message)
    fields = [f"{cause.get('field')}: {cause.get('reason')}" for cause in _causes(status) if cause.get("field")]
    return words(", ".join(fields) or "in words that are kept back, since it is a Secret")


def _causes(status: Object) -> list[Object]:
    causes = _details(status).get("causes")
    return [cause for cause in causes if isinstance(cause, dict)] if isinstance(causes, list) else []


def _details(status: Object) -> Object:
    details = status.get("details")
    return details if isinstance(details, dict) else {}


def _status(body: bytes) -> Object | None:
    try:
        found = decode(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found.get("kind") == "Status" else None


def _seconds(text: object) -> float | None:
    try:
        found = float(str(text))
    except ValueError:
        return None
    return found if 0 < found < 86400 else None
