#!/usr/bin/env python3
"""Get the pinned programs that tests and the demo run: found, or built once per machine from Go modules.

    tools/build.py [TOOL ...]     all that tests and demo run by default; links each into .tools/bin of this checkout
    tools/build.py --list         what there is, and where each is

A tool is looked for on PATH, then where its vendor's installer puts it, then in the cache; what is nowhere is built from
the Go module in the folder beside this file. The cache is outside the checkout (ORCA_TOOLS_CACHE, by default
~/.cache/orca-infra/tools) and each build's folder is named by a hash of its pins, so a second checkout builds nothing.
A build that was interrupted is resumed by Go's own build cache, and two that ask at once wait for one another.

Standard library only: it runs before the virtual environment exists.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
LINKS = HERE.parent / ".tools" / "bin"
PROGRESS_SECONDS = 20

PULUMI_VERSION = "v3.274.1"
PROVIDER_VERSION = "4.25.0"
KUBERNETES_VERSION = "v1.36.3"


@dataclass(frozen=True)
class Tool:
    """One program: `module` is a folder beside this file, `package` what `go build` is asked for there."""

    name: str
    module: str
    package: str
    stamp: str = ""  # the -X of the linker that tells the program its version
    vendor_folders: tuple[str, ...] = ()
    minimum: tuple[int, int] | None = None  # what a program found on PATH has to be at least
    schema_module: str = ""  # a Go module whose schema.json is embedded


_KUBERNETES_STAMP = f"k8s.io/component-base/version.gitVersion={KUBERNETES_VERSION}"
_KUBERNETES_FOLDERS = ("$KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin")
_PULUMI_FOLDERS = ("$PULUMI_HOME/bin", "~/.pulumi/bin")


def _kubernetes(name: str) -> Tool:
    return Tool(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}", _KUBERNETES_STAMP, _KUBERNETES_FOLDERS, (1, 34))


TOOLS = {
    tool.name: tool
    for tool in (
        Tool(
            "pulumi",
            "pulumi",
            "github.com/pulumi/pulumi/pkg/v3/cmd/pulumi",
            f"github.com/pulumi/pulumi/sdk/v3/go/common/version.Version={PULUMI_VERSION}",
            _PULUMI_FOLDERS,
            (3, 250),
        ),
        Tool(
            "pulumi-resource-kubernetes",
            "pulumi-kubernetes",
            ".",
            f"github.com/pulumi/pulumi-kubernetes/provider/v4/pkg/version.Version={PROVIDER_VERSION}",
            _PULUMI_FOLDERS,
            schema_module="github.com/pulumi/pulumi-kubernetes/provider/v4",
        ),
        _kubernetes("kube-apiserver"),
        _kubernetes("kube-controller-manager"),
        _kubernetes("kube-scheduler"),
        _kubernetes("kubelet"),
        _kubernetes("kubectl"),
        Tool("etcd", "etcd", "go.etcd.io/etcd/server/v3", "", _KUBERNETES_FOLDERS, (3, 5)),
        Tool("kwok", "kwok", "sigs.k8s.io/kwok/cmd/kwok"),
        Tool("coredns", "coredns", "github.com/coredns/coredns"),
    )
}
#: Built only when they are asked for by name: what a bench compares with.
ON_DEMAND = {"ray-operator": Tool("ray-operator", "kuberay", "github.com/ray-project/kuberay/ray-operator")}
GO_MINIMUM = (1, 26)


class BuildError(Exception):
    """What could not be had, and the next step, in one sentence."""


def say(message: str) -> None:
    print(f"tools: {message}", file=sys.stderr, flush=True)


def cache_folder() -> Path:
    default = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "orca-infra" / "tools"
    return Path(os.environ.get("ORCA_TOOLS_CACHE") or default).expanduser()


def build_folder(tool: Tool) -> Path:
    """The cache folder of this build; its name changes with the module's pins, the flags and the platform."""
    digest = hashlib.sha256(repr((tool, sys.platform, os.uname().machine)).encode())
    for path in sorted((HERE / tool.module).iterdir()):
        if path.suffix in {".mod", ".sum", ".go"}:
            digest.update(path.name.encode() + path.read_bytes())
    return cache_folder() / f"{tool.name}-{digest.hexdigest()[:16]}"


def version_of(program: Path) -> tuple[int, int] | None:
    """The first X.Y that the program prints of itself, or None when it prints none."""
    for arguments in (["version", "--client"], ["version"], ["--version"]):
        try:
            answer = subprocess.run(
                [program, *arguments],
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
                env={**os.environ, "PULUMI_SKIP_UPDATE_CHECK": "true"},
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        match = re.search(r"(\d+)\.(\d+)", answer.stdout)
        if answer.returncode == 0 and match:
            return int(match[1]), int(match[2])
    return None


def installed(tool: Tool) -> Path | None:
    """The program as somebody else installed it: on PATH or in its vendor's folder, and not too old."""
    folders = [str(Path(os.path.expandvars(folder)).expanduser()) for folder in tool.vendor_folders]
    seen = set()
    for folder in [*os.environ.get("PATH", "").split(os.pathsep), *folders]:
        program = Path(folder or ".") / tool.name
        if program.resolve() in seen:
            continue
        seen.add(program.resolve())
        if "$" in folder or not os.access(program, os.X_OK) or program.resolve().is_relative_to(cache_folder()):
            continue
        if tool.minimum is None:
            return program
        found = version_of(program)
        if found and found >= tool.minimum:
            return program
        needed = ".".join(map(str, tool.minimum))
        has = f"is {found[0]}.{found[1]}" if found else "does not say its version"
        say(f"{program} {has}, and {needed} is needed: not used")
    return None


def ensure(tool: Tool) -> Path:
    """Find the tool or build it. Raises BuildError."""
    program = installed(tool)
    if program:
        return program
    folder = build_folder(tool)
    if (folder / tool.name).exists():
        return folder / tool.name
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f"{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"{tool.name} is being built by another process: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / tool.name).exists():
            build(tool, folder)
    return folder / tool.name


def build(tool: Tool, folder: Path) -> None:
    """Build into a temporary folder beside `folder` and rename, so that a half-made program is never found."""
    go = find_go()
    started = time.monotonic()
    say(f"building {tool.name} from its Go module (once per machine; minutes when cold)")
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f"{tool.name}-tmp-") as temporary:
        source = Path(temporary) / "source"
        shutil.copytree(HERE / tool.module, source)
        if tool.schema_module:
            put_schema(go, tool, source)
        ready = Path(temporary) / "ready"
        flags = " ".join(["-s -w", *([f"-X {tool.stamp}"] if tool.stamp else [])])
        command = [go, "build", "-mod=mod" if tool.schema_module else "-mod=readonly", "-trimpath", "-buildvcs=false"]
        run([*command, "-ldflags", flags, "-o", str(ready / tool.name), tool.package], source, tool.name)
        if folder.exists():
            shutil.rmtree(folder)
        ready.rename(folder)
    say(f"built {tool.name} in {time.monotonic() - started:.0f} s")


def find_go() -> str:
    go = shutil.which("go")
    wanted = ".".join(map(str, GO_MINIMUM))
    if go is None:
        raise BuildError(f"Go is not on PATH; install Go {wanted} or newer, or put the tool itself on PATH")
    answer = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, check=False).stdout
    match = re.search(r"go(\d+)\.(\d+)", answer)
    if not match or (int(match[1]), int(match[2])) < GO_MINIMUM:
        raise BuildError(f"{go} is {answer.strip() or 'of no known version'}; install Go {wanted} or newer")
    return go


def put_schema(go: str, tool: Tool, source: Path) -> None:
    """The provider's schema as its vendor ships it: the module's own, with the version set."""
    run([go, "mod", "download", tool.schema_module], source, f"{tool.name}'s module")
    listed = subprocess.run(
        [go, "list", "-m", "-f", "{{.Dir}}", tool.schema_module], cwd=source, capture_output=True, text=True, check=True
    )
    schema = json.loads((Path(listed.stdout.strip()) / "cmd" / tool.name / "schema.json").read_text())
    schema["version"] = tool.stamp.rpartition("=")[2]
    (source / "schema.json").write_text(json.dumps(schema, separators=(",", ":")))


def run(command: list[str], folder: Path, what: str) -> None:
    """Run quietly, with a line of progress now and then; Go's own words are shown only when it fails."""
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "", "GOTOOLCHAIN": "local"}
    done = threading.Event()

    def progress() -> None:
        started = time.monotonic()
        while not done.wait(PROGRESS_SECONDS):
            say(f"… {what}, {time.monotonic() - started:.0f} s so far")

    threading.Thread(target=progress, daemon=True).start()
    try:
        result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    except KeyboardInterrupt:
        raise BuildError(f"interrupted while building {what}; the next call goes on from here") from None
    finally:
        done.set()
    if result.returncode:
        tail = "\n".join(line for line in result.stderr.splitlines() if not line.startswith("go: downloading"))[-2000:]
        raise BuildError(f"building {what} failed; is the Go module proxy within reach, and the disk not full?\n{tail}")


def link(name: str, program: Path) -> None:
    """Make `.tools/bin/<name>` point to the program; replaced in one step, since two may do it at once."""
    LINKS.mkdir(parents=True, exist_ok=True)
    temporary = LINKS / f".{name}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(program)
    temporary.rename(LINKS / name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    known = TOOLS | ON_DEMAND
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=", ".join(known))
    parser.add_argument("--list", action="store_true", help="say where each is, and build nothing")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.tools if name not in known]
    if unknown:
        say(f"no tool is called {unknown[0]!r}; there are {', '.join(known)}")
        return 2
    wanted = [known[name] for name in options.tools or TOOLS]
    try:
        for tool in wanted:
            if options.list:
                cached = build_folder(tool) / tool.name
                print(f"{tool.name}: {installed(tool) or (cached if cached.exists() else 'not built')}")
            else:
                link(tool.name, ensure(tool))
    except (BuildError, OSError) as error:
        say(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
