"""What a real node needs of its machine, and what one that was killed may have left there.

A node's mounts, processes, Pods' networks and its bridge are in namespaces of its own and go with it. Outside are: its
folder, one network link, and cgroups; all three carry one name that is random and its own, `orca-node-<8 characters>`.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from orca_infra.errors import OrcaError, SetupError
from orca_infra.process import ProcessId, boot_id, is_alive
from orca_infra.testing.cluster_files import is_left

PREFIX = "orca-node-"
#: In a node's folder: which process is PID 1 of its namespaces.
IDENTITY = "inside.json"
_CGROUPS = Path("/sys/fs/cgroup")
_PROGRAMS = ("ip", "unshare", "nsenter", "setpriv", "mount", "openssl")
# runc limits with these; without memory no container is ever out of it.
_CONTROLLERS = ("cpu", "memory", "pids")
_COMMAND_SECONDS = 120
_GONE_SECONDS = 120.0
_POLL_SECONDS = 0.05
_SUBNET_TRIES = 200


class NodeImpossible(SetupError):
    """This machine can have no real node; the message says in one line what it lacks. Tests of one are skipped."""


def check_surroundings() -> None:
    """Raises NodeImpossible, in one line, for the first thing that a real node needs and this machine does not have."""
    if sys.platform != "linux":
        raise NodeImpossible("a real node needs Linux")
    if os.geteuid() != 0:
        raise NodeImpossible("a real node needs root")
    for program in _PROGRAMS:
        if shutil.which(program) is None:
            raise NodeImpossible(f"a real node needs the program {program!r}, which is not on PATH")
    _check_cgroups()
    # In a network namespace that goes with its only command: nothing of it is seen outside.
    inner = "ip link add node0 type bridge && ip link add orca type veth peer name node1"
    if words := _words(["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", inner]):
        raise NodeImpossible(f"a real node needs namespaces, a bridge and veth links of its own: {words}")


def _check_cgroups() -> None:
    if (_CGROUPS / "cgroup.controllers").exists():
        given = (_CGROUPS / "cgroup.subtree_control").read_text().split()
        lacking = [name for name in _CONTROLLERS if name not in given]
    else:
        lacking = [name for name in _CONTROLLERS if not (_CGROUPS / name / "tasks").exists()]
    if lacking:
        raise NodeImpossible(f"a real node needs the cgroup controllers {', '.join(lacking)} in {_CGROUPS}")
    probe = next(_cgroup_roots()) / f"{PREFIX}probe-{secrets.token_hex(4)}"
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise NodeImpossible(
            f"a real node needs cgroups of its own, and {probe} cannot be made ({error.strerror})"
        ) from error


def _cgroup_roots() -> Iterator[Path]:
    """Where cgroups of containers are made: one hierarchy in version 2, one for each controller in version 1."""
    if (_CGROUPS / "cgroup.controllers").exists():
        yield _CGROUPS
        return
    yield from (path for path in sorted(_CGROUPS.iterdir()) if path.is_dir() and not path.is_symlink())


def _words(command: list[str]) -> str:
    """What a command that failed says; nothing when it did not fail."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]}: {type(error).__name__}"
    return "" if done.returncode == 0 else (done.stderr.strip() or f"{command[0]} failed").splitlines()[-1]


def ip(*arguments: str, inside: int | None = None) -> None:
    """Run `ip`, in the network namespace of a process where one is given. Raises SetupError with its words."""
    command = ["ip", *arguments]
    if inside is not None:
        command = ["nsenter", f"--net=/proc/{inside}/ns/net", *command]
    if words := _words(command):
        raise SetupError(f"`ip {' '.join(arguments)}` failed: {words}")


def free_subnet() -> ipaddress.IPv4Network:
    """A /24 of 10.0.0.0/8 that overlaps no route of this machine. Raises NodeImpossible when there is none."""
    listed = subprocess.run(
        ["ip", "-json", "-4", "route", "show", "table", "all"],
        capture_output=True,
        text=True,
        timeout=_COMMAND_SECONDS,
        check=False,
    ).stdout
    taken = []
    for route in json.loads(listed or "[]"):
        with contextlib.suppress(ValueError):  # `default`
            taken.append(ipaddress.ip_network(route["dst"], strict=False))
    # Not the Services' range of a test cluster (10.0.0.0/16), nor kwok's Pods' (10.64.0.0/10).
    for _ in range(_SUBNET_TRIES):
        subnet = ipaddress.IPv4Network(f"10.{128 + secrets.randbelow(127)}.{secrets.randbelow(256)}.0/24")
        if not any(subnet.overlaps(network) for network in taken if network.version == 4):
            return subnet
    raise NodeImpossible("every network of 10.128.0.0/9 that was tried is in use on this machine")


def link_of(name: str) -> str:
    """The name of a node's network link on the machine; 15 characters are allowed (IFNAMSIZ)."""
    return "orca" + name.removeprefix(PREFIX)


def end_inside(process: ProcessId) -> None:
    """Kill PID 1 of a node's namespaces; returns when everything that ran in them is gone. Raises SetupError if it stays."""
    if is_alive(process):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + _GONE_SECONDS
    while is_alive(process):
        if time.monotonic() > deadline:
            raise SetupError(f"process {process.pid}, PID 1 of a node, is there {_GONE_SECONDS:.0f} s after SIGKILL")
        time.sleep(_POLL_SECONDS)


def remove_traces(name: str) -> None:
    """Remove a node's link and its cgroups; what is left in those is killed. Does nothing where there is nothing."""
    if Path("/sys/class/net", link_of(name)).exists():
        _words(["ip", "link", "delete", link_of(name)])
    deadline = time.monotonic() + _GONE_SECONDS
    for root in _cgroup_roots():
        while not _remove_cgroup(root / name) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)


def _remove_cgroup(top: Path) -> bool:
    """Remove a tree of cgroups from its leaves up; gives whether it is gone."""
    if not top.is_dir():
        return True
    for folder, _, _ in os.walk(top, topdown=False):
        with contextlib.suppress(OSError):
            for pid in Path(folder, "cgroup.procs").read_text().split():
                if int(pid):  # 0: a process of a PID namespace that we do not see
                    os.kill(int(pid), signal.SIGKILL)
        with contextlib.suppress(OSError):  # busy until the kernel has taken its last process away
            Path(folder).rmdir()
    return not top.is_dir()


def remove_node_leftovers(parent: Path | None = None) -> list[str]:
    """Remove what nodes left whose owners are dead; gives their names."""
    removed = []
    for path in sorted(Path(parent or tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_uid != os.getuid() or not is_left(path):
                continue
            with contextlib.suppress(OrcaError, OSError, ValueError, KeyError):
                kept = json.loads((path / IDENTITY).read_text())
                if kept["boot"] == boot_id():
                    end_inside(ProcessId(kept["pid"], kept["started"]))
            remove_traces(path.name)
            shutil.rmtree(path, ignore_errors=True)
            removed.append(path.name)
    return removed
