"""One real node for a test cluster: containers that truly run, on this machine, and nothing of the machine's is touched.

containerd, runc, a bridge and the kubelet, with CoreDNS beside them, for root on Linux. All but the kubelet's and CoreDNS's
network is in namespaces of the node's own (node_inside.sh): PIDs, mounts, and the network in which the Pods' bridge is. So
its owner's end, however it comes, ends them all: the kernel kills PID 1 of the node, then every container, and takes the
mounts, the Pods' networks and the bridge. Where they meet the machine is one link, `orca<8 characters>`, whose address is
what containers reach: CoreDNS answers there, and node_postgres.py listens there.

    machine: API server, kubelet, CoreDNS, Postgres - link <address> ==veth== bridge node0 - Pods :the node's namespace
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from orca_infra.errors import SetupError, Transient
from orca_infra.process import ProcessId, boot_id
from orca_infra.testing.cluster import KUBELET_CLIENT, TestCluster
from orca_infra.testing.cluster_files import OwnedFolder
from orca_infra.testing.cluster_http import ApiError
from orca_infra.testing.cluster_process import ServerProcess, Starter, find_program
from orca_infra.testing.images import ORCA, PAUSE, orca_image, pause_image
from orca_infra.testing.node_programs import NodePrograms, find_node_programs
from orca_infra.testing.node_surroundings import (
    IDENTITY,
    PREFIX,
    NodeImpossible,
    check_surroundings,
    end_inside,
    free_subnet,
    ip,
    link_of,
    remove_node_leftovers,
    remove_traces,
)
from orca_infra.testing.ports import free_port

#: The node's name. The API server reaches a kubelet by its node's host name first: this one is the machine's own.
NODE = "localhost"
DOMAIN = "cluster.local"
#: The image of drivers, heads, workers and runtimes (images.py).
IMAGE = ORCA

_INSIDE = Path(__file__).with_name("node_inside.sh")
_START_SECONDS = 240.0
_DNS_PORT = 53
_COMMAND_SECONDS = 240
_POLL_SECONDS = 0.05
# Inside the node's namespaces.
_CONTAINERD = "/run/containerd/containerd.sock"


class RealNode:
    """A running node of a test cluster, named `localhost`; at most one for a cluster.

    Attributes:
        address: of the machine as containers reach it; DNS answers there.
        subnet: of that address and the Pods.
        folder: its temporary folder, with a log for each process; removed by `stop`.
        ready_seconds: how long the start took.

    """

    address: str
    folder: Path
    ready_seconds: float

    def __init__(self, cluster: TestCluster, programs: NodePrograms) -> None:
        """Prepares everything, starts nothing; `start` is the way to make one."""
        self._cluster = cluster
        self._programs = programs
        self._owned = OwnedFolder.make(prefix=PREFIX)
        self.folder = self._owned.path
        self.name = self.folder.name
        self._starter = Starter()
        self.subnet = free_subnet()
        hosts = [str(host) for host in self.subnet.hosts()]
        self.address, self._bridge_address = hosts[0], hosts[1]
        self._range = (hosts[9], hosts[-1])
        self._inside: ProcessId | None = None
        self._processes: dict[str, ServerProcess] = {}
        self._first_signals: dict[str, signal.Signals] = {}
        self._stopped = False

    @classmethod
    def start(cls, cluster: TestCluster) -> Self:
        """Add one to a cluster, and return when it takes Pods and names are answered.

        Raises:
            NodeImpossible: in one line, what this machine lacks for it.
            SetupError: a program is missing or failed; the message has its last words.

        """
        began = time.monotonic()
        remove_node_leftovers()
        check_surroundings()
        programs = find_node_programs()
        images = [pause_image(programs.paths["busybox"]), orca_image()]
        node = cls(cluster, programs)
        try:
            node._bring_up(images)
        except BaseException:
            node.stop()
            raise
        node.ready_seconds = time.monotonic() - began
        return node

    def stop(self) -> None:
        """End every container and every process, and remove all that was made; a second call does nothing."""
        if self._stopped:
            return
        self._stopped = True
        if self._inside is not None:
            end_inside(self._inside)
        for name, process in self._processes.items():
            process.kill(self._first_signals.get(name, signal.SIGKILL))
        self._starter.close()
        remove_traces(self.name)
        self._owned.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def check(self) -> None:
        """Raises SetupError with its last words when a process ended by itself."""
        for process in self._processes.values():
            process.check()

    def containers(self) -> set[str]:
        """The ids of the containers that have a process, Pods' sandboxes among them."""
        lines = self._ctr("tasks", "list").splitlines()[1:]
        return {line.split()[0] for line in lines if line.split()[-1] == "RUNNING"}

    def start_process(
        self, name: str, command: Sequence[str], *, first_signal: signal.Signals = signal.SIGKILL
    ) -> ServerProcess:
        """Start one more program that lives as long as the node, with a log in its folder, to be ended by a signal."""
        self._first_signals[name] = first_signal
        process = ServerProcess(name, list(command), self.folder)
        process.start(self._starter)
        self._processes[name] = process
        return process

    def wait(self, what: str, predicate: Callable[[], object], seconds: float = _START_SECONDS) -> None:
        """Return when the predicate holds. Raises SetupError when a process ends before that, or the time is up."""
        deadline = time.monotonic() + seconds
        while not predicate():
            self.check()
            if time.monotonic() > deadline:
                raise SetupError(
                    f"a real node did not come up: not within {seconds:.0f} s: {what}; {self._last_words()}"
                )
            time.sleep(_POLL_SECONDS)

    def _bring_up(self, images: list[Path]) -> None:
        self._open_namespaces()
        self._connect()
        self._start_dns()
        self._start_containerd()
        for image in images:  # before the kubelet: it would not find them, and wait before it looks again
            self._ctr("images", "import", "--snapshotter=overlayfs", str(image))
        self._start_kubelet()
        self.wait("the node takes Pods", self._takes_pods)
        try:
            self.wait("names are answered", self._answers_names, seconds=15)
        except SetupError as error:
            raise NodeImpossible(
                f"containers do not reach {self.address} of this machine; a firewall? ({error})"
            ) from error

    def _open_namespaces(self) -> None:
        namespaces = ["--mount", "--pid", "--net", "--fork", "--kill-child=SIGKILL", "--propagation=private"]
        self.start_process("inside", ["unshare", *namespaces, "sh", str(_INSIDE), str(self.folder)])
        said = self.folder / "inside"
        with suppress(SetupError):  # said why, before it ended
            self.wait("its namespaces are there", said.exists)
        words = (said if said.exists() else self._processes["inside"].log).read_text(errors="replace").strip()
        if not words.startswith("ready "):
            raise NodeImpossible(f"a real node's own namespaces cannot be had here: {words or 'nothing was said'}")
        self._inside = ProcessId.of(int(words.split()[1]))
        kept = {"boot": boot_id(), "pid": self._inside.pid, "started": self._inside.started}
        (self.folder / IDENTITY).write_text(json.dumps(kept))

    @property
    def _pid(self) -> int:
        if self._inside is None:
            raise SetupError("the node has no namespaces yet")
        return self._inside.pid

    def _connect(self) -> None:
        link, pid, length = link_of(self.name), self._pid, self.subnet.prefixlen
        ip("link", "add", link, "type", "veth", "peer", "name", "up0", "netns", str(pid))
        ip("address", "add", f"{self.address}/{length}", "dev", link)
        ip("link", "set", link, "up")
        ip("link", "add", "node0", "type", "bridge", inside=pid)
        ip("address", "add", f"{self._bridge_address}/{length}", "dev", "node0", inside=pid)
        ip("link", "set", "up0", "master", "node0", inside=pid)
        ip("link", "set", "up0", "up", inside=pid)
        ip("link", "set", "node0", "up", inside=pid)

    def _within(self, program: str, *arguments: str, network: bool) -> list[str]:
        """A command in the node's namespaces; its network's too, or else the machine's."""
        namespaces = ["--mount", "--pid", *(["--net"] if network else [])]
        path = f"PATH={self._programs.search_path()}"
        return ["nsenter", f"--target={self._pid}", *namespaces, "--", "env", path, program, *arguments]

    def _start_containerd(self) -> None:
        plugins = self.folder / "cni"
        plugins.mkdir()
        network = {
            "cniVersion": "0.4.0",
            "name": "orca",
            "plugins": [
                {
                    "type": "bridge",
                    "bridge": "node0",  # in the node's own network; nothing is routed or masked on the machine
                    "ipam": {
                        "type": "host-local",
                        "dataDir": "/run/cni",
                        "ranges": [
                            [{"subnet": str(self.subnet), "rangeStart": self._range[0], "rangeEnd": self._range[1]}]
                        ],
                    },
                }
            ],
        }
        (plugins / "10-orca.conflist").write_text(json.dumps(network))
        config = self.folder / "containerd.toml"
        config.write_text(self._containerd_config(plugins))
        program = str(self._programs.paths["containerd"])
        self.start_process("containerd", self._within(program, "--config", str(config), network=True))
        self.wait("containerd answers", self._containerd_answers)

    def _containerd_config(self, plugins: Path) -> str:
        cri = '[plugins."io.containerd.grpc.v1.cri"'
        runc = self._programs.paths["runc"]
        return f"""version = 2
root = "{self.folder}/containerd"
state = "/run/containerd"
disabled_plugins = ["io.containerd.internal.v1.opt", "io.containerd.tracing.processor.v1.otlp",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs"]
[grpc]
address = "{_CONTAINERD}"
{cri}]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
disable_apparmor = true
enable_selinux = false
stream_server_address = "{self._bridge_address}"
stream_server_port = "0"
{cri}.cni]
bin_dir = "{self._programs.plugins}"
conf_dir = "{plugins}"
{cri}.containerd]
snapshotter = "overlayfs"
default_runtime_name = "runc"
{cri}.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
{cri}.containerd.runtimes.runc.options]
BinaryName = "{runc}"
SystemdCgroup = false
"""

    def _containerd_answers(self) -> bool:
        with suppress(SetupError):
            return bool(self._ctr("version"))
        return False

    def _ctr(self, *arguments: str) -> str:
        program = str(self._programs.paths["ctr"])
        command = self._within(program, "--address", _CONTAINERD, "--namespace", "k8s.io", *arguments, network=True)
        return _output(command, f"ctr {arguments[0]}")

    def _start_dns(self) -> None:
        """CoreDNS, so that a headless Service's name is an address. It holds answers for no time: Pods come and go."""
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
            with socket.socket(socket.AF_INET, kind) as probe:
                try:
                    probe.bind((self.address, _DNS_PORT))
                except OSError as error:
                    raise NodeImpossible("a program of this machine has port 53 of every address") from error
        config = self.folder / "Corefile"
        config.write_text(
            f"""{DOMAIN} {{
    bind {self.address}
    errors
    kubernetes {DOMAIN} {{
        kubeconfig {self._cluster.kubeconfig} test
        ttl 0
    }}
}}
"""
        )
        self.start_process("coredns", [str(find_program("coredns")), "-conf", str(config)])
        self.wait("CoreDNS listens", self._dns_listens)

    def _dns_listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((self.address, _DNS_PORT)) == 0

    def _answers_names(self) -> bool:
        # "Can't find" is an answer as well; only silence is none.
        command = ["nslookup", "-type=a", f"kubernetes.default.svc.{DOMAIN}", self.address]
        busybox = str(self._programs.paths["busybox"])
        with suppress(SetupError):
            return "Address" in _output(self._within(busybox, *command, network=True), "nslookup")
        return False

    def _start_kubelet(self) -> None:
        port = free_port()
        config = self.folder / "kubelet.json"
        config.write_text(json.dumps(self._kubelet_config(port)))
        flags = [
            f"--config={config}",
            f"--kubeconfig={self._cluster.kubeconfig}",
            f"--root-dir={self.folder / 'kubelet'}",
            f"--cert-dir={self.folder / 'certificates'}",
            f"--hostname-override={NODE}",
            f"--node-ip={self.address}",
        ]
        self.start_process("kubelet", self._within(str(find_program("kubelet")), *flags, network=False))

    def _kubelet_config(self, port: int) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": port,
            "readOnlyPort": 0,
            "healthzPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": f"{self._cluster.folder / KUBELET_CLIENT}.crt"},
            },
            "authorization": {"mode": "AlwaysAllow"},  # nobody but the API server has that certificate
            "containerRuntimeEndpoint": f"unix://{_CONTAINERD}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.name}",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "protectKernelDefaults": True,  # it finds what it wants (node_inside.sh); it never changes the kernel
            "makeIPTablesUtilChains": False,
            "hairpinMode": "none",
            "clusterDNS": [self.address],
            "clusterDomain": DOMAIN,
            "resolvConf": "",
            "volumePluginDir": str(self.folder / "volume-plugins"),
            # A full disk or little memory of this machine is not what a test is about.
            "evictionHard": {"memory.available": "20Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "maxPods": 100,
            "registryPullQPS": 0,
            "shutdownGracePeriod": "0s",
        }

    def _takes_pods(self) -> bool:
        with suppress(ApiError, Transient):
            node = self._cluster.api.call("GET", f"/api/v1/nodes/{NODE}")
            conditions = {one["type"]: one["status"] for one in node["status"].get("conditions", ())}
            return conditions.get("Ready") == "True" and not node["spec"].get("taints")
        return False

    def _last_words(self) -> str:
        for name in ("kubelet", "containerd", "inside"):
            if name in self._processes and (
                lines := self._processes[name].log.read_text(errors="replace").splitlines()
            ):
                return f"the {name}'s last words: {lines[-1]}"
        return "nothing was said"


def _output(command: list[str], what: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{what} failed ({type(error).__name__})") from error
    if done.returncode:
        raise SetupError(f"{what} failed: {(done.stderr.strip() or done.stdout.strip() or 'it says nothing')[-500:]}")
    return done.stdout
