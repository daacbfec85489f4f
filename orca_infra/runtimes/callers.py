"""Who asks over HTTP: bearer tokens, checked by the cluster (TokenReview) or against a file.

A token is kept nowhere: what is remembered is its SHA-256, for seconds.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from orca_infra.errors import OrcaError, SetupError, Transient
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import Kind, Object

TOKEN_REVIEW = Kind(api_version="authentication.k8s.io/v1", kind="TokenReview", plural="tokenreviews", namespaced=False)
#: How long the cluster's word on a token holds; a token that is revoked serves no longer than this.
REVIEW_SECONDS = 10.0
_TOKENS_MOST = 10_000
_TOKEN_CHARACTERS_MOST = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Whose token it is. A launcher may ask for anybody."""

    user: str
    launcher: bool = False


class Callers(Protocol):
    """Knows whose a token is."""

    def find(self, token: str) -> Caller | None:
        """None: nobody's. Raises Transient when that cannot be known now."""
        ...


class FileTokens:
    """Tokens from a file: a line `token,user` each, as the API server's own --token-auth-file begins; `#` begins a comment.

    A change of the file is seen with the next request. One that cannot be read then leaves the last good one in force.
    """

    def __init__(self, path: Path, launchers: Collection[str] = ()) -> None:
        """Raises SetupError when the file cannot be used."""
        self._path, self._launchers = path, frozenset(launchers)
        self._lock = threading.Lock()
        self._stamp = self._stamp_now()
        self._callers = self._read()

    def find(self, token: str) -> Caller | None:
        with self._lock:
            stamp = self._stamp_now()
            if stamp is not None and stamp != self._stamp:
                try:
                    self._callers = self._read()
                    self._stamp = stamp
                except SetupError:
                    pass
            return self._callers.get(_digest(token))

    def _stamp_now(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> dict[str, Caller]:
        try:
            lines = self._path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is no text"
            raise SetupError(f"ORCA_RUNTIMES_TOKENS names {self._path}, which cannot be read: {why}") from error
        callers = {}
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            token, _, rest = line.partition(",")
            user = rest.partition(",")[0].strip().strip('"')
            if not token.strip() or not user:
                raise SetupError(f"{self._path}:{number}: must be TOKEN,USER (what it is, is secret and not shown)")
            callers[_digest(token.strip())] = Caller(user=user, launcher=user in self._launchers)
        return callers


class ReviewedTokens:
    """Tokens of the cluster's own (ServiceAccounts, OIDC, …), by a TokenReview."""

    def __init__(
        self,
        kube: Kube,
        launchers: Collection[str] = (),
        *,
        audience: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`audience`: for whom a token has to be made; None: for the API server."""
        self._kube, self._launchers, self._audience, self._clock = kube, frozenset(launchers), audience, clock
        self._lock = threading.Lock()
        self._known: dict[str, tuple[float, Caller | None]] = {}

    def find(self, token: str) -> Caller | None:
        if len(token) > _TOKEN_CHARACTERS_MOST:
            return None
        digest, now = _digest(token), self._clock()
        with self._lock:
            known = self._known.get(digest)
        if known is not None and known[0] > now:
            return known[1]
        caller = self._review(token)
        with self._lock:
            if len(self._known) >= _TOKENS_MOST:
                self._known = {key: value for key, value in self._known.items() if value[0] > now}
            if len(self._known) < _TOKENS_MOST:
                self._known[digest] = (now + REVIEW_SECONDS, caller)
        return caller

    def _review(self, token: str) -> Caller | None:
        spec: Object = {"token": token, **({"audiences": [self._audience]} if self._audience else {})}
        review = {
            "apiVersion": TOKEN_REVIEW.api_version,
            "kind": TOKEN_REVIEW.kind,
            "metadata": {"name": "review"},
            "spec": spec,
        }
        try:
            status = self._kube.create(review, kind=TOKEN_REVIEW).get("status") or {}
        except OrcaError as error:  # its words are not passed on: they may quote what was sent
            raise Transient(f"the cluster does not review tokens now ({type(error).__name__})") from None
        fits = self._audience is None or self._audience in (status.get("audiences") or [])
        user = str((status.get("user") or {}).get("username") or "")
        if not status.get("authenticated") or not fits or not user:
            return None
        return Caller(user=user, launcher=user in self._launchers)


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode(errors="surrogateescape")).hexdigest()
