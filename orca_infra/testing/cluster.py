"""A real Kubernetes control plane for tests, benches and the demo; only its nodes are not real (kwok).

etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kwok, in a temporary folder, on 127.0.0.1 and Unix
sockets, owned by the process that starts it and gone with it. `python -m orca_infra.testing.cluster` runs one until Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NoReturn, Self

from orca_infra.errors import OrcaError, Refused, SetupError, Transient
from orca_infra.process import ProcessId
from orca_infra.testing.cluster_files import (
    OwnedFolder,
    authority_of,
    kubeconfig,
    remove_leftovers,
    write_private,
)
from orca_infra.testing.cluster_http import Api, ApiError
from orca_infra.testing.cluster_process import ServerProcess, Starter, find_program
from orca_infra.testing.ports import reserve_port

#: The flags that do not depend on a folder or a port; a bench states this table. The clients' rates are raised from the
#: scheduler's 50 and the controllers' 20 requests a second, which would be all that a bench measures; every other limit is
#: the programs' own.
FLAGS: Mapping[str, tuple[str, ...]] = {
    "etcd": (
        "--unsafe-no-fsync",
        "--log-level=warn",
    ),
    "kube-apiserver": (
        "--bind-address=127.0.0.1",
        "--advertise-address=127.0.0.1",  # without it a machine needs a default route
        "--endpoint-reconciler-type=none",  # an Endpoints object may not name a loopback address
        "--permit-port-sharing=true",  # ports.reserve_port
        "--authorization-mode=RBAC",
        "--disable-admission-plugins=ServiceAccount",  # Pods need no ServiceAccount, and get no token
        "--service-account-issuer=https://kubernetes.default.svc",
        "--service-cluster-ip-range=10.0.0.0/16",
        "--allow-privileged=true",
        "--event-ttl=10m",
        "--profiling=false",
    ),
    "kube-controller-manager": (
        "--leader-elect=false",
        "--secure-port=0",
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
        "--profiling=false",
    ),
    "kube-scheduler": (
        "--leader-elect=false",
        "--secure-port=0",
        "--kube-api-qps=1000",
        "--kube-api-burst=2000",
        "--profiling=false",
    ),
    "kwok": (
        "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",  # a real kubelet's nodes stay its own
        "--node-lease-duration-seconds=40",
        "--node-ip=127.0.0.1",
        "--cidr=10.64.0.0/10",
    ),
}
#: What each node has; nothing of it is real.
NODE_CAPACITY = {"cpu": "1k", "memory": "4Ti", "ephemeral-storage": "4Ti", "pods": "5k"}

#: In a cluster's folder: what the API server shows to kubelets, `.crt` and `.key`.
KUBELET_CLIENT = "kubelet-client"

# What every container of a fake node says; kwok reads it as a kubelet reads its runtime's files.
_POD_LOG = "2026-01-01T00:00:00.000000000Z stdout F a fake container has nothing to say\n"
_POD_LOGS = """\
apiVersion: kwok.x-k8s.io/v1alpha1
kind: ClusterLogs
metadata: {{name: logs}}
spec:
  logs: [{{logsFile: {file}}}]
"""
_KUBELET_PORT = 10250

_STAGES = Path(__file__).with_name("cluster_stages.yaml")
_START_SECONDS = 240.0
_KUBECTL_SECONDS = 240.0
_OPENSSL_SECONDS = 240.0
_POLL_SECONDS = 0.03
_NO_PEER = (
    "http://127.0.0.1:1"  # etcd wants to tell its peers an address with a port; it has none, and never dials itself
)


class TestCluster:
    """A running control plane with fake nodes.

    A Pod is Running and Ready about 0.1 s after it was bound, and runs until it is deleted; its annotations change that:
    `orca.testing/ready-after`, `orca.testing/complete-after` (seconds) and `orca.testing/exit-code` (cluster_stages.yaml).
    Not for several threads at the same time, except through its API server.

    Attributes:
        folder: its temporary folder, with a log for each process; removed by `stop`.
        kubeconfig: a file with the server, the admin's token and the authority, which needs no other file.
        server: `https://127.0.0.1:<port>`, the same for its whole life.
        token: the admin's, of the group system:masters.
        ca_file: the authority of the server's certificate.
        api: requests with the admin's token.
        ready_seconds: how long the start took.

    """

    __test__ = False  # pytest would take the name for a test's

    folder: Path
    kubeconfig: Path
    server: str
    token: str
    ca_file: Path
    api: Api
    ready_seconds: float

    def __init__(self, nodes: int, more_flags: Mapping[str, Sequence[str]]) -> None:
        """Prepares everything, starts nothing; `start` is the way to make one."""
        unknown = set(more_flags) - set(FLAGS)
        if unknown:
            raise SetupError(f"no process of a test cluster is called {min(unknown)!r}; there are {', '.join(FLAGS)}")
        programs = {name: find_program(name) for name in FLAGS if name != "kwok" or nodes}
        self._owned = OwnedFolder.make()
        self.folder = self._owned.path
        self._starter = Starter()
        self._port = reserve_port()
        self._nodes = nodes
        # Where kwok answers for its nodes' kubelets: one of Linux's many loopback addresses, so that the port is free.
        self._node_address = f"127.{100 + secrets.randbelow(100)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"
        self._stopped = False
        self.server = f"https://127.0.0.1:{self._port.getsockname()[1]}"
        self.token = secrets.token_urlsafe(32)
        self.kubeconfig = self.folder / "kubeconfig"
        self.ca_file = self.folder / "ca.crt"
        places = self._places()
        self._processes = {
            name: ServerProcess(
                name, [str(program), *FLAGS[name], *places[name], *more_flags.get(name, ())], self.folder
            )
            for name, program in programs.items()
        }

    @classmethod
    def start(cls, nodes: int = 1, *, more_flags: Mapping[str, Sequence[str]] | None = None) -> Self:
        """Start one, with this many nodes (`node-1`, …), and return when every node takes Pods.

        Args:
            nodes: how many; without any there is no kwok, and Pods stay Pending.
            more_flags: further flags by the name of the process.

        Raises:
            SetupError: a program is missing or ends at once; the message has the command that gets it, or its last words.

        """
        began = time.monotonic()
        remove_leftovers()
        cluster = cls(nodes, more_flags or {})
        try:
            cluster._bring_up()
        except BaseException:
            cluster.stop()
            raise
        cluster.ready_seconds = time.monotonic() - began
        return cluster

    def stop(self) -> None:
        """End every process and remove the folder; a second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        for process in self._processes.values():
            process.kill()
        self._starter.close()
        self._port.close()
        self._owned.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop_server(self) -> None:
        """Kill the API server: from now on connections are refused. etcd keeps the data."""
        self._processes["kube-apiserver"].kill()

    def start_server(self) -> None:
        """Start the API server again, on the same port with the same certificate, and return when it is ready.

        Raises SetupError as `start` does.
        """
        self._processes["kube-apiserver"].start(self._starter)
        self._wait("the API server is ready", self._is_ready)

    def pids(self) -> dict[str, ProcessId]:
        """The processes that run, by their programs' names."""
        running = {name: process.identity() for name, process in self._processes.items()}
        return {name: identity for name, identity in running.items() if identity is not None}

    def cpu_seconds(self) -> dict[str, float]:
        """The user and system CPU seconds of each process so far, to a hundredth, by its program's name."""
        return {name: process.cpu_seconds() for name, process in self._processes.items()}

    def check(self) -> None:
        """Raises SetupError with its last words when a process ended by itself."""
        for process in self._processes.values():
            process.check()

    def kubectl(self, verb: str, *arguments: str, stdin: str | None = None) -> str:
        """What kubectl prints.

        Raises:
            SetupError: there is no kubectl; the message has the command that gets it.
            Refused: it failed; the message has its words.

        """
        command = [str(find_program("kubectl")), f"--kubeconfig={self.kubeconfig}", verb, *arguments]
        environment = {**os.environ, "KUBECACHEDIR": str(self.folder / "kubectl"), "KUBECTL_KUBERC": "false"}
        result = subprocess.run(
            command,
            input=stdin,
            env=environment,
            capture_output=True,
            text=True,
            timeout=_KUBECTL_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL if stdin is None else None,
        )
        if result.returncode:
            raise Refused(f"kubectl {verb} failed: {result.stderr.strip()}")
        return result.stdout

    def _places(self) -> dict[str, list[str]]:
        """The flags that name this cluster's own files and ports."""
        folder = self.folder
        key = folder / "service-account.key"
        sockets = {name: f"unix://{folder / name}.sock" for name in ("etcd", "etcd-peer")}  # nobody else can ask etcd
        return {
            "etcd": [
                "--name=test",
                f"--data-dir={folder / 'etcd'}",
                f"--listen-client-urls={sockets['etcd']}",
                f"--advertise-client-urls={_NO_PEER}",
                f"--listen-peer-urls={sockets['etcd-peer']}",
                f"--initial-advertise-peer-urls={_NO_PEER}",
                f"--initial-cluster=test={_NO_PEER}",
            ],
            "kube-apiserver": [
                f"--etcd-servers={sockets['etcd']}",
                f"--secure-port={self._port.getsockname()[1]}",
                f"--cert-dir={folder / 'certificates'}",
                f"--token-auth-file={folder / 'tokens.csv'}",
                f"--service-account-key-file={key}",
                f"--service-account-signing-key-file={key}",
                # A real kubelet takes nobody else for the API server (node.py).
                f"--kubelet-client-certificate={folder / KUBELET_CLIENT}.crt",
                f"--kubelet-client-key={folder / KUBELET_CLIENT}.key",
            ],
            "kube-controller-manager": [
                f"--kubeconfig={self.kubeconfig}",
                f"--service-account-private-key-file={key}",
                f"--root-ca-file={self.ca_file}",
                f"--flex-volume-plugin-dir={folder / 'volume-plugins'}",  # or it makes one in the machine's /usr/libexec
            ],
            "kube-scheduler": [f"--kubeconfig={self.kubeconfig}"],
            "kwok": [
                f"--kubeconfig={self.kubeconfig}",
                f"--config={_STAGES},{folder / 'pod-logs.yaml'}",
                f"--server-address={self._node_address}:{_KUBELET_PORT}",
            ],
        }

    def _bring_up(self) -> None:
        self._processes["etcd"].start(self._starter)
        write_private(self.folder / "tokens.csv", f'{self.token},admin,admin,"system:masters"\n')
        _make_key(self.folder / "service-account.key")
        _make_certificate(self.folder / KUBELET_CLIENT)
        (self.folder / "pod.log").write_text(_POD_LOG)
        (self.folder / "pod-logs.yaml").write_text(_POD_LOGS.format(file=self.folder / "pod.log"))
        self._wait("etcd listens", (self.folder / "etcd.sock").exists)
        self._processes["kube-apiserver"].start(self._starter)
        certificates = self.folder / "certificates" / "apiserver.crt"
        self._wait("the API server listens", lambda: certificates.exists() and self._is_listening())
        self.ca_file.write_text(authority_of(certificates))
        write_private(self.kubeconfig, kubeconfig(self.server, self.token, self.ca_file.read_text()))
        self.api = Api(self.server, self.token, self.ca_file)
        for process in self._processes.values():  # the rest: they wait for a server that answers by themselves
            process.start(self._starter)
        self._wait("the API server is ready", self._is_ready)
        for number in range(1, self._nodes + 1):
            self.api.call("POST", "/api/v1/nodes", _node(f"node-{number}", self._node_address))
        self._wait("every node takes Pods", self._nodes_take_pods)

    def _is_listening(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(self._port.getsockname()) == 0

    def _is_ready(self) -> bool:
        with suppress(ApiError, Transient):
            return self.api.text("GET", "/readyz") == "ok"
        return False

    def _nodes_take_pods(self) -> bool:
        """Ready says that kwok works; the taints that a node has until then are taken away by the controller manager."""
        listed = self.api.call("GET", "/api/v1/nodes")["items"]
        return len(listed) >= self._nodes and all(_is_open(node) for node in listed)

    def _wait(self, what: str, predicate: Callable[[], bool]) -> None:
        """Return when the predicate holds. Raises SetupError when a process ends before that, or the time is up."""
        deadline = time.monotonic() + _START_SECONDS
        while not predicate():
            self.check()
            if time.monotonic() > deadline:
                raise SetupError(
                    f"a test cluster did not come up: not within {_START_SECONDS:.0f} s: {what}; try again"
                )
            time.sleep(_POLL_SECONDS)


def _make_key(path: Path) -> None:
    """The key with which the API server signs what it says of ServiceAccounts."""
    _openssl("genrsa", "-out", str(path), "2048")


def _make_certificate(path: Path) -> None:
    """The certificate (and its key) with which the API server comes to a kubelet; it is its own authority."""
    names = ["-keyout", f"{path}.key", "-out", f"{path}.crt", "-subj", "/CN=kube-apiserver", "-days", "2"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    _openssl("req", "-x509", *key, *names, "-addext", "extendedKeyUsage=clientAuth")


def _openssl(*arguments: str) -> None:
    try:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, timeout=_OPENSSL_SECONDS)
    except (OSError, subprocess.SubprocessError) as error:
        raise SetupError(f"`openssl {arguments[0]}` does not work ({error}); install openssl") from error


def _node(name: str, address: str) -> dict[str, Any]:
    info = dict.fromkeys(
        ("bootID", "containerRuntimeVersion", "kernelVersion", "kubeletVersion", "machineID", "osImage", "systemUUID"),
        "kwok",
    )
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {
            "name": name,
            "annotations": {"kwok.x-k8s.io/node": "fake"},
            "labels": {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"},
        },
        "status": {
            "capacity": NODE_CAPACITY,
            "allocatable": NODE_CAPACITY,
            "addresses": [{"type": "InternalIP", "address": address}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": _KUBELET_PORT}},
            "nodeInfo": {**info, "kubeProxyVersion": "", "operatingSystem": "linux", "architecture": "amd64"},
        },
    }


def _is_open(node: dict[str, Any]) -> bool:
    conditions = {condition["type"]: condition["status"] for condition in node["status"].get("conditions", ())}
    return conditions.get("Ready") == "True" and not node["spec"].get("taints")


def main(arguments: Sequence[str] | None = None) -> int:
    """`make cluster`: one cluster, until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m orca_infra.testing.cluster", description=main.__doc__)
    parser.add_argument("--nodes", type=int, default=1, metavar="N", help="fake nodes (default 1)")
    options = parser.parse_args(arguments)
    # SIGINT as well: what a shell starts in its background inherits that it is ignored.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        with TestCluster.start(options.nodes) as cluster:
            print(f"a Kubernetes API server with {options.nodes} fake node(s), ready in {cluster.ready_seconds:.1f} s")
            print(f"its logs: {cluster.folder}/*.log; Ctrl-C ends it and leaves nothing")
            print(f"export KUBECONFIG={cluster.kubeconfig}", flush=True)
            while True:
                time.sleep(1)
                cluster.check()
    except KeyboardInterrupt:
        return 0
    except OrcaError as error:
        print(f"cluster: {error}", file=sys.stderr)
        return 2


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
