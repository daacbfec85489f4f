#!/usr/bin/env python3
"""Make the virtual environment from uv.lock: `.venv` of this checkout, exactly as locked.

uv is taken from PATH, or installed once per machine with pip into the tools cache. Standard library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from build import BuildError, cache_folder, say

UV_VERSION = "0.13.9"
CHECKOUT = Path(__file__).resolve().parent.parent


def find_uv() -> str:
    """The uv on PATH, or the one in the cache, made when it is missing. Raises BuildError."""
    found = shutil.which("uv")
    if found:
        return found
    folder = cache_folder() / f"uv-{UV_VERSION}"
    if not (folder / "bin" / "uv").exists():
        say(f"installing uv {UV_VERSION} (once per machine)")
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Made aside and renamed: a second checkout that asks at the same time never finds half of it.
        temporary = folder.with_name(f"{folder.name}.{os.getpid()}")
        shutil.rmtree(temporary, ignore_errors=True)
        made = subprocess.run([sys.executable, "-m", "venv", temporary], capture_output=True, text=True, check=False)
        if made.returncode:
            raise BuildError(
                f"{sys.executable} cannot make a virtual environment; on Debian: apt-get install python3-venv"
            )
        install = [temporary / "bin" / "python", "-m", "pip", "install", "--quiet", f"uv=={UV_VERSION}"]
        installed = subprocess.run(install, capture_output=True, text=True, check=False)
        if installed.returncode:
            raise BuildError(
                f"uv cannot be installed with pip; is the package index within reach?\n{installed.stderr[-1000:]}"
            )
        try:
            temporary.rename(folder)
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
    return str(folder / "bin" / "uv")


def main() -> int:
    if sys.version_info < (3, 11):
        say(f"Python {sys.version.split()[0]} is too old: put a python3 of 3.11 or newer first on PATH")
        return 2
    try:
        command = [find_uv(), "sync", "--locked", "--quiet", "--python", sys.executable, "--project", str(CHECKOUT)]
        environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
        # The environment of another project, activated in this shell, is not ours to fill.
        environment.pop("VIRTUAL_ENV", None)
        if subprocess.run(command, env=environment, check=False).returncode:
            raise BuildError("the virtual environment could not be made from uv.lock; uv's message above says why")
    except (BuildError, OSError) as error:
        say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
