"""Container images made on this machine, for a real node of tests: nothing is pulled from anywhere.

`pause` holds a Pod's namespaces: Debian's static busybox, asleep. `orca` has this machine's own Python with psycopg and the
stand-in for orca (images_orca.py), at the very paths that they have here, so that nothing in them has to be changed. Both are
written as tars in the form that the OCI image layout defines, and kept in the tools cache under a hash of what went in.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from orca_infra.errors import SetupError

PAUSE = "orca.test/pause:1"
ORCA = "orca.test/orca:1"

_HERE = Path(__file__)
_PROGRAM = _HERE.with_name("images_orca.py")
#: Where the image has psycopg; not the virtual environment's path, which names this checkout.
_PACKAGES = "/opt/orca/packages"
_DISTRIBUTIONS = ("psycopg", "psycopg-binary", "typing-extensions")
# Of the standard library: what no program in a container needs, and what links to a desktop's libraries.
_LEFT_OUT = {
    "config-", "dbm", "distutils", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages", "dist-packages",
    "test", "tests", "tkinter", "turtledemo", "unittest", "venv",
}  # fmt: skip
_LEFT_OUT_MODULES = ("_tkinter", "_test", "_xx", "xx", "_gdbm", "_dbm", "_curses", "readline")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_LDD_SECONDS = 60


def cache_folder() -> Path:
    """The tools cache, as tools/build.py has it."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "orca-infra" / "tools"
    return Path(os.environ.get("ORCA_TOOLS_CACHE") or default).expanduser()


def pause_image(busybox: Path) -> Path:
    """The sandbox image's tar. Raises SetupError when it cannot be written."""
    return _kept("pause", [busybox.read_bytes()], lambda path: _write_pause(path, busybox))


def orca_image() -> Path:
    """The tar of the image for drivers, heads, workers and runtimes. Raises SetupError when it cannot be written."""
    versions = [f"{name} {metadata.version(name)}" for name in _DISTRIBUTIONS]
    parts = [sys.version, os.path.realpath(sys.executable), *versions]
    return _kept("orca", [_PROGRAM.read_bytes(), *(part.encode() for part in parts)], _write_orca)


def _kept(name: str, inputs: Iterable[bytes], write: Any) -> Path:
    digest = hashlib.sha256(_HERE.read_bytes())
    for part in inputs:
        digest.update(hashlib.sha256(part).digest())
    path = cache_folder() / "images" / f"{name}-{digest.hexdigest()[:16]}.tar"
    if not path.exists():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f"{name}-tmp-") as temporary:
                made = Path(temporary) / "image.tar"
                write(made)
                made.rename(path)  # in one step: two that make it at once both have a whole one
        except OSError as error:
            raise SetupError(f"the image {name} cannot be written in {path.parent} ({error.strerror})") from error
    return path


def _write_pause(path: Path, busybox: Path) -> None:
    layer = path.with_name("layer.tar")
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
        _Layer(tar).add(busybox, "/bin/busybox")
    # A number that busybox's sleep takes; the sandbox is killed, never waited for.
    _write_image(path, layer, PAUSE, {"Entrypoint": ["/bin/busybox", "sleep", "2000000000"]})


def _write_orca(path: Path) -> None:
    interpreter = Path(os.path.realpath(sys.executable))
    layer = path.with_name("layer.tar")
    with tarfile.open(layer, "w", format=tarfile.PAX_FORMAT) as tar:
        files = _Layer(tar)
        files.add(interpreter)
        libraries = [interpreter]
        for source, name in [*_standard_library(), *_packages()]:
            files.add(source, name)
            if ".so" in source.suffixes:
                libraries.append(source)
        folders = {str(Path(library).parent) for library in _linked(libraries, files)}
        program = f"#!{interpreter}\n".encode() + _PROGRAM.read_bytes()
        files.add_bytes("/usr/local/bin/orca", program, mode=0o755)
        files.add_link("/usr/local/bin/python3", str(interpreter))
        files.add_bytes("/etc/passwd", b"root:x:0:0:root:/root:/bin/false\n")
        files.add_bytes("/etc/nsswitch.conf", b"hosts: files dns\n")
        files.add_folder("/tmp", mode=0o1777)  # noqa: S108 - the container's own
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONPATH": _PACKAGES,
        "PYTHONDONTWRITEBYTECODE": "1",
        "LD_LIBRARY_PATH": ":".join(sorted(folders)),  # the image has no linker's cache
    }
    variables = [f"{name}={value}" for name, value in environment.items()]
    _write_image(path, layer, ORCA, {"Env": variables, "Entrypoint": ["orca", "runtime"]})


def _standard_library() -> Iterator[tuple[Path, str]]:
    root = Path(sysconfig.get_path("stdlib"))
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name for name in folders if name not in _LEFT_OUT and not name.startswith(("config-", "test"))
        )
        for name in sorted(names):
            source = Path(folder) / name
            if name.startswith(_LEFT_OUT_MODULES) and ".so" in name:
                continue
            if source.suffix in {".py", ".so"} or name.endswith(f".{sys.implementation.cache_tag}.pyc"):
                yield source, str(source)


def _packages() -> Iterator[tuple[Path, str]]:
    for distribution in _DISTRIBUTIONS:
        for file in metadata.files(distribution) or ():
            source = Path(str(file.locate()))
            if ".." not in file.parts and source.is_file():
                yield source, f"{_PACKAGES}/{file}"


def _linked(programs: list[Path], files: _Layer) -> set[str]:
    """Add the shared libraries that these need, and the linker; those that came with the packages are there already."""
    try:
        listed = subprocess.run(
            ["ldd", *map(str, programs)], capture_output=True, text=True, timeout=_LDD_SECONDS, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"ldd does not say which libraries Python needs ({error})") from error
    found = set(re.findall(r"(?:=> |^\t)(/\S+) \(0x", listed, re.MULTILINE))
    packages = str(Path(str(metadata.distribution("psycopg").locate_file(""))).resolve())
    system = {library for library in found if not str(Path(library).resolve()).startswith(packages)}
    if not any("ld-" in Path(library).name for library in system):
        raise SetupError("ldd names no dynamic linker for this Python: is this Linux with glibc?")
    for extra in ("libnss_dns.so.2", "libnss_files.so.2"):  # before glibc 2.34 a library of its own, loaded by name
        system |= {
            str(Path(library).with_name(extra))
            for library in sorted(system)
            if Path(library).name == "libc.so.6" and Path(library).with_name(extra).exists()
        }
    for library in sorted(system):
        files.add(Path(library))
    return system


class _Layer:
    """One layer's tar, in which every folder comes before what is in it; everything is root's and readable to all."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self._folders: set[str] = {"/", "."}
        self._names: set[str] = set()

    def add(self, source: Path, name: str | None = None) -> None:
        """A file, by what it is and not as the link to it. Its time is kept: compiled modules name that of their source."""
        name = name or str(source)
        status = source.stat()
        self.add_bytes(name, source.read_bytes(), mode=0o755 if status.st_mode & 0o100 else 0o644, at=status.st_mtime)

    def add_bytes(self, name: str, data: bytes, *, mode: int = 0o644, at: float = 0) -> None:
        if name in self._names:
            return
        self._names.add(name)
        for parent in reversed(Path(name).parents):
            self.add_folder(str(parent))
        entry = tarfile.TarInfo(name.lstrip("/"))
        entry.size, entry.mode, entry.mtime = len(data), mode, int(at)
        self._tar.addfile(entry, io.BytesIO(data))

    def add_link(self, name: str, target: str) -> None:
        entry = tarfile.TarInfo(name.lstrip("/"))
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, target, 0o777
        self._tar.addfile(entry)

    def add_folder(self, name: str, *, mode: int = 0o755) -> None:
        if name in self._folders:
            return
        self._folders.add(name)
        entry = tarfile.TarInfo(name.lstrip("/"))
        entry.type, entry.mode = tarfile.DIRTYPE, mode
        self._tar.addfile(entry)


def _write_image(path: Path, layer: Path, name: str, config: Mapping[str, Any]) -> None:
    """An OCI image layout with one image of one layer (opencontainers/image-spec, image-layout.md)."""
    with layer.open("rb") as file:
        layer_digest = hashlib.file_digest(file, "sha256").hexdigest()
    machine = platform.machine()
    description = {
        "architecture": _ARCHITECTURES.get(machine, machine),
        "os": "linux",
        "config": dict(config),
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{layer_digest}"]},
    }
    kind = "application/vnd.oci.image"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        files = _Layer(tar)

        def blob(media_type: str, content: Mapping[str, Any]) -> dict[str, Any]:
            data = json.dumps(content).encode()
            digest = hashlib.sha256(data).hexdigest()
            files.add_bytes(f"blobs/sha256/{digest}", data)
            return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}

        tar.add(layer, f"blobs/sha256/{layer_digest}")
        layers = [
            {
                "mediaType": f"{kind}.layer.v1.tar",
                "digest": f"sha256:{layer_digest}",
                "size": layer.stat().st_size,
            }
        ]
        configuration = blob(f"{kind}.config.v1+json", description)
        manifest_type = f"{kind}.manifest.v1+json"
        manifest = blob(
            manifest_type,
            {"schemaVersion": 2, "mediaType": manifest_type, "config": configuration, "layers": layers},
        )
        named = {**manifest, "annotations": {"io.containerd.image.name": name}}
        files.add_bytes("index.json", json.dumps({"schemaVersion": 2, "manifests": [named]}).encode())
        files.add_bytes("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')
