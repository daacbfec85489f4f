"""An executable `pulumi-resource-gcp` for tests: it answers the engine as Pulumi's provider for Google Cloud would.

Instances are made through the compute API that GOOGLE_COMPUTE_CUSTOM_ENDPOINT names, which the real provider reads too: the
fake cloud is one, whoever asks. Errors are worded as the real one words them: what a call answers as `googleapi: Error ...`,
what an operation ends with as its message alone, without the code. Other resources are only written down.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc.aio
from pulumi.provider.experimental import provider
from pulumi.provider.experimental.property_value import PropertyValue
from pulumi.runtime.proto import provider_pb2_grpc

from orca_infra.errors import Refused
from orca_infra.machines.providers.local_plugin import _diff, _plain, _Servicer
from orca_infra.process import die_with_parent

VERSION = "10.0.0"
INSTANCE = "gcp:compute/instance:Instance"
_REPLACES = ("name", "zone", "project", "machineType", "bootDisk", "networkInterfaces")
_POLL_SECONDS = 0.05
_OPERATION_SECONDS = 1200  # as the real one's
#: What names a resource of another kind, in this order.
_NAMES = ("accountId", "name", "service", "role")


class FakeGcpProvider(provider.Provider):
    """Answers the engine."""

    def __init__(self, endpoint: str) -> None:
        self._api = endpoint.rstrip("/")
        self._threads = ThreadPoolExecutor(32, thread_name_prefix="gcp")

    async def get_schema(self, request: provider.GetSchemaRequest) -> provider.GetSchemaResponse:
        return provider.GetSchemaResponse(schema=json.dumps({"name": "gcp", "version": VERSION}))

    async def configure(self, request: provider.ConfigureRequest) -> provider.ConfigureResponse:
        return provider.ConfigureResponse(accept_secrets=True, supports_preview=False)

    async def check(self, request: provider.CheckRequest) -> provider.CheckResponse:
        failures = []
        if request.type == INSTANCE:
            needed = ("name", "zone", "machineType", "bootDisk", "networkInterfaces")
            failures = [
                provider.CheckFailure("", f"Missing required argument {name}")
                for name in needed
                if name not in request.new_inputs
            ]
        return provider.CheckResponse(inputs=request.new_inputs, failures=failures)

    async def diff(self, request: provider.DiffRequest) -> provider.DiffResponse:
        new = request.new_inputs
        changed = [name for name in new if _plain(new[name]) != _value(request.old_state, name)]
        replaces = [name for name in changed if name in _REPLACES and request.type == INSTANCE]
        return _diff(changed, replaces)

    async def create(self, request: provider.CreateRequest) -> provider.CreateResponse:
        create = self._create if request.type == INSTANCE else self._create_other
        answer: provider.CreateResponse = await self._run(create, request)
        return answer

    async def read(self, request: provider.ReadRequest) -> provider.ReadResponse:
        if request.type != INSTANCE:
            return provider.ReadResponse(request.resource_id, request.properties, request.inputs)
        instance = await self._run(self._get, request.resource_id)
        if instance is None:
            return provider.ReadResponse("", {}, {})
        outputs = {**request.properties, **_facts(instance, request.resource_id)}
        return provider.ReadResponse(request.resource_id, outputs, request.inputs)

    async def update(self, request: provider.UpdateRequest) -> provider.UpdateResponse:
        return provider.UpdateResponse({**request.olds, **request.news})

    async def delete(self, request: provider.DeleteRequest) -> None:
        if request.type != INSTANCE:
            body = {"type": request.type, "id": request.resource_id, "removed": True}
            await self._run(self._call, "POST", "/../../fake/resources", body)
            return
        await self._run(self._delete, request.resource_id)

    async def _run(self, call: Any, *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    def _create(self, request: provider.CreateRequest) -> provider.CreateResponse:
        inputs = {name: _plain(value) for name, value in request.properties.items()}
        zone = f"projects/{inputs['project']}/zones/{inputs['zone']}"
        try:
            operation = self._call("POST", f"/{zone}/instances", instance_body(inputs))
        except Refused as error:
            raise Refused(f"1 error occurred:\n\t* Error creating instance: {error}") from None
        self._wait(zone, operation, "create")
        id_ = f"{zone}/instances/{inputs['name']}"
        instance = self._call("GET", f"/{id_}")
        return provider.CreateResponse(id_, {**request.properties, **_facts(instance, id_)})

    def _create_other(self, request: provider.CreateRequest) -> provider.CreateResponse:
        inputs = {name: _plain(value) for name, value in request.properties.items()}
        id_ = "/".join([str(inputs[name]) for name in ("region", *_NAMES) if name in inputs]) or "only"
        self._call("POST", "/../../fake/resources", {"type": request.type, "id": id_, "inputs": inputs})
        outputs = dict(request.properties)
        project = inputs.get("project", "")
        if "accountId" in inputs:
            outputs["email"] = PropertyValue(f"{inputs['accountId']}@{project}.iam.gserviceaccount.com")
        outputs["selfLink"] = PropertyValue(f"projects/{project}/{id_}")
        return provider.CreateResponse(id_, outputs)

    def _get(self, id_: str) -> Any:
        try:
            return self._call("GET", f"/{id_}")
        except Refused as error:
            if "Error 404" in str(error):
                return None
            raise

    def _delete(self, id_: str) -> None:
        zone = id_.rpartition("/instances/")[0]
        try:
            operation = self._call("DELETE", f"/{id_}")
        except Refused as error:
            if "Error 404" in str(error):
                return
            raise Refused(f"1 error occurred:\n\t* Error deleting instance: {error}") from None
        self._wait(zone, operation, "delete")

    def _wait(self, zone: str, operation: Any, verb: str) -> None:
        deadline = time.monotonic() + _OPERATION_SECONDS
        while operation["status"] != "DONE":
            if time.monotonic() > deadline:
                raise Refused(f"1 error occurred:\n\t* Error waiting for instance to {verb}: timeout while waiting")
            time.sleep(_POLL_SECONDS)
            operation = self._call("GET", f"/{zone}/operations/{operation['name']}")
        errors = operation.get("error", {}).get("errors", [])
        if errors:
            said = "\n".join(error["message"] or error["code"] for error in errors)
            raise Refused(f"1 error occurred:\n\t* Error waiting for instance to {verb}: {said}")

    def _call(self, method: str, path: str, body: Any = None) -> Any:
        base = self._api.removesuffix("/compute/v1") if path.startswith("/../../") else self._api
        url = base + path.removeprefix("/../..")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.loads(answer.read())
        except urllib.error.HTTPError as error:
            said = json.loads(error.read())["error"]
            reason = said["errors"][0]["reason"]
            raise Refused(f"googleapi: Error {said['code']}: {said['message']}, {reason}") from None
        except OSError as error:
            raise Refused(f'{method} "{url}": dial tcp: {error}') from None


def _value(properties: Mapping[str, PropertyValue], name: str) -> object:
    return _plain(properties[name]) if name in properties else None


def _facts(instance: Mapping[str, Any], id_: str) -> dict[str, PropertyValue]:
    return {
        "instanceId": PropertyValue(str(instance["id"])),
        "currentStatus": PropertyValue(str(instance["status"])),
        "selfLink": PropertyValue(f"https://www.googleapis.com/compute/v1/{id_}"),
    }


def instance_body(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The API's body for the real provider's inputs."""
    disk = inputs["bootDisk"]
    parameters = disk.get("initializeParams", {})
    interfaces = [
        {**interface, "accessConfigs": [{"type": "ONE_TO_ONE_NAT"} for _ in interface.get("accessConfigs", [])]}
        for interface in inputs["networkInterfaces"]
    ]
    account = inputs.get("serviceAccount")
    return {
        "name": inputs["name"],
        "machineType": f"zones/{inputs['zone']}/machineTypes/{inputs['machineType']}",
        "labels": {**inputs.get("labels", {}), "goog-pulumi-provisioned": "true"},
        "tags": {"items": inputs.get("tags", [])},
        "disks": [
            {
                "boot": True,
                "autoDelete": disk.get("autoDelete", True),
                "initializeParams": {
                    "sourceImage": parameters.get("image"),
                    "diskSizeGb": str(int(parameters.get("size") or 10)),
                    "diskType": parameters.get("type"),
                },
            }
        ],
        "networkInterfaces": interfaces,
        "serviceAccounts": [{"email": account["email"], "scopes": account["scopes"]}] if account else [],
        "scheduling": inputs.get("scheduling", {}),
        "shieldedInstanceConfig": inputs.get("shieldedInstanceConfig", {}),
        "metadata": {"items": [{"key": key, "value": value} for key, value in inputs.get("metadata", {}).items()]},
    }


def install(folder: Path) -> Path:
    """Write the executable into a folder, which a test puts on its PATH; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "pulumi-resource-gcp"
    path.write_text(f"#!{sys.executable}\nfrom {__name__} import main\nmain()\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def main() -> None:
    """`pulumi-resource-gcp <engine's address>`; prints its port and serves until the engine is gone."""
    die_with_parent(signal.SIGTERM)
    engine = next(argument for argument in sys.argv[1:] if not argument.startswith("-"))
    asyncio.run(_serve(engine, os.environ["GOOGLE_COMPUTE_CUSTOM_ENDPOINT"]))


async def _serve(engine: str, endpoint: str) -> None:
    server = grpc.aio.server()
    servicer = _Servicer(sys.argv[1:], VERSION, FakeGcpProvider(endpoint), engine)
    provider_pb2_grpc.add_ResourceProviderServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await server.wait_for_termination()
