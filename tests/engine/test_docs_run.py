"""Pages of the documentation are run as they stand, command by command, and say what they say there."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
INDENTED = re.compile(r"^ +```sh\n(.*?)^ +```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"^```(sh|text)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass
class Step:
    """Commands, and lines that they print in this order: `…` stands for anything, spaces for any number of them."""

    commands: str
    lines: list[str]


def steps(page: str) -> list[Step]:
    found: list[Step] = []
    for kind, text in BLOCK.findall(page):
        if kind == "sh":
            found.append(Step(text, []))
        else:
            found[-1].lines += text.splitlines()
    return found


def missing(step: Step, said: str) -> str | None:
    """The first line that was not printed after the one before it."""
    at = 0
    for line in step.lines:
        words = [r"\s+".join(re.escape(word) for word in part.split()) for part in line.split("…")]
        match = re.compile(r"[^\n]*?".join(words)).search(said, at)
        if match is None:
            return line
        at = match.end()
    return None


def run_steps(found: list[Step], folder: Path, home: Path) -> None:
    """Run the commands in one shell, and compare what they print with what the page says that they print."""
    script = "set -e\n" + "".join(f"echo '@@@ {number}'\n{step.commands}" for number, step in enumerate(found))
    environ = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("ORCA_", "PULUMI_", "XDG_", "COLUMNS"))
    }
    environ["PATH"] = f"{Path(sys.executable).parent}:{environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=folder,
        env={**environ, "HOME": str(home), "PULUMI_HOME": str(home / ".pulumi")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=840)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)
    parts = re.split(r"^@@@ \d+$", said, flags=re.MULTILINE)[1:]
    assert process.returncode == 0, f"it ended in step {len(parts) - 1}:\n{said}"
    for step, part in zip(found, parts, strict=True):
        assert missing(step, part) is None, f"not said: {missing(step, part)}\nafter: {step.commands}\nbut: {part}"


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    found = steps((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    assert len(found) > 10
    run_steps(found, ROOT, tmp_path)
    assert not (tmp_path / "orca-tutorial").exists()


BEFORE_ROTATION = """
export ORCA_HOME=$HOME/home ORCA_CONFIG=$HOME/orca.toml ORCA_STACK=rotated ORCA_POOL_GROW_AFTER=1ms
cat > $ORCA_CONFIG <<'END'
[pools.p]
provider = "local"
image = "registry.example/worker:1"
max_machines = 2
idle_seconds = "1h"
types = [{ type = "small", locations = ["a"] }]
END
orca-infra db migrate
orca-infra db psql -q -c "insert into orca.pipelines (name, placement) values ('x', 'worker:p')" \
  -c "insert into orca.runs (pipeline) values ('x')"
orca-infra run --once
cp $ORCA_HOME/passphrase $HOME/old-passphrase
"""
AFTER_ROTATION = """
if cmp -s $PULUMI_CONFIG_PASSPHRASE_FILE $HOME/old-passphrase; then exit 1; fi
orca-infra machines drain orca-p-1 --now
orca-infra run --once
orca-infra machines list --all
orca-infra machines list
pulumi preview -s rotated.machines.p
unset ORCA_DB
orca-infra db stop
"""


def test_the_passphrase_is_rotated_as_the_page_says(tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    (checkout / "stacks").mkdir(parents=True)
    for name in ("Pulumi.yaml", "__main__.py"):
        shutil.copy(ROOT / name, checkout)
    (checkout / "tools").symlink_to(ROOT / "tools")
    page = (ROOT / "docs" / "howto" / "rotate-the-passphrase.md").read_text(encoding="utf-8")
    found = [Step(textwrap.dedent(text), []) for text in INDENTED.findall(page)]
    assert len(found) == 2
    after = Step(AFTER_ROTATION, ["orca-p-1 goes at once…", "orca-p-1  p  small  a …  Drained", "no machines"])
    run_steps([Step(BEFORE_ROTATION, []), *found, after], checkout, tmp_path)


def test_a_line_that_is_not_said_is_noticed() -> None:
    step = Step("true", ["one  two …", "…three"])
    assert missing(step, "one two 2\nand three\n") is None
    assert missing(step, "and three\none two 2\n") == "…three"
    assert missing(step, "one three\n") == "one  two …"
