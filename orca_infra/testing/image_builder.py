"""Builds the product's image where no registry of images is: Debian's buildah, on a base of Debian's packages.

buildah and debootstrap are unpacked into the tools cache, never installed (node_programs.py). buildah runs in a mount
namespace of its own, in which the machine's libraries and those that it brings along are one folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from orca_infra.testing.images import cache_folder
from orca_infra.testing.node_programs import unpacked
from orca_infra.testing.node_surroundings import NodeImpossible

#: What of Debian the base image has: a Python that makes virtual environments, and the authorities of certificates.
_INCLUDE = "python3,python3-venv,ca-certificates"
_LIBRARIES = ("libgpgme11", "libassuan0", "libdevmapper1.02.1", "libsubid4")
_MIRROR = "http://deb.debian.org/debian"
_SUITE = "bookworm"
_AUTHORITIES = "/etc/ssl/certs/ca-certificates.crt"
_BUILD_SECONDS = 1200
_POLICY = {"default": [{"type": "insecureAcceptAnything"}]}


@dataclass(frozen=True, slots=True)
class ImageBuilder:
    """A builder with a store of its own in `folder`, which is its caller's to remove."""

    folder: Path
    buildah: Path
    libraries: tuple[Path, ...]
    system_libraries: Path
    root: Path

    @classmethod
    def find(cls, folder: Path) -> ImageBuilder:
        """Raises NodeImpossible, in one line, for what this machine lacks."""
        if sys.platform != "linux" or os.geteuid() != 0:
            raise NodeImpossible("images are built by root on Linux only")
        system = _library_folder()
        buildah = unpacked("buildah") / "usr" / "bin" / "buildah"
        found = [unpacked(package) / system.relative_to("/") for package in _LIBRARIES]
        builder = cls(folder, buildah, tuple(path for path in found if path.is_dir()), system, _root_file_system())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "policy.json").write_text(json.dumps(_POLICY))
        try:
            builder.run("--version")
        except subprocess.CalledProcessError as error:
            raise NodeImpossible(f"buildah does not run here: {_last_line(error)}") from error
        return builder

    def base(self, name: str) -> None:
        """Make the base image."""
        signature = f"--signature-policy={self.folder / 'policy.json'}"
        container = self.run("from", "scratch").split()[-1]
        self.run("add", "--quiet", container, str(self.root), "/")
        self.run("commit", "--quiet", signature, container, name)
        self.run("rm", container)

    def build(self, context: Path, name: str, **arguments: str) -> Path:
        """Build the context's Dockerfile; gives the image as an archive of the OCI image layout."""
        signature = f"--signature-policy={self.folder / 'policy.json'}"
        given = [f"--build-arg={key}={value}" for key, value in arguments.items()]
        # Whoever this machine trusts for its downloads, the build trusts; nothing of it stays in the image.
        volume = f"--volume={_AUTHORITIES}:{_AUTHORITIES}:ro"
        self.run("bud", "--isolation=chroot", signature, volume, *given, f"--tag={name}", str(context))
        archive = self.folder / "image.tar"
        self.run("push", "--quiet", signature, name, f"oci-archive:{archive}:{name}")
        return archive

    def run(self, *arguments: str) -> str:
        """What buildah prints. Raises CalledProcessError with its words."""
        places = [f"--root={self.folder / 'store'}", f"--runroot={self.folder / 'run'}", "--storage-driver=vfs"]
        lower = ":".join(str(path) for path in (*self.libraries, self.system_libraries))
        mount = f"mount -t overlay overlay -o lowerdir={lower} {self.system_libraries}"
        command = shlex.join([str(self.buildah), *(places if arguments != ("--version",) else []), *arguments])
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"{mount} && exec {command}"],
            capture_output=True,
            text=True,
            timeout=_BUILD_SECONDS,
            check=True,
        )
        return done.stdout


def _library_folder() -> Path:
    found = [path for path in Path("/usr/lib").glob("*-linux-gnu") if (path / "libc.so.6").exists()]
    if not found:
        raise NodeImpossible("Debian's buildah needs Debian's libraries, and /usr/lib has no folder of them")
    return found[0]


def _root_file_system() -> Path:
    """The base image's files as a tar in the tools cache; made once per machine, in about a minute and a half."""
    digest = hashlib.sha256(f"{_INCLUDE} {_SUITE} {os.uname().machine}".encode()).hexdigest()[:16]
    path = cache_folder() / "images" / f"debian-python-{digest}.tar"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    tools = unpacked("debootstrap")
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="debootstrap-tmp-") as temporary:
        root, archive = Path(temporary) / "root", Path(temporary) / "root.tar"
        make = [str(tools / "usr" / "sbin" / "debootstrap"), "--variant=minbase", f"--include={_INCLUDE}", _SUITE]
        environment = {**os.environ, "DEBOOTSTRAP_DIR": str(tools / "usr" / "share" / "debootstrap")}
        try:
            subprocess.run(
                [*make, str(root), _MIRROR],
                env=environment,
                capture_output=True,
                text=True,
                timeout=_BUILD_SECONDS,
                check=True,
            )
            shutil.rmtree(root / "var" / "cache" / "apt" / "archives", ignore_errors=True)
            subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True, capture_output=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired, OSError) as error:
            raise NodeImpossible(f"a Debian file system cannot be made here: {_last_line(error)}") from error
        archive.rename(path)
    return path


def _last_line(error: Exception) -> str:
    said: Sequence[str] = (
        str(getattr(error, "stderr", "") or getattr(error, "stdout", "") or error).strip().splitlines()
    )
    return said[-1] if said else type(error).__name__
