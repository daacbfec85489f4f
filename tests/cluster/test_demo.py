"""The demo as a person runs it, up to looking around while it goes on and ending it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

PROGRAM = Path(sys.executable).with_name("orca-infra")


def test_the_demo_tells_all_goes_on_for_whoever_looks_around_and_leaves_nothing() -> None:
    demo = subprocess.Popen([PROGRAM, "demo", "--keep"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert demo.stdout is not None
    said = []
    try:
        for line in demo.stdout:
            said.append(line)
            if line.startswith("Ctrl-C here"):
                break
        else:
            pytest.fail("".join(said))
        told = "".join(said)
        assert "All of it happened" in told
        [environment] = re.findall(r"^  \. (/.*/environment)$", told, re.MULTILINE)
        looked = _shell(f". {environment}; orca-infra status; kubectl get namespaces --output=name")
        assert "runs: 7 succeeded" in looked
        assert re.search("^namespace/orca-demo-.*-runs$", looked, re.MULTILINE)
    finally:
        demo.send_signal(signal.SIGINT)
        rest = demo.communicate()[0]
    assert demo.returncode == 0, rest
    assert not Path(environment).parent.exists()


def _shell(script: str) -> str:
    done = subprocess.run(["/bin/sh", "-ec", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
