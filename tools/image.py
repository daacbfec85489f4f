#!/usr/bin/env python3
"""Prepare the context of the image in dist/image: the Dockerfile, the wheel, its locked requirements, the engine's programs.

    tools/image.py [FOLDER]

To be run with the Python of .venv, after tools/build.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

from build import LINKS, BuildError, say
from setup import find_uv

CHECKOUT = Path(__file__).resolve().parent.parent
#: What a container has to have, and what it has where it is found: the providers of the clouds are their vendor's download.
PROGRAMS = ("pulumi", "pulumi-resource-kubernetes")
MORE_PROGRAMS = ("pulumi-resource-gcp",)


def prepare(folder: Path) -> None:
    """Fill the folder, which is emptied first. Raises BuildError naming what is missing."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "bin").mkdir(parents=True)
    shutil.copy(CHECKOUT / "Dockerfile", folder / "Dockerfile")
    uv = find_uv()
    _run([uv, "build", "--quiet", "--wheel", "--out-dir", str(folder), str(CHECKOUT)], "the wheel")
    (folder / ".gitignore").unlink(missing_ok=True)
    export = [
        "export",
        "--quiet",
        "--frozen",
        "--no-dev",
        "--no-emit-project",
        "--no-header",
        "--project",
        str(CHECKOUT),
    ]
    _run([uv, *export, "--output-file", str(folder / "requirements.txt")], "the requirements")
    for name in PROGRAMS:
        program = _find(name)
        if program is None:
            raise BuildError(f"{name} was not found: `python3 tools/build.py {name}` builds it")
        shutil.copy(program, folder / "bin" / name)
    for name in MORE_PROGRAMS:
        program = _find(name)
        if program is None:
            say(
                f"{name} was not found, and is left out: pools on that cloud need it (`pulumi plugin install resource gcp`)"
            )
        else:
            shutil.copy(program, folder / "bin" / name)


def _find(name: str) -> Path | None:
    """Where the checkout links it, on PATH, or where `pulumi plugin install` puts it (the newest)."""
    found = LINKS / name
    if found.exists():
        return found
    on_path = shutil.which(name)
    if on_path:
        return Path(on_path)
    home = Path(os.environ.get("PULUMI_HOME") or "~/.pulumi").expanduser()
    installed = sorted((home / "plugins").glob(f"{name.removeprefix('pulumi-')}-v*/{name}"))
    return installed[-1] if installed else None


def _run(command: list[str], what: str) -> None:
    environment = {**os.environ, "UV_PYTHON_DOWNLOADS": "never"}
    environment.pop("VIRTUAL_ENV", None)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise BuildError(f"{what} could not be made: {done.stderr.strip()[-1000:]}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=CHECKOUT / "dist" / "image")
    options = parser.parse_args(arguments)
    try:
        prepare(options.folder)
    except (BuildError, OSError) as error:
        say(str(error))
        return 2
    print(f"prepared {options.folder}; now, with any builder of images:\n  docker build -t orca-infra {options.folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
