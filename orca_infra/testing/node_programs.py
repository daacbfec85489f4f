"""What a real node runs that is in no Go module: containerd, runc, the CNI plugins and busybox, as Debian has them.

Those on this machine's PATH are used. What is missing is downloaded by apt-get and unpacked into the tools cache, never
installed: an installed containerd would start a service, and would take the place of one that belongs to the machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orca_infra.testing.images import cache_folder
from orca_infra.testing.node_surroundings import NodeImpossible

#: Debian's packages, and the programs of each that a node uses.
PACKAGES: Mapping[str, tuple[str, ...]] = {
    "containerd": ("containerd", "containerd-shim-runc-v2", "ctr"),
    "runc": ("runc",),
    "containernetworking-plugins": ("bridge", "host-local", "loopback"),
    "busybox-static": ("busybox",),
}
_PLUGIN_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
_FOLDERS = ("usr/bin", "usr/sbin", "bin", "sbin", "usr/lib/cni")
_APT_SECONDS = 240
_TRY_SECONDS = 20


@dataclass(frozen=True, slots=True)
class NodePrograms:
    """Where each is: `paths` by name; `plugins` is the folder of the CNI plugins."""

    paths: Mapping[str, Path]

    @property
    def plugins(self) -> Path:
        return self.paths["bridge"].parent

    def search_path(self) -> str:
        """A PATH on which containerd finds its shim and runc first."""
        folders = [str(self.paths[name].parent) for name in ("containerd-shim-runc-v2", "runc")]
        return os.pathsep.join(
            [*folders, "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"]
        )


def find_node_programs() -> NodePrograms:
    """Find them, or download them once per machine.

    Raises NodeImpossible saying in one line why they cannot be had.
    """
    found: dict[str, Path] = {}
    for package, names in PACKAGES.items():
        programs = {name: _installed(package, name) for name in names}
        if any(path is None for path in programs.values()):
            folder = unpacked(package)
            programs = {name: inside(folder, name) for name in names}
        for name, path in programs.items():
            if path is None:
                raise NodeImpossible(
                    f"Debian's package {package} has no {name}; remove {cache_folder()}/debian-* and try again"
                )
            found[name] = path
    for name in ("containerd", "runc"):
        _try(found[name])
    return NodePrograms(found)


def _installed(package: str, name: str) -> Path | None:
    if package == "containernetworking-plugins":
        return next((Path(f, name) for f in _PLUGIN_FOLDERS if os.access(Path(f, name), os.X_OK)), None)
    if package == "busybox-static":  # the one on PATH may need libraries
        return None
    found = shutil.which(name)
    return Path(found) if found else None


def inside(folder: Path, name: str) -> Path | None:
    """A program of an unpacked package."""
    return next((folder / place / name for place in _FOLDERS if (folder / place / name).exists()), None)


def unpacked(package: str) -> Path:
    """The cache folder with the files of Debian's package; its name changes with the distribution and its release.

    Raises NodeImpossible saying in one line why it cannot be had.
    """
    release = Path("/etc/os-release")
    key = (release.read_bytes() if release.exists() else b"") + platform.machine().encode()
    folder = cache_folder() / f"debian-{package}-{hashlib.sha256(key).hexdigest()[:16]}"
    if folder.is_dir():
        return folder
    for program in ("apt-get", "dpkg-deb"):
        if shutil.which(program) is None:
            raise NodeImpossible(
                f"{package} is not on PATH and there is no {program} to get Debian's; install {package}"
            )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        (folder.parent / "debian.lock").open("w") as lock,
        tempfile.TemporaryDirectory(dir=folder.parent, prefix="debian-tmp-") as temporary,
    ):
        fcntl.flock(lock, fcntl.LOCK_EX)  # two that ask at once: the second finds the first one's
        if folder.is_dir():
            return folder
        archive = _download(package, Path(temporary))
        ready = Path(temporary) / "ready"
        _run(["dpkg-deb", "--extract", str(archive), str(ready)], Path(temporary), f"unpacking {package}")
        ready.rename(folder)
    return folder


def _download(package: str, folder: Path) -> Path:
    """The package's archive. The lists of what Debian has are renewed once when it is not to be had by them."""
    # Dropping its rights, apt-get could not write here; `download` neither needs root nor changes the machine.
    command = ["apt-get", "--quiet", "--quiet", "-o", "APT::Sandbox::User=root", "download", package]
    try:
        _run(command, folder, f"downloading {package}")
    except NodeImpossible:
        _run(["apt-get", "--quiet", "--quiet", "update"], folder, "apt-get update")
        _run(command, folder, f"downloading {package}")
    archives = list(folder.glob("*.deb"))
    if not archives:
        raise NodeImpossible(f"apt-get downloaded no {package}; install {package}")
    return archives[0]


def _run(command: list[str], folder: Path, what: str) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=_APT_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"},
        )
    except subprocess.TimeoutExpired:
        raise NodeImpossible(f"{what} took longer than {_APT_SECONDS} s; is a Debian mirror within reach?") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
        raise NodeImpossible(f"{what} failed: {said}")


def _try(program: Path) -> None:
    """An unpacked program's libraries are the machine's: say so here, and not as a Pod that never starts."""
    try:
        done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=_TRY_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NodeImpossible(f"{program} does not run ({type(error).__name__})") from error
    if done.returncode:
        raise NodeImpossible(f"{program} does not run: {(done.stderr.strip() or 'it says nothing').splitlines()[-1]}")
