"""`pulumi-resource-orca`: the local cloud as a Pulumi provider, and a stack's identity as a resource.

    orca:index:Machine    folder, name, location, type, labels, environment, argv -> uid, created_at
    orca:index:Identity   id, stack: refuses, in every later preview and up, to become another id

A machine is born once: what it runs and finds around it never makes a difference to one that exists; another name, location
or type is another machine. `environment` is an input only and no output, so that the state holds it once, encrypted.

The SDK's own server answers an error with a traceback in the message; ours sends what the cloud said and nothing else, since
people read it and `stack/engine.py` looks for the code word in it.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

import grpc.aio
from pulumi.provider.experimental import provider
from pulumi.provider.experimental.property_value import PropertyValue
from pulumi.provider.experimental.server import ProviderServicer
from pulumi.runtime.proto import provider_pb2_grpc
from pulumi.runtime.rpc import UNKNOWN

from orca_infra import __version__
from orca_infra.errors import Conflict, OrcaError, Refused
from orca_infra.machines.model import SeenMachine
from orca_infra.machines.providers.local_cloud import LocalCloud, MachineRequest
from orca_infra.process import die_with_parent

MACHINE = "orca:index:Machine"
IDENTITY = "orca:index:Identity"

_KINDS: Mapping[str, Mapping[str, str]] = {
    MACHINE: {
        "folder": "text",
        "name": "text",
        "location": "text",
        "type": "text",
        "labels": "map",
        "environment": "map",
        "argv": "list",
    },
    IDENTITY: {"id": "text", "stack": "text"},
}
_REPLACES = ("name", "location", "type")
_CREATES_AT_ONCE = 32
_MESSAGE_BYTES = 400 * 1024 * 1024  # as the engine's own limit

_Properties = Mapping[str, PropertyValue]
T = TypeVar("T")


class LocalProvider(provider.Provider):
    """Answers the engine. The cloud's verbs block, so each runs in a thread of its own."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_CREATES_AT_ONCE, thread_name_prefix="cloud")

    async def get_schema(self, request: provider.GetSchemaRequest) -> provider.GetSchemaResponse:
        """The package's schema, from which SDKs could be made."""
        return provider.GetSchemaResponse(schema=json.dumps(schema()))

    async def configure(self, request: provider.ConfigureRequest) -> provider.ConfigureResponse:
        """Takes secrets as secrets. No previews of creates: what only a create knows is unknown in a preview."""
        return provider.ConfigureResponse(accept_secrets=True, supports_preview=False)

    async def check(self, request: provider.CheckRequest) -> provider.CheckResponse:
        """Whether every input is there and of its kind.

        A failure names its property in its words only: of one that it is told of, the engine prints the value too, and
        `environment` is secret.
        """
        kinds = _kinds(request.type)
        failures = [
            provider.CheckFailure("", f"{name} {failure}")
            for name, kind in kinds.items()
            if (failure := _check(request.new_inputs.get(name), kind))
        ]
        failures += [
            provider.CheckFailure("", f"there is no input {name}; there are {', '.join(kinds)}")
            for name in request.new_inputs
            if name not in kinds and not name.startswith("__")
        ]
        return provider.CheckResponse(inputs=request.new_inputs, failures=failures)

    async def diff(self, request: provider.DiffRequest) -> provider.DiffResponse:
        """What would change.

        Raises:
            Conflict: another id for a stack's identity.

        """
        old, new = request.old_state, request.new_inputs
        if request.type == IDENTITY:
            _check_same_identity(request.resource_id, new)
            return _diff(["stack"] if _differ(old, new, "stack") else [], [])
        replaces = [name for name in _REPLACES if _differ(old, new, name)]
        return _diff([*replaces, *(["labels"] if _differ(old, new, "labels") else [])], replaces)

    async def create(self, request: provider.CreateRequest) -> provider.CreateResponse:
        """Makes a machine; an identity is only written down."""
        inputs = request.properties
        if request.type == IDENTITY:
            return provider.CreateResponse(_text(inputs, "id"), {"stack": inputs["stack"]})
        wanted = MachineRequest(
            name=_text(inputs, "name"),
            location=_text(inputs, "location"),
            type=_text(inputs, "type"),
            labels=_text_map(inputs, "labels"),
            environment=_text_map(inputs, "environment"),
            argv=_text_list(inputs, "argv"),
        )
        cloud = _cloud(inputs)
        seen = await self._run(lambda: cloud.create(wanted))
        return provider.CreateResponse(seen.name, _outputs(inputs, seen))

    async def read(self, request: provider.ReadRequest) -> provider.ReadResponse:
        """What there is now; a machine that is gone, or of which only the name is left, has no id."""
        if request.type == IDENTITY:
            return provider.ReadResponse(request.resource_id, request.properties, request.inputs)
        if "folder" not in request.properties:
            raise Refused("INVALID_REQUEST: a machine of the local cloud cannot be imported; nothing tells its folder")
        cloud = _cloud(request.properties)
        seen = await self._run(lambda: cloud.get(request.resource_id))
        known = request.properties.get("uid")
        if seen is None or (known is not None and known.value != seen.uid):
            return provider.ReadResponse("", {}, {})
        return provider.ReadResponse(seen.name, _outputs(request.properties, seen), request.inputs)

    async def update(self, request: provider.UpdateRequest) -> provider.UpdateResponse:
        """Gives a machine other labels."""
        if request.type == IDENTITY:
            return provider.UpdateResponse({"stack": request.news["stack"]})
        labels = _text_map(request.news, "labels")
        cloud = _cloud(request.olds)
        seen = await self._run(lambda: cloud.relabel(request.resource_id, labels))
        return provider.UpdateResponse(_outputs(request.olds, seen))

    async def delete(self, request: provider.DeleteRequest) -> None:
        """Removes this very machine; one that is gone is fine."""
        if request.type == MACHINE:
            cloud, uid = _cloud(request.properties), _text(request.properties, "uid")
            await self._run(lambda: cloud.delete(request.resource_id, uid))

    async def _run(self, call: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call)


def schema() -> dict[str, object]:
    """The package in Pulumi's schema language."""
    text: dict[str, object] = {"type": "string"}
    kinds: Mapping[str, dict[str, object]] = {
        "text": text,
        "map": {"type": "object", "additionalProperties": text},
        "list": {"type": "array", "items": text},
    }
    inputs = {token: {name: dict(kinds[kind]) for name, kind in _KINDS[token].items()} for token in _KINDS}
    inputs[MACHINE]["environment"]["secret"] = True
    shown = {name: value for name, value in inputs[MACHINE].items() if name != "environment"}
    machine = {
        "description": "A machine of the local cloud: a process group on this machine.",
        "inputProperties": inputs[MACHINE],
        "requiredInputs": list(_KINDS[MACHINE]),
        "properties": {**shown, "uid": text, "created_at": text},
        "required": [*shown, "uid", "created_at"],
    }
    identity = {
        "description": "The id of a stack of orca-infra; it never becomes another.",
        "inputProperties": inputs[IDENTITY],
        "requiredInputs": list(_KINDS[IDENTITY]),
        "properties": {"stack": text},
        "required": ["stack"],
    }
    return {
        "name": "orca",
        "version": __version__,
        "description": "orca-infra's own resources.",
        "resources": {MACHINE: machine, IDENTITY: identity},
    }


class _Context(Protocol):
    """What we use of grpc.aio.ServicerContext."""

    async def abort(self, code: grpc.StatusCode, details: str) -> None: ...


class _Servicer(ProviderServicer):
    """The SDK's servicer, with our errors said in one line instead of with a traceback."""

    async def Check(self, request: object, context: _Context) -> object:
        return await _plainly(super().Check(request, context), context)

    async def Diff(self, request: object, context: _Context) -> object:
        return await _plainly(super().Diff(request, context), context)

    async def Create(self, request: object, context: _Context) -> object:
        return await _plainly(super().Create(request, context), context)

    async def Read(self, request: object, context: _Context) -> object:
        return await _plainly(super().Read(request, context), context)

    async def Update(self, request: object, context: _Context) -> object:
        return await _plainly(super().Update(request, context), context)

    async def Delete(self, request: object, context: _Context) -> Any:
        return await _plainly(super().Delete(request, context), context)


async def _plainly(answer: Awaitable[object], context: _Context) -> object:
    """The answer; an error of ours ends the call with its message alone.

    The SDK's servicer raises a plain Exception with the traceback in its text while it handles ours, which is therefore
    that exception's context. Whatever is no error of ours keeps its traceback: it is a defect here.
    """
    try:
        return await answer
    except Exception as error:
        ours = error.__context__
        if not isinstance(ours, OrcaError):
            raise
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, " ".join(str(ours).split()))
        raise


def main() -> None:
    """The executable `pulumi-resource-orca <engine's address>`; prints its port and serves until the engine is gone."""
    die_with_parent(signal.SIGTERM)
    engine = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    if engine is None:
        sys.exit("pulumi-resource-orca is started by the Pulumi engine, with its address as the argument")
    asyncio.run(_serve(engine))


async def _serve(engine: str) -> None:
    limits = [("grpc.max_receive_message_length", _MESSAGE_BYTES), ("grpc.max_send_message_length", _MESSAGE_BYTES)]
    server = grpc.aio.server(options=limits)
    servicer = _Servicer(sys.argv[1:], __version__, LocalProvider(), engine)
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()


def _kinds(token: str) -> Mapping[str, str]:
    if token not in _KINDS:
        raise Refused(f"INVALID_REQUEST: there is no resource {token}; there are {', '.join(_KINDS)}")
    return _KINDS[token]


def _check(value: PropertyValue | None, kind: str) -> str | None:
    """What is wrong with an input, in words that never have its value."""
    inner = None if value is None else value.value
    if inner is None:
        return "is required"
    if inner == UNKNOWN:  # a preview in which another resource still has to be made
        return None
    match kind:
        case "text":
            good = isinstance(inner, str) and inner != ""
            return None if good else "has to be a text that is not empty"
        case "map":
            good = isinstance(inner, Mapping) and all(isinstance(item.value, str) for item in inner.values())
            return None if good else "has to be a map from text to text"
        case _:
            items = inner if isinstance(inner, tuple) else ()
            good = bool(items) and all(isinstance(item.value, str) for item in items)
            return None if good else "has to be a list of texts that is not empty"


def _differ(old: _Properties, new: _Properties, name: str) -> bool:
    before, after = old.get(name), new.get(name)
    return (None if before is None else _plain(before)) != (None if after is None else _plain(after))


def _diff(changed: list[str], replaces: list[str]) -> provider.DiffResponse:
    kinds = provider.PropertyDiffKind
    return provider.DiffResponse(
        changes=bool(changed),
        replaces=replaces,
        delete_before_replace=False,
        diffs=changed,
        detailed_diff={
            name: provider.PropertyDiff(kinds.UPDATE_REPLACE if name in replaces else kinds.UPDATE, True)
            for name in changed
        },
    )


def _check_same_identity(known: str, new: _Properties) -> None:
    wanted = new["id"].value
    if wanted not in (known, UNKNOWN):
        raise Conflict(
            f"this state belongs to stack id {known}, and the database says {wanted}; "
            "point ORCA_DB or PULUMI_BACKEND_URL to the one that belongs to it"
        )


def _outputs(properties: _Properties, seen: SeenMachine) -> dict[str, PropertyValue]:
    return {
        "folder": properties["folder"],
        "argv": properties["argv"],
        "name": PropertyValue(seen.name),
        "location": PropertyValue(seen.location),
        "type": PropertyValue(seen.type),
        "labels": PropertyValue({name: PropertyValue(value) for name, value in seen.labels.items()}),
        "uid": PropertyValue(seen.uid),
        "created_at": PropertyValue(seen.created_at.isoformat()),
    }


def _cloud(properties: _Properties) -> LocalCloud:
    return LocalCloud(Path(_text(properties, "folder")))


def _text(properties: _Properties, name: str) -> str:
    value = _plain(properties[name])
    if not isinstance(value, str):
        raise Refused(f"INVALID_REQUEST: {name} has to be a text")
    return value


def _text_map(properties: _Properties, name: str) -> dict[str, str]:
    value = _plain(properties[name])
    if not isinstance(value, dict):
        raise Refused(f"INVALID_REQUEST: {name} has to be a map")
    return {str(key): str(item) for key, item in value.items()}


def _text_list(properties: _Properties, name: str) -> tuple[str, ...]:
    value = _plain(properties[name])
    if not isinstance(value, list):
        raise Refused(f"INVALID_REQUEST: {name} has to be a list")
    return tuple(str(item) for item in value)


def _plain(value: PropertyValue) -> object:
    """The value without what says of each part that it is secret or depends on something."""
    inner = value.value
    if isinstance(inner, Mapping):
        return {name: _plain(item) for name, item in inner.items()}
    if isinstance(inner, tuple | list):
        return [_plain(item) for item in inner]
    return inner


if __name__ == "__main__":
    main()
