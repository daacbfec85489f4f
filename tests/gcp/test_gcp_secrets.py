"""A machine's token is nowhere but on the machine: planted ones are looked for everywhere else."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orca_infra.machines.program import machine_program
from orca_infra.machines.tokens import worker_token
from orca_infra.stack.engine import PROJECT as PULUMI_PROJECT
from orca_infra.testing.fake_gcp import Fault

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1200)]

Gcp = Callable[..., Any]
TABLES = ("pool_machines", "engine_operations", "owned", "pool_status", "pool_offers", "workers", "runs", "passes")


def command_lines() -> str:
    lines = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                lines.append((entry / "cmdline").read_bytes().decode(errors="replace"))
            except OSError:
                continue
    return "\n".join(lines)


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and "postgres" not in path.parts}


def tables(w: Any) -> str:
    there = [
        row["name"]
        for row in w.rows("select table_name as name from information_schema.tables where table_schema = 'orca'")
    ]
    return "\n".join(repr(w.rows(f"select * from orca.{table}")) for table in TABLES if table in there)


def test_a_planted_token_is_in_no_state_log_preview_exception_process_argument_or_table(
    gcp: Gcp, background: Any
) -> None:
    w = gcp()
    key, stack_id = w.surroundings.token_key, w.surroundings.stack_id
    tokens = [worker_token(key, stack_id, f"orca-p-{n}") for n in range(1, 4)]

    # One create while its processes are looked at.
    w.cloud.arm("insert", Fault(seconds=3600))
    w.queue()
    one = background(w.run_pass)
    w.engine_at("insert")
    assert not any(token in command_lines() for token in tokens)
    w.cloud.hurry()
    one.join()
    assert one.error is None
    assert tokens[0] in json.dumps(w.cloud.named("orca-p-1").body)  # it is on the machine, or the test sees nothing

    # One that fails, in words that quote what was asked for.
    w.cloud.arm("insert", Fault(status=400, reason="invalid", message=f"Invalid value: 'ORCA_TOKEN={tokens[1]}'"))
    w.queue()
    w.run_pass()
    assert w.reasons()["orca-p-2"] == "Failed"

    # One in a preview.
    row = w.machine("orca-p-1")
    kind = w.provider.resource_type
    program = machine_program(kind, {"orca-p-3": ({**row["rendered"], "name": "orca-p-3"}, tokens[2])})
    changes = w.engine.preview(w.stack, program, deadline_seconds=180)
    assert any(f"urn:pulumi:{w.stack}::{PULUMI_PROJECT}::{kind}::orca-p-3" == change.urn for change in changes)
    assert not any(token in repr(changes) for token in tokens)

    exported = w.engine._export(w.stack)
    assert "ciphertext" in json.dumps(exported)
    places = {
        "state": json.dumps(exported),
        "tables": tables(w),
        "log": repr(w.log.lines),
        **{
            str(path): content.decode(errors="replace")
            for path, content in files_below(w.surroundings.settings.home).items()
        },
    }
    found = {where for where, text in places.items() for token in tokens if token in text}
    assert not found


def test_the_token_is_in_no_argument_of_the_machines_own_processes(gcp: Gcp) -> None:
    w = gcp()
    w.queue()
    w.run_pass()
    instance = w.cloud.named("orca-p-1")
    user_data = json.loads(instance.metadata["user-data"].partition("\n")[2])
    script = user_data["write_files"][0]
    assert script["permissions"] == "0600"
    token = worker_token(w.surroundings.token_key, w.surroundings.stack_id, "orca-p-1")
    lines = [line for line in script["content"].splitlines() if token in line]
    assert lines == [f"ORCA_TOKEN={token}"]
    assert subprocess.run(["bash", "-n"], input=script["content"], text=True, check=False).returncode == 0
