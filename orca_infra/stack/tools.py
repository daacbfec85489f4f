"""Where the programs are that the engine needs: on PATH, where the vendor installs them, or linked by tools/build.py."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

from orca_infra.errors import SetupError

_CHECKOUT = Path(__file__).resolve().parents[2]
#: tools/build.py of a checkout links what it found or built into this folder.
LINKS = _CHECKOUT / ".tools" / "bin"
#: Stand-ins for what only the vendor's download has (the language host); after everything else on the path.
STAND_INS = _CHECKOUT / "tools" / "stand-ins"


def search_path(environ: dict[str, str] | None = None) -> str:
    """The PATH for engine processes: this program's own plugins first, then the caller's, the vendor's and the checkout's.

    A shell that gets this PATH (`orca-infra env`) finds the same programs as the loop.
    """
    environ = dict(os.environ) if environ is None else environ
    folders = [str(Path(sys.executable).parent), *environ.get("PATH", os.defpath).split(os.pathsep)]
    folders += [str(pulumi_home(environ) / "bin"), str(LINKS), str(STAND_INS)]
    return os.pathsep.join(dict.fromkeys(folder for folder in folders if folder))


def pulumi_home(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the vendor's pulumi is installed, and keeps its plugins."""
    return Path(environ.get("PULUMI_HOME") or "~/.pulumi").expanduser()


def find_tool(name: str) -> Path | None:
    """The program's path, or None."""
    found = shutil.which(name, path=search_path())
    return Path(found) if found else None


def require_tool(name: str) -> Path:
    """The program's path. Raises SetupError naming the command that gets it."""
    found = find_tool(name)
    if found is None:
        raise SetupError(f"the program {name!r} was not found; {remedy(name)}")
    return found


def remedy(name: str) -> str:
    """The one command that gets a missing program."""
    if (_CHECKOUT / "tools" / "build.py").exists():
        return f"`python3 tools/build.py {name}` in the checkout builds it (Go 1.26), or put the vendor's on PATH"
    if name.startswith("pulumi"):
        return "install Pulumi from its vendor and put it on PATH"
    return "put it on PATH, or work in a checkout of orca-infra, where `make tools` builds it"
