"""Asks an image's registry for the architectures that the image has variants for.

The registry's protocol is https://github.com/opencontainers/distribution-spec, its tokens
https://distribution.github.io/distribution/spec/auth/token/. What a registry answers is believed as far as its digests hold,
its sizes are bounded and it comes in time; anything else is an error, which keeps no machine from being made.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from email.message import Message
from http.client import HTTPException
from typing import Any

from orca_infra.errors import AuthFailed, OrcaError, QuotaExceeded, Refused, Transient
from orca_infra.machines.image_credentials import Login, login_for

_INDEXES = frozenset(
    {"application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"}
)
_MANIFESTS = frozenset(
    {"application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"}
)
_ACCEPT = ", ".join(sorted(_INDEXES | _MANIFESTS))
_BYTES_MAX = 4 * 1024 * 1024
_CALL_SECONDS = 10.0
_WHOLE_SECONDS = 15.0
_ERROR_KEPT_SECONDS = 60.0
_REDIRECTS_MAX = 5
_CALLS_MAX = 40  # of one question, whatever the registry makes of it
_DEPTH_MAX = 2
_VARIANTS_MAX = 20  # that do not state their platform and have to be looked into

_HUB = "registry-1.docker.io"
_HUB_NAMES = frozenset({"docker.io", "index.docker.io", _HUB})
_LOOPBACK = re.compile(r"(?:localhost|127\.[0-9.]+|\[::1\])(?::[0-9]+)?")
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9a-fA-F:]+\])(?::[0-9]{1,5})?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_DIGEST = re.compile(r"(sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128})")
_ARCHITECTURE = re.compile(r"[a-z0-9_]{1,32}")
_CHALLENGE = re.compile(r'([a-z_]+)="([^"]*)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An image's name in parts; `reference` is a tag or a digest."""

    host: str
    repository: str
    reference: str

    @property
    def base(self) -> str:
        """The address of its repository. A registry on this very machine is spoken to in plain text, as Docker does."""
        return f"{'http' if _LOOPBACK.fullmatch(self.host) else 'https'}://{self.host}/v2/{self.repository}"

    def __str__(self) -> str:
        return f"{self.host}/{self.repository}{'@' if ':' in self.reference else ':'}{self.reference}"


def parse_image(text: str) -> Image:
    """The parts of `[HOST/]REPOSITORY[:TAG][@DIGEST]`. Raises Refused when it is no image's name."""
    name, _, digest = text.partition("@")
    host, slash, rest = name.partition("/")
    if not slash or not ("." in host or ":" in host or host == "localhost"):
        host, rest = "docker.io", name
    repository, colon, tag = rest.partition(":")
    if host in _HUB_NAMES:
        host, repository = _HUB, repository if "/" in repository else f"library/{repository}"
    reference = digest or (tag if colon else "latest")
    good = _HOST.fullmatch(host) and _REPOSITORY.fullmatch(repository)
    if not good or not (_DIGEST if digest else _TAG).fullmatch(reference):
        raise Refused(f"{text!r} is no image's name, such as registry.example/orca-worker:1")
    return Image(host=host, repository=repository, reference=reference)


@dataclass(slots=True)
class _Answer:
    architectures: frozenset[str] | None = None
    error: OrcaError | None = None
    at: float = 0


@dataclass(slots=True)
class RegistryArchitectures:
    """The port of `registry.ImageArchitectures`: an answer is kept, as is an error, though not as long.

    Attributes:
        kept_seconds: how long (ORCA_POOL_IMAGE_SECONDS): a tag can be pushed again.
        logins: gives the login for a registry's host, or None.
        whole_seconds: how long one question may take, whatever the registry does.

    """

    kept_seconds: float = 600
    logins: Callable[[str], Login | None] = login_for
    whole_seconds: float = _WHOLE_SECONDS
    clock: Callable[[], float] = time.monotonic
    _kept: dict[str, _Answer] = field(default_factory=dict)
    _asking: dict[str, threading.Thread] = field(default_factory=dict)

    def __call__(self, image: str) -> frozenset[str] | None:
        """The architectures that the image has variants for, as Go names them.

        Raises Refused (no such image, an answer that cannot be), AuthFailed, QuotaExceeded and Transient.
        """
        kept = self._kept.get(image)
        if kept is not None:
            limit = self.kept_seconds if kept.error is None else min(_ERROR_KEPT_SECONDS, self.kept_seconds)
            if self.clock() - kept.at < limit:
                if kept.error is not None:
                    raise kept.error
                return kept.architectures
        answer = self._ask(image)
        answer.at = self.clock()
        self._kept[image] = answer
        if answer.error is not None:
            raise answer.error
        return answer.architectures

    def _ask(self, image: str) -> _Answer:
        """On a thread of its own: a registry that sends a byte now and then must not hold up the loop."""
        late = Transient(f"the registry of {image} did not answer within {self.whole_seconds:g} s")
        earlier = self._asking.get(image)
        if earlier is not None and earlier.is_alive():
            return _Answer(error=late)
        answer = _Answer(error=late)

        def ask() -> None:
            try:
                found = _Question(parse_image(image), self.logins, self.whole_seconds).architectures()
                answer.architectures, answer.error = found, None
            except OrcaError as error:
                answer.error = error
            except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
                answer.error = Refused(f"the registry of {image} gave an answer that cannot be: {type(error).__name__}")

        thread = self._asking[image] = threading.Thread(target=ask, name="registry", daemon=True)
        thread.start()
        thread.join(self.whole_seconds)
        return _Answer(architectures=answer.architectures, error=answer.error)


class _Question:
    """One image asked for: its calls, their number and time bounded, and the token that they carry."""

    def __init__(self, image: Image, logins: Callable[[str], Login | None], whole_seconds: float) -> None:
        self._image = image
        self._logins = logins
        self._deadline = time.monotonic() + whole_seconds
        self._calls = 0
        self._authorization = ""
        self._looked_into = 0

    def architectures(self) -> frozenset[str]:
        return frozenset(self._of_manifest(self._image.reference, 0))

    def _of_manifest(self, reference: str, depth: int) -> set[str]:
        body, headers = self._get(f"{self._image.base}/manifests/{reference}", _ACCEPT)
        claimed = headers.get("Docker-Content-Digest", "")
        for digest in {reference, claimed}:
            if _DIGEST.fullmatch(digest):
                _check_digest(body, digest, str(self._image))
        manifest = _json(body, str(self._image))
        kind = manifest.get("mediaType") or headers.get_content_type()
        if kind in _INDEXES or (kind not in _MANIFESTS and "manifests" in manifest):
            return self._of_index(manifest, depth)
        if kind in _MANIFESTS or "config" in manifest:
            return self._of_config(manifest)
        raise Refused(f"{self._image} is no image of a kind that is known ({str(kind)[:100]})")

    def _of_index(self, index: Mapping[str, Any], depth: int) -> set[str]:
        found: set[str] = set()
        for entry in index["manifests"]:
            if _is_attestation(entry):
                continue
            platform = entry.get("platform")
            if platform:
                found |= _linux(platform)
            elif depth < _DEPTH_MAX and self._looked_into < _VARIANTS_MAX and _DIGEST.fullmatch(entry["digest"]):
                self._looked_into += 1
                found |= self._of_manifest(entry["digest"], depth + 1)
        return found

    def _of_config(self, manifest: Mapping[str, Any]) -> set[str]:
        digest = manifest["config"]["digest"]
        if not _DIGEST.fullmatch(digest):
            raise Refused(f"{self._image}: its configuration has no digest that is known")
        body, _ = self._get(f"{self._image.base}/blobs/{digest}", "*/*")
        _check_digest(body, digest, str(self._image))
        return _linux(_json(body, str(self._image)))

    def _get(self, url: str, accept: str) -> tuple[bytes, Message[str, str]]:
        """A GET with a login when it is asked for, once; redirects are followed without it."""
        status, body, headers = self._call(url, {"Accept": accept, **self._authorized()})
        if status == 401:
            self._log_in(headers.get_all("WWW-Authenticate") or [])
            status, body, headers = self._call(url, {"Accept": accept, **self._authorized()})
        if status == 200:
            return body, headers
        raise _refusal(status, f"{self._image}: its registry answered {status}")

    def _authorized(self) -> dict[str, str]:
        return {"Authorization": self._authorization} if self._authorization else {}

    def _log_in(self, challenges: list[str]) -> None:
        login = self._logins(self._image.host)
        for challenge in challenges:
            scheme, _, rest = challenge.partition(" ")
            if scheme.lower() == "bearer":
                self._authorization = f"Bearer {self._token(dict(_CHALLENGE.findall(rest)), login)}"
                return
            if scheme.lower() == "basic" and login is not None:
                self._authorization = login.basic
                return
        raise AuthFailed(f"{self._image}: its registry asks for a login; `docker login {self._image.host}` keeps one")

    def _token(self, challenge: Mapping[str, str], login: Login | None) -> str:
        realm = challenge.get("realm", "")
        is_plain = self._image.base.startswith("http:")
        if not realm.startswith("https://" if not is_plain else ("http://", "https://")):
            raise Refused(f"{self._image}: its registry names no place for tokens that may be asked")
        query = {"scope": f"repository:{self._image.repository}:pull"}
        if challenge.get("service"):
            query["service"] = challenge["service"]
        url = f"{realm}{'&' if '?' in realm else '?'}{urllib.parse.urlencode(query)}"
        status, body, _ = self._call(url, {"Authorization": login.basic} if login else {})
        if status != 200:
            raise _refusal(status, f"{self._image}: the place that its registry gets tokens from answered {status}")
        answer = _json(body, str(self._image))
        token = answer.get("token") or answer.get("access_token")
        if not isinstance(token, str) or not re.fullmatch(r"[\x21-\x7e]+", token):
            raise Refused(f"{self._image}: the place that its registry gets tokens from gave none")
        return token

    def _call(self, url: str, headers: dict[str, str]) -> tuple[int, bytes, Message[str, str]]:
        for _ in range(_REDIRECTS_MAX + 1):
            status, body, answered = self._call_once(url, headers)
            target = answered.get("Location")
            if status not in {301, 302, 303, 307, 308} or not target:
                return status, body, answered
            target = urllib.parse.urljoin(url, target)
            here, there = urllib.parse.urlsplit(url), urllib.parse.urlsplit(target)
            if there.scheme != "https" and (there.scheme, here.scheme) != ("http", "http"):
                raise Refused(f"{self._image}: its registry sends to an address that is not secure")
            if (here.scheme, here.netloc) != (there.scheme, there.netloc):
                headers = {name: value for name, value in headers.items() if name != "Authorization"}
            url = target
        raise Refused(f"{self._image}: its registry sends from one place to the next")

    def _call_once(self, url: str, headers: dict[str, str]) -> tuple[int, bytes, Message[str, str]]:
        self._calls += 1
        left = self._deadline - time.monotonic()
        if self._calls > _CALLS_MAX or left <= 0:
            raise Transient(f"{self._image}: its registry takes too many calls or too long")
        request = urllib.request.Request(url, headers={"User-Agent": "orca-infra", **headers})  # noqa: S310  (checked)
        try:
            with _OPENER.open(request, timeout=min(_CALL_SECONDS, left)) as answer:
                return answer.status, self._read(answer), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, b"", error.headers
        except (OSError, HTTPException, ValueError) as error:
            # Its words may hold an address with a signature in it: the kind says enough.
            reason = getattr(error, "reason", error)
            why = reason.strerror if isinstance(reason, OSError) and reason.strerror else type(reason).__name__
            raise Transient(f"{self._image}: its registry could not be reached: {why}") from error

    def _read(self, answer: Any) -> bytes:
        parts: list[bytes] = []
        size = 0
        while part := answer.read1(65536):
            size += len(part)
            if size > _BYTES_MAX:
                raise Refused(f"{self._image}: its registry's answer is larger than {_BYTES_MAX} bytes")
            if time.monotonic() > self._deadline:
                raise Transient(f"{self._image}: its registry's answer takes too long")
            parts.append(part)
        return b"".join(parts)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leaves redirects to the caller, which drops the login."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirect)


def _check_digest(body: bytes, digest: str, image: str) -> None:
    algorithm, _, wanted = digest.partition(":")
    if hashlib.new(algorithm, body).hexdigest() != wanted:
        raise Refused(f"{image}: what its registry gave has another digest than was asked for")


def _json(body: bytes, image: str) -> dict[str, Any]:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refused(f"{image}: its registry's answer is no JSON") from error
    if not isinstance(value, dict):
        raise Refused(f"{image}: its registry's answer is no object")
    return value


def _is_attestation(entry: Mapping[str, Any]) -> bool:
    """What BuildKit adds beside each variant: signed statements, of no platform."""
    return (entry.get("annotations") or {}).get("vnd.docker.reference.type") == "attestation-manifest"


def _linux(platform: Mapping[str, Any]) -> set[str]:
    architecture = platform.get("architecture")
    is_known = isinstance(architecture, str) and _ARCHITECTURE.fullmatch(architecture) and architecture != "unknown"
    return {str(architecture)} if is_known and platform.get("os") == "linux" else set()


def _refusal(status: int, said: str) -> OrcaError:
    if status in {401, 403}:
        return AuthFailed(f"{said}: no rights to this image, or it does not exist; `docker login` keeps a login")
    if status == 429:
        return QuotaExceeded(f"{said}: too many requests; a login may allow more")
    if 400 <= status < 500:
        return Refused(f"{said}: no such image; mend `image` of the pool")
    return Transient(said)
