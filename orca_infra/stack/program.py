"""Programs of the loop's stacks: they register resources with the engine directly, without the SDK's resource classes.

The SDK resolves every property of every resource as an awaitable, which costs five times the CPU of all the rest for what is
only a list of finished objects (docs/adr/0007). What is here is the engine's own protocol for language hosts
(proto/pulumi/language.proto and resource.proto): a stack, its resources, and what the engine answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pulumi.runtime.proto import resource_pb2_grpc

# The engine's mark of a secret value (sdk/go/common/resource/sig).
_SIGNATURE = "4dabf18193072939515e22adb298388d"
_SECRET = "1b47061264138c4ac30d75fd1eb44270"  # noqa: S105  (a public constant of the protocol)
# Stands for a value that a preview cannot know yet (sdk/go/common/resource/plugin, UnknownStringValue).
_UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
_UNBOUNDED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """What the engine made of a resource: its id, and its outputs as protobuf's Struct, to be read like a dict.

    They are not made plain JSON: of most resources nobody asks for them, and for a Pod that costs as much as all the rest.
    """

    urn: str
    id: str
    outputs: Any


class Pending:
    """A registration under way."""

    def __init__(self, call: Any, made: list[Registered]) -> None:
        self._call = call
        self._made = made

    def result(self) -> Registered | None:
        """Wait for the engine; None when the resource failed and the operation goes on without it.

        Raises grpc.RpcError when the operation ends here, which the server below reports.
        """
        from pulumi.runtime.proto import resource_pb2

        answer = self._call.result()
        if answer.result != resource_pb2.SUCCESS:
            return None
        registered = Registered(urn=answer.urn, id=answer.id, outputs=answer.object)
        self._made.append(registered)
        return registered


class Registrar:
    """Registers resources of one stack; registrations run side by side until their results are asked for."""

    def __init__(self, monitor: resource_pb2_grpc.ResourceMonitorStub, stack_urn: str) -> None:
        self._monitor = monitor
        self._stack_urn = stack_urn
        #: What the stack gives out, once its program has ended.
        self.outputs: dict[str, Any] = {}
        #: What was made so far, and waited for.
        self.made: list[Registered] = []

    def register(
        self,
        kind: str,
        name: str,
        properties: Mapping[str, Any],
        *,
        provider: Registered | None = None,
        depends_on: Sequence[Registered] = (),
        protect: bool = False,
        retain_on_delete: bool = False,
    ) -> Pending:
        """Ask for a resource of type `kind`, e.g. `kubernetes:core/v1:Pod`.

        `protect`: no `destroy` removes it; `retain_on_delete`: it is forgotten instead of deleted.
        """
        from google.protobuf import struct_pb2
        from pulumi.runtime.proto import resource_pb2

        values = struct_pb2.Struct()
        values.update(properties)
        request = resource_pb2.RegisterResourceRequest(
            type=kind,
            name=name,
            custom=True,
            parent=self._stack_urn,
            object=values,
            # In a preview a provider that is still to be made has no id.
            provider=f"{provider.urn}::{provider.id or _UNKNOWN}" if provider else "",
            dependencies=[other.urn for other in depends_on],
            protect=protect,
            retainOnDelete=retain_on_delete,
            acceptSecrets=True,
            acceptResources=True,
            supportsResultReporting=True,
        )
        return Pending(self._monitor.RegisterResource.future(request), self.made)


Program = Callable[[Registrar], None]


def secret(value: str) -> dict[str, str]:
    """The value as the engine encrypts it in its state and masks it in its words."""
    return {_SIGNATURE: _SECRET, "value": value}


def run_in_sdk(program: Program) -> None:
    """Run the program within one that the SDK runs, as the vendor's CLI has it: its stack is registered by the SDK.

    What the program gives out is for the caller to export: the SDK registers that, too, and only once.
    """
    from pulumi.runtime import settings

    root = settings.get_root_resource()
    monitor = settings.get_monitor()
    assert root is not None
    assert monitor is not None

    async def run(urn: str) -> bool:
        # Beside the SDK's own loop, whose stack waits for nothing but this.
        await asyncio.to_thread(program, Registrar(monitor, urn))
        return True

    run_once: Any = run
    root.urn.apply(run_once)


def load() -> None:
    """Import what `serve` needs: half a second, which the first operation would have to wait for."""
    import grpc  # noqa: F401
    from pulumi.runtime.proto import language_pb2_grpc, resource_pb2_grpc  # noqa: F401


@contextlib.contextmanager
def serve(program: Program) -> Iterator[str]:
    """Serve the program to an engine as an inline program; gives the address for --client."""
    # Imported here: only operations that run a program need it, and those of a loop find it loaded.
    import grpc
    from google.protobuf import struct_pb2
    from pulumi.runtime.proto import language_pb2, language_pb2_grpc, plugin_pb2, resource_pb2, resource_pb2_grpc

    class Host(language_pb2_grpc.LanguageRuntimeServicer):
        """The part of a language host that the engine asks of an inline program."""

        def GetRequiredPackages(self, _request: Any, _context: Any) -> Any:  # noqa: N802  (the protocol's names)
            return language_pb2.GetRequiredPackagesResponse()

        def GetRequiredPlugins(self, _request: Any, _context: Any) -> Any:  # noqa: N802
            return language_pb2.GetRequiredPluginsResponse()

        def About(self, _request: Any, _context: Any) -> Any:  # noqa: N802
            return language_pb2.AboutResponse()

        def GetPluginInfo(self, _request: Any, _context: Any) -> Any:  # noqa: N802
            return plugin_pb2.PluginInfo()

        def Run(self, request: Any, _context: Any) -> Any:  # noqa: N802
            channel = grpc.insecure_channel(request.monitor_address, options=_UNBOUNDED)
            monitor = resource_pb2_grpc.ResourceMonitorStub(channel)
            try:
                stack = monitor.RegisterResource(
                    resource_pb2.RegisterResourceRequest(
                        type="pulumi:pulumi:Stack", name=f"{request.project}-{request.stack}", custom=False
                    )
                )
                registrar = Registrar(monitor, stack.urn)
                program(registrar)
                outputs = struct_pb2.Struct()
                outputs.update(registrar.outputs)
                monitor.RegisterResourceOutputs(
                    resource_pb2.RegisterResourceOutputsRequest(urn=stack.urn, outputs=outputs)
                )
            except grpc.RpcError as error:
                # The engine knows which resource failed and says so itself; a monitor that is gone is its own shutting down.
                return language_pb2.RunResponse(error=str(error.details()))
            finally:
                channel.close()
            return language_pb2.RunResponse()

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2, thread_name_prefix="program"), options=_UNBOUNDED)
    language_pb2_grpc.add_LanguageRuntimeServicer_to_server(Host(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        stopped: threading.Event = server.stop(grace=0)
        stopped.wait(5)
