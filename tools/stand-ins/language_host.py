"""A stand-in for pulumi-language-python: runs `__main__.py` for the engine, with the SDK's own language server.

The vendor's host comes with its download of the CLI and is in no package registry; this one is enough for a project whose
virtual environment exists already. It installs nothing and knows no toolchains.
"""

from __future__ import annotations

import os
import queue
import runpy
import signal
import subprocess
import sys
import threading
from concurrent import futures
from pathlib import Path

try:
    import grpc
    from pulumi.automation._server import LanguageServer
    from pulumi.runtime.proto import language_pb2, language_pb2_grpc, plugin_pb2
except ImportError as error:
    sys.exit(f"this checkout has no .venv with its packages ({error}): `make check` makes it")


class LanguageHost(LanguageServer):
    """The SDK's server for inline programs, given a program that is a file instead of a function."""

    def __init__(self) -> None:
        super().__init__(lambda: None)

    def Handshake(self, request, context):  # noqa: ANN001, ANN201, ARG002, N802  (names and types are gRPC's)
        return language_pb2.LanguageHandshakeResponse()

    def GetPluginInfo(self, request, context):  # noqa: ANN001, ANN201, ARG002, N802
        return plugin_pb2.PluginInfo(version="0.0.0")

    def InstallDependencies(self, request, context):  # noqa: ANN001, ANN201, ARG002, N802
        yield language_pb2.InstallDependenciesResponse(stdout=b"the virtual environment is made by `make`\n")

    def Run(self, request, context):  # noqa: ANN001, ANN201, N802
        folder = Path(request.info.program_directory or request.pwd or ".")

        def program() -> None:
            os.chdir(folder)
            sys.path.insert(0, str(folder))
            runpy.run_path(str(folder / "__main__.py"), run_name="__main__")

        self.program = program
        # What the program logs goes to the engine, whose address is the host's last argument.
        request.args[:] = sys.argv[-1:]
        answer = super().Run(request, context)
        if answer.error:  # it was logged: given back, it would be said once more, as if nobody had handled it
            answer.ClearField("error")
            answer.bail = True
        return answer

    def RunPlugin(self, request, context):  # noqa: ANN001, ANN201, N802
        """Run a policy pack as the vendor's host does; what it prints first is its port."""
        if request.kind != "analyzer":
            context.abort(grpc.StatusCode.UNIMPLEMENTED, f"this stand-in runs no plugin of kind {request.kind!r}")
        engine, *_ = request.args
        command = [sys.executable, "-u", "-m", "pulumi.policy", engine, request.info.program_directory]
        environment = dict(entry.split("=", 1) for entry in request.env if "=" in entry)
        pack = subprocess.Popen(
            command, cwd=request.pwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        # The engine ends a plugin by ending this call.
        context.add_callback(pack.kill)
        yield from _output_of(pack)
        yield language_pb2.RunPluginResponse(exitcode=pack.wait())


def _output_of(process):  # noqa: ANN001, ANN202
    """Both outputs as they come, until both are at their end."""
    said: queue.Queue = queue.Queue()

    def read(name: str, pipe) -> None:  # noqa: ANN001
        for chunk in iter(lambda: pipe.read1(65536), b""):
            said.put(language_pb2.RunPluginResponse(**{name: chunk}))
        said.put(None)

    for name in ("stdout", "stderr"):
        threading.Thread(target=read, args=(name, getattr(process, name)), daemon=True).start()
    for _ in range(2):
        yield from iter(said.get, None)


def main() -> None:
    """Serve on a free port, print it, and leave quietly when told to, or when the engine is gone."""
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    language_pb2_grpc.add_LanguageRuntimeServicer_to_server(LanguageHost(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(port, flush=True)
    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    engine = os.getppid()
    while not done.wait(1) and os.getppid() == engine:
        pass
    server.stop(grace=0)


main()
