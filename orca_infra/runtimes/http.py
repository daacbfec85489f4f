"""The runtimes over HTTP: launch, look, list, extend, stop, usage. The only importer of starlette.

A request touches Postgres and the Kubernetes API only. Nothing is kept in the process, so that any number of them may serve;
none needs the loop's lead. What blocks runs in threads; waiting for a Pod does not hold one.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import asdict, dataclass
from datetime import datetime
from difflib import get_close_matches
from typing import Any, TypeGuard
from uuid import UUID

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route

from orca_infra.errors import AuthFailed, OrcaError, QuotaExceeded, Refused, Transient, UserError
from orca_infra.kube.errors import Busy
from orca_infra.metrics import METRICS
from orca_infra.runtimes.callers import Caller, Callers
from orca_infra.runtimes.launch import LaunchHands, LaunchRequest, launch
from orca_infra.runtimes.living import (
    Runtime,
    end_runtime,
    extend_runtime,
    find_runtime,
    list_runtimes,
    read_usage,
)
from orca_infra.runtimes.openapi import LAUNCH_FIELDS, openapi
from orca_infra.runtimes.render import USER_LABEL, user_label

#: A Secret has at most 1 MiB, which is somewhat more as JSON.
BODY_BYTES = 4 << 20
WAIT_MOST_SECONDS = 300.0
_POLL_SECONDS = 0.25
_RETRY_SECONDS = 1
_TEXT_FIELDS = frozenset({"environment", "user", "pool", "idempotency_key"})
_CODES: tuple[tuple[type[OrcaError], int], ...] = (
    (QuotaExceeded, 429),
    (Refused, 422),
    (UserError, 422),
    (AuthFailed, 503),  # this program's rights on the cluster, not the caller's
    (Transient, 503),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Face:
    hands: LaunchHands
    callers: Callers
    is_stopping: Callable[[], bool]


class _Said(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, kind: str, message: str) -> None:
        super().__init__(message)
        self.code, self.kind = code, kind


def make_app(hands: LaunchHands, callers: Callers, *, is_stopping: Callable[[], bool] = lambda: False) -> Starlette:
    """The application, for any ASGI server. Once the process `is_stopping`, waits are answered with what there is."""
    face = _Face(hands=hands, callers=callers, is_stopping=is_stopping)

    def guarded(handler: Callable[[_Face, Request, Caller], Awaitable[Response]]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await _answered(face, request, handler)

        return endpoint

    async def document(_: Request) -> Response:
        return JSONResponse(openapi())

    async def alive(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> Response:
        try:
            await run_in_threadpool(_reach, face)
        except OrcaError as error:
            return _error(503, type(error).__name__, str(error))
        return JSONResponse({"status": "ok"})

    async def measured(request: Request) -> Response:
        text, media_type = METRICS.exposition(request.headers.get("Accept", ""))
        return Response(text, headers={"Content-Type": media_type})

    routes = [
        Route("/v1/runtimes", guarded(_launch), methods=["POST"]),
        Route("/v1/runtimes", guarded(_list), methods=["GET"]),
        Route("/v1/runtimes/{id}", guarded(_look), methods=["GET"]),
        Route("/v1/runtimes/{id}", guarded(_stop), methods=["DELETE"]),
        Route("/v1/runtimes/{id}/extend", guarded(_extend), methods=["POST"]),
        Route("/v1/usage", guarded(_usage), methods=["GET"]),
        Route("/v1/me", guarded(_me), methods=["GET"]),
        Route("/openapi.json", document),
        Route("/healthz", alive),
        Route("/readyz", ready),
        Route("/metrics", measured),
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _not_served})


async def _answered(
    face: _Face, request: Request, handler: Callable[[_Face, Request, Caller], Awaitable[Response]]
) -> Response:
    try:
        return await handler(face, request, await _caller(face, request))
    except _Said as said:
        return _error(said.code, said.kind, str(said))
    except ClientDisconnect:
        return Response(status_code=499)
    except OrcaError as error:
        code = next((code for kind, code in _CODES if isinstance(error, kind)), 500)
        after = error.retry_after_seconds if isinstance(error, Busy) else None
        return _error(code, type(error).__name__, str(error), retry_after=after)
    except Exception as error:  # noqa: BLE001 - it is said without its words, which may quote anything
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        line = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else ""
        face.hands.log.warning("request failed", path=request.url.path, error=type(error).__name__, where=line)
        return _error(500, "Error", "a fault of this program; its log says where")


async def _caller(face: _Face, request: Request) -> Caller:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    caller = None
    if scheme.lower() == "bearer" and token.strip():
        caller = await run_in_threadpool(face.callers.find, token.strip())
    if caller is None:
        raise _Said(401, "Unauthorized", "a bearer token of a known user is needed: Authorization: Bearer TOKEN")
    return caller


async def _launch(face: _Face, request: Request, caller: Caller) -> Response:
    wait_seconds = _wait_of(request)
    body = await _body(request)
    asked = launch_request(body, caller, key=request.headers.get("Idempotency-Key"))
    made = await run_in_threadpool(launch, face.hands, asked)
    shown: dict[str, Any] = {
        "id": str(made.id),
        "user": asked.user,
        "environment": asked.environment,
        "pod": made.pod,
        "namespace": made.namespace,
        "address": made.address,
        "warm": made.warm,
        "state": "ready",
        "expires_at": _time(made.expires_at),
        "pool": made.pool,
        "assigned_at": _time(made.assigned_at),
        "ended_at": None,
        "burning_rate": made.burning_rate,
        "credits": made.credits,
        "message": "",
    }
    if not made.warm:
        found = await _wait(face, made.id, asked.user, wait_seconds)
        shown = {**shown, "state": "starting", **(show(found) if found else {})}
    headers = {"Location": f"/v1/runtimes/{made.id}"}
    return JSONResponse(shown, 201, headers)


async def _look(face: _Face, request: Request, caller: Caller) -> Response:
    wait_seconds = _wait_of(request)
    found = await _wait(face, _id_of(request), _scope(caller), wait_seconds)
    if found is None:
        raise _none(request)
    return JSONResponse(show(found))


async def _list(face: _Face, request: Request, caller: Caller) -> Response:
    user = request.query_params.get("user") or (None if caller.launcher else caller.user)
    if user is not None:
        _check_user(caller, user)
    found = await run_in_threadpool(list_runtimes, face.hands.database, user)
    return JSONResponse({"runtimes": [show(one) for one in found]})


async def _stop(face: _Face, request: Request, caller: Caller) -> Response:
    id_ = _id_of(request)

    def stop() -> bool:
        mine = find_runtime(face.hands.database, id_, _scope(caller))
        return mine is not None and end_runtime(face.hands, id_)

    if not await run_in_threadpool(stop):
        raise _none(request, "which lives")
    return Response(status_code=204)


async def _extend(face: _Face, request: Request, caller: Caller) -> Response:
    id_, body = _id_of(request), await _body(request)
    _check_fields(body, ("seconds",), "an extension")
    seconds = body.get("seconds")
    if not _is_number(seconds):
        raise _Said(400, "BadRequest", "'seconds' must be a number")

    def extend() -> Runtime | None:
        if find_runtime(face.hands.database, id_, _scope(caller)) is None:
            return None
        return extend_runtime(face.hands, id_, float(seconds), within_cull=not caller.launcher)

    found = await run_in_threadpool(extend)
    if found is None:
        raise _none(request, "which lives")
    return JSONResponse(show(found))


async def _usage(face: _Face, request: Request, caller: Caller) -> Response:
    user = request.query_params.get("user") or caller.user
    _check_user(caller, user)
    lines = await run_in_threadpool(read_usage, face.hands.database, user)
    return JSONResponse(
        {
            "user": user,
            "credits": sum(line.credits for line in lines),
            "seconds": sum(line.seconds for line in lines),
            "running": sum(line.ended_at is None for line in lines),
            "runtimes": [{name: _plain(value) for name, value in asdict(line).items()} for line in lines],
        }
    )


async def _me(_face: _Face, _request: Request, caller: Caller) -> Response:
    label = f"{USER_LABEL}={user_label(caller.user)}"
    return JSONResponse({"user": caller.user, "launcher": caller.launcher, "secret_label": label})


def launch_request(body: dict[str, Any], caller: Caller, *, key: str | None = None) -> LaunchRequest:
    """What a body asks for. A message names fields, never values of secrets. `key` is the header's."""
    _check_fields(body, LAUNCH_FIELDS, "a launch")
    given = {name: value for name, value in body.items() if value is not None}
    for name, value in given.items():
        if name in _TEXT_FIELDS:
            if not value or not _is_text(value) or "\0" in value:
                raise _Said(400, "BadRequest", f"{name!r} must be a text that is not empty")
        elif name == "resources" and isinstance(value, dict):  # 2 and "2" are quantities, as in a manifest
            if not all(_is_text(key) and (_is_text(inner) or _is_number(inner)) for key, inner in value.items()):
                raise _Said(400, "BadRequest", f"{name!r} must be an object whose values are quantities")
        elif not isinstance(value, dict) or not all(_is_text(key) and _is_text(inner) for key, inner in value.items()):
            raise _Said(400, "BadRequest", f"{name!r} must be an object whose values are texts")
    if "environment" not in given:
        raise _Said(400, "BadRequest", "'environment' is missing: the RuntimeEnvironment, by name")
    user = given.get("user", caller.user)
    _check_user(caller, user)
    own_key = given.get("idempotency_key")
    if own_key and key and own_key != key:
        raise _Said(400, "BadRequest", "'idempotency_key' and the header Idempotency-Key are not the same")
    return LaunchRequest(
        environment=given["environment"],
        user=user,
        requests={what: str(much) for what, much in given["resources"].items()} if "resources" in given else None,
        node_selector=given.get("node_selector"),
        pool=given.get("pool"),
        secrets=given.get("secrets", {}),
        idempotency_key=own_key or key or None,
    )


def show(runtime: Runtime) -> dict[str, Any]:
    """A runtime as answers have it."""
    return {
        "id": str(runtime.id),
        "user": runtime.user,
        "environment": runtime.environment,
        "pod": runtime.pod,
        "namespace": runtime.namespace,
        "address": runtime.address,
        "warm": runtime.warm,
        "state": runtime.state,
        "expires_at": _time(runtime.expires_at),
        "pool": runtime.pool,
        "assigned_at": _time(runtime.assigned_at),
        "ended_at": _time(runtime.ended_at),
        "burning_rate": runtime.burning_rate,
        "credits": runtime.credits,
        "message": runtime.message,
    }


async def _wait(face: _Face, id_: UUID, user: str | None, seconds: float) -> Runtime | None:
    """The runtime, as soon as it is no longer starting, the time is over, or this process is to stop."""
    until = time.monotonic() + seconds
    while True:
        found = await run_in_threadpool(find_runtime, face.hands.database, id_, user)
        left = until - time.monotonic()
        if found is None or found.state != "starting" or left <= 0 or face.is_stopping():
            return found
        await asyncio.sleep(min(_POLL_SECONDS, left))


async def _body(request: Request) -> dict[str, Any]:
    pieces, size = [], 0
    async for piece in request.stream():
        size += len(piece)
        if size > BODY_BYTES:
            raise _Said(413, "TooLarge", f"the body is larger than {BODY_BYTES} bytes")
        pieces.append(piece)
    try:
        found = json.loads(b"".join(pieces))
    except (ValueError, RecursionError):
        raise _Said(400, "BadRequest", "the body is no JSON") from None
    if not isinstance(found, dict):
        raise _Said(400, "BadRequest", "the body must be a JSON object")
    return found


def _is_text(value: object) -> bool:
    """Whether it is a text of whole characters: JSON can write halves of one."""
    try:
        return isinstance(value, str) and bool(value.encode() or True)
    except UnicodeEncodeError:
        return False


def _is_number(value: object) -> TypeGuard[int | float]:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # more digits than a float has
        return False


def _check_fields(body: dict[str, Any], fields: Collection[str], what: str) -> None:
    for name in body:
        if name not in fields:
            near = get_close_matches(name, fields, 1)
            meant = f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(fields)}"
            raise _Said(400, "BadRequest", f"{name!r} is no field of {what}{meant}")


def _wait_of(request: Request) -> float:
    text = request.query_params.get("wait", "0")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= WAIT_MOST_SECONDS:
        raise _Said(400, "BadRequest", f"wait must be seconds, from 0 to {WAIT_MOST_SECONDS:g}")
    return seconds


def _id_of(request: Request) -> UUID:
    try:
        return UUID(request.path_params["id"])
    except ValueError:
        raise _none(request) from None


def _scope(caller: Caller) -> str | None:
    """Whose runtimes a caller can name: another's is not there, and nothing tells it from one that is not."""
    return None if caller.launcher else caller.user


def _check_user(caller: Caller, user: str) -> None:
    if "\0" in user:
        raise _Said(400, "BadRequest", "'user' must be a text without NUL characters")
    if user != caller.user and not caller.launcher:
        raise _Said(403, "Forbidden", f"the token is {caller.user}'s, and not for runtimes of {user}")


def _none(request: Request, which: str = "") -> _Said:
    return _Said(404, "NotFound", f"there is no runtime {request.path_params['id']}{', ' if which else ''}{which}")


def _reach(face: _Face) -> None:
    with face.hands.database.snapshot() as transaction:
        transaction.value("select 1")


def _not_served(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    words = {404: "there is nothing here", 405: f"{request.method} is not for this path"}
    said = f"{words.get(code, 'it cannot be served')}; /openapi.json says what there is"
    methods = {
        method
        for route in request.app.routes
        if code == 405 and route.matches(request.scope)[0] is not Match.NONE
        for method in route.methods - {"HEAD"}
    }
    return _error(code, "NotServed", said, allowed=", ".join(sorted(methods)))


def _error(code: int, kind: str, message: str, *, retry_after: float | None = None, allowed: str = "") -> Response:
    headers = {"Allow": allowed} if allowed else {}
    if code == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if code in {429, 503}:
        headers["Retry-After"] = str(math.ceil(retry_after or _RETRY_SECONDS))
    return JSONResponse({"error": {"kind": kind, "message": message}}, code, headers)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return _time(value)
    return value if isinstance(value, str | int | float | None) else str(value)


def _time(moment: Any) -> str | None:
    return moment.isoformat() if moment is not None else None
