"""The database's clock decides: the local wall clock may jump by an hour and nothing is made or removed for it."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "orca_infra"
#: Who may read it, and what for.
READERS = {
    "kube/exec_credentials.py": "whether credentials that state their end have run out",
    "loop/configuration.py": "a metric: when orca.toml was read",
    "machines/providers/local_cloud.py": "the make-believe cloud's own clock",
    "machines/providers/local_machine.py": "the make-believe cloud's own clock",
    "machines/worker.py": "the lines of its console",
    "metrics.py": "metrics: when a pass ended, how old the configuration is",
    "preview/gather.py": "how old the demand is that a comment shows",
    "runtimes/apply.py": "the time that an Event shows",
    "runtimes/touch.py": "an annotation whose change alone counts",
}
WALL = {("time", "time"), ("time", "strftime"), ("datetime", "now"), ("datetime", "utcnow"), ("datetime", "today")}


def readers() -> set[str]:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        name = str(path.relative_to(PACKAGE))
        if name.startswith("testing/"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                if (node.value.id, node.attr) in WALL:
                    found.add(name)
            elif isinstance(node, ast.ImportFrom) and node.module == "time":
                assert not {alias.name for alias in node.names} & {"time", "strftime"}, name
    return found


def test_nothing_that_decides_reads_the_local_wall_clock() -> None:
    assert readers() == set(READERS)
