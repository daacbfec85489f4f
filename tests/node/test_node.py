"""The real node itself: containers run, nothing of the machine's is touched, and a node that was killed leaves nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_infra.testing import node_programs, node_surroundings
from orca_infra.testing.cluster import TestCluster
from orca_infra.testing.node import IMAGE, RealNode
from orca_infra.testing.node_surroundings import NodeImpossible, check_surroundings, link_of, remove_node_leftovers

# Where containerd, the kubelet and CNI write by default, and the kernel's settings that a kubelet or a bridge changes.
MACHINES = (
    "/run/containerd", "/run/netns", "/var/lib/containerd", "/var/lib/kubelet", "/var/lib/cni", "/var/log/pods",
    "/var/log/containers", "/etc/cni", "/opt/cni", "/opt/containerd",
)  # fmt: skip
SYSCTLS = (
    "net/ipv4/ip_forward", "vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops",
    "kernel/keys/root_maxkeys", "kernel/keys/root_maxbytes",
)  # fmt: skip


def machine() -> dict[str, Any]:
    """What a node could change, and must not."""
    folders = {path: sorted(Path(path).iterdir()) if Path(path).is_dir() else None for path in MACHINES}
    settings = {name: Path("/proc/sys", name).read_text() for name in SYSCTLS if Path("/proc/sys", name).exists()}
    return {**folders, **settings}


def traces(name: str) -> list[str]:
    """Whatever of a node's is on the machine, but for its folder."""
    found = [line for line in Path("/proc/mounts").read_text().splitlines() if name in line]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{name}")]
    found += [str(path) for path in Path("/sys/fs/cgroup").glob(name)]
    found += [link.name for link in Path("/sys/class/net").iterdir() if link.name == link_of(name)]
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if name.encode() in (entry / "cmdline").read_bytes():
                found.append(entry.name)
        except OSError:
            continue
    return found


def pod(name: str, *command: str) -> dict[str, Any]:
    container = {"name": "c", "image": IMAGE, "command": list(command)}
    return {"metadata": {"name": name}, "spec": {"containers": [container], "restartPolicy": "Never"}}


def phase(cluster: TestCluster, namespace: str, name: str) -> str:
    found = cluster.api.call("GET", f"/api/v1/namespaces/{namespace}/pods/{name}")
    return str(found["status"]["phase"])


# Bad surroundings.


def test_a_machine_without_overlays_is_said(
    cluster: TestCluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = (
        '#!/bin/sh\ncase "$2" in overlay) echo "unknown filesystem type overlay" >&2; exit 32;; esac\n'
        f'exec {shutil.which("mount")} "$@"\n'
    )
    put(tmp_path / "mount", script)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    before = set(Path(tempfile.gettempdir()).glob("orca-node-*"))
    with pytest.raises(NodeImpossible, match="to mount an overlay in .*: unknown filesystem type overlay"):
        RealNode.start(cluster)
    assert set(Path(tempfile.gettempdir()).glob("orca-node-*")) <= before


def put(path: Path, script: str) -> None:
    path.write_text(script)
    path.chmod(0o755)


def test_logs_and_exec_go_through_the_api_server(
    cluster: TestCluster, node: RealNode, namespace: str, wait_until: Callable[..., None]
) -> None:
    cluster.api.call("POST", f"/api/v1/namespaces/{namespace}/pods", pod("p", "orca", "runtime"))
    wait_until(lambda: phase(cluster, namespace, "p") == "Running", 30)
    wait_until(lambda: "it waits" in cluster.kubectl("logs", "p", "--namespace", namespace), 10)
    said = cluster.kubectl("exec", "p", "--namespace", namespace, "--", "python3", "-c", "print(6 * 7)")
    assert said.strip() == "42"


def test_a_node_changes_nothing_of_the_machine_and_a_killed_one_leaves_nothing(
    wait_until: Callable[..., None], namespace: str, node: RealNode
) -> None:
    """A second cluster with a second node, in a process that is killed while a container runs there."""
    before = machine()
    program = (
        "import sys, time\n"
        "from orca_infra.testing.cluster import TestCluster\n"
        "from orca_infra.testing.node import IMAGE, RealNode\n"
        "cluster = TestCluster.start(nodes=0)\n"
        "node = RealNode.start(cluster)\n"
        "item = {'metadata': {'name': 'p'}, 'spec': {'containers': [{'name': 'c', 'image': IMAGE}]}}\n"
        "cluster.api.call('POST', '/api/v1/namespaces/default/pods', item)\n"
        "while len(node.containers()) < 2:\n"
        "    time.sleep(0.1)\n"
        "print(node.name, flush=True)\n"
        "time.sleep(300)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None
            name = owner.stdout.readline().strip()
            assert name.startswith("orca-node-"), "the second node did not come up"
            assert machine() == before
            assert traces(name)
        finally:
            owner.send_signal(signal.SIGKILL)
    # By the kernel alone: every process, and with the last one the mounts, the link and the Pods' networks.
    cgroups = {str(path) for path in Path("/sys/fs/cgroup").glob(f"**/{name}")}
    wait_until(lambda: set(traces(name)) <= cgroups, 15, "the killed node's processes, mounts and links go")
    # By the next start: its folder and its cgroups. The node of these tests, whose owner lives, stays.
    assert name in remove_node_leftovers()
    assert traces(name) == []
    assert not Path(node.folder.parent, name).exists()
    assert node.folder.exists()
    assert traces(node.name)
    node.check()
    assert machine() == before


def test_the_first_thing_that_is_missing_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def said() -> str:
        with pytest.raises(NodeImpossible) as caught:
            check_surroundings()
        assert "\n" not in str(caught.value)
        return str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        assert said() == "a real node needs Linux"
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 1000)
        assert said() == "a real node needs root"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("PATH", str(tmp_path))
    for program in ("ip", "unshare", "nsenter", "setpriv", "mount", "openssl"):
        assert said() == f"a real node needs the program {program!r}, which is not on PATH"
        put(tmp_path / program, "#!/bin/sh\necho 'Operation not permitted' >&2\nexit 1\n")
    cgroups = tmp_path / "cgroup"
    cgroups.mkdir()
    monkeypatch.setattr(node_surroundings, "_CGROUPS", cgroups)
    assert said() == f"a real node needs the cgroup controllers cpu, memory, pids in {cgroups}"
    (cgroups / "cgroup.controllers").write_text("cpu memory pids\n")  # version 2: what is given to children counts
    (cgroups / "cgroup.subtree_control").write_text("cpu pids\n")
    assert said() == f"a real node needs the cgroup controllers memory in {cgroups}"
    (cgroups / "cgroup.subtree_control").write_text("cpu memory pids\n")
    assert said().endswith("a bridge and veth links of its own: Operation not permitted")


def test_without_a_debian_mirror_the_reason_is_said_and_nothing_hangs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    put(tmp_path / "apt-get", "#!/bin/sh\necho 'E: no mirror' >&2\nexit 100\n")
    put(tmp_path / "dpkg-deb", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("ORCA_TOOLS_CACHE", str(tmp_path / "cache"))
    with pytest.raises(NodeImpossible, match="apt-get update failed: E: no mirror"):
        node_programs.find_node_programs()
    assert not list((tmp_path / "cache").glob("debian-*-*"))
