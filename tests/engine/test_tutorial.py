"""docs/tutorial.md is run as it stands, command by command, and says what it says there."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
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


def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    found = steps((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))
    assert len(found) > 10
    script = "set -e\n" + "".join(f"echo '@@@ {number}'\n{step.commands}" for number, step in enumerate(found))
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("ORCA_", "PULUMI_", "XDG_"))}
    if "ORCA_TOOLS_CACHE" in os.environ:
        environ["ORCA_TOOLS_CACHE"] = os.environ["ORCA_TOOLS_CACHE"]
    process = subprocess.Popen(
        ["bash", "-c", script],
        cwd=ROOT,
        env={**environ, "HOME": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=280)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(20)
    parts = re.split(r"^@@@ \d+$", said, flags=re.MULTILINE)[1:]
    assert process.returncode == 0, f"it ended in step {len(parts) - 1}:\n{said}"
    for step, part in zip(found, parts, strict=True):
        assert missing(step, part) is None, f"not said: {missing(step, part)}\nafter: {step.commands}\nbut: {part}"
    assert not (tmp_path / "orca-tutorial").exists()


def test_a_line_that_is_not_said_is_noticed() -> None:
    step = Step("true", ["one  two …", "…three"])
    assert missing(step, "one two 2\nand three\n") is None
    assert missing(step, "and three\none two 2\n") == "…three"
    assert missing(step, "one three\n") == "one  two …"
