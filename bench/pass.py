"""A pass in which nothing is to be done over 1,000 machines, a small up, and how soon due demand reaches the provider.

The floors are the same work without this program around it: the provider's list and the database's queries alone, and the
SDK's own `Stack.up` of the same resource.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from harness import progress, report, surroundings

from orca_infra.config import parse_config
from orca_infra.log import make_log
from orca_infra.loop.leader import Leader
from orca_infra.loop.passes import MachinePasses, configure_providers, look
from orca_infra.machines.decide import machine_labels
from orca_infra.machines.observe import SQL
from orca_infra.machines.program import machine_program
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.machines.providers.local_machine import PROCESS, RECORD, write_json
from orca_infra.names import machine_name
from orca_infra.process import ProcessId, boot_id
from orca_infra.stack.engine import Engine, engine_environment
from orca_infra.surroundings import Surroundings

MACHINES_COUNT = 1000
PASSES = 7
UPS = 5
DUE = 2
_POOL = """
[pools.default]
provider = "local"
image = "registry.example/orca-worker:1"
locations = ["west"]
max_machines = 2000
idle_seconds = "1h"
[[pools.default.types]]
type = "small"
"""
_LOOP = {"ORCA_POOL_GROW_AFTER": "16", "ORCA_POOL_SCALE_SECONDS": "15", "ORCA_POOL_TRY_SECONDS": "1"}


def main() -> None:
    figures: dict[str, float] = {}
    floors: dict[str, float] = {}
    with surroundings() as here:
        no_change_pass(here, figures, floors)
    with surroundings() as here:
        small_up(here, figures, floors)
    with surroundings(_LOOP) as here:
        due_to_create(here, figures)
    report(
        "pass",
        figures=figures,
        floors=floors,
        targets={
            "no_change_pass_seconds": 1.0,
            "no_change_pass_engine_operations": 0,
            "small_up_seconds": 1.8,
            "due_to_create_seconds": 5.0,
        },
    )


def no_change_pass(here: Surroundings, figures: dict[str, float], floors: dict[str, float]) -> None:
    progress(f"no-change pass: {MACHINES_COUNT} machines, each a real process, idle, with a worker that was just heard")
    config = parse_config(_POOL, "bench")
    configure_providers(config, here)
    processes = [plant(here, number) for number in range(1, MACHINES_COUNT + 1)]
    leader = Leader(here.url)
    assert leader.acquire()
    passes = MachinePasses(here, Engine(here.engine), leader.verify, make_log())
    try:
        seconds = []
        for _ in range(PASSES):
            hear_workers(here)
            started = time.perf_counter()
            result = passes.run(config)
            seconds.append(time.perf_counter() - started)
            assert result.changed == 0
            assert not result.plan.actions, result.plan.actions[:3]
            assert len(result.snapshot.machines) == len(result.snapshot.seen) == MACHINES_COUNT
        figures["no_change_pass_seconds"] = median(seconds)
        with here.database.snapshot() as transaction:
            count = transaction.value("select count(*) from orca.engine_operations")
        figures["no_change_pass_engine_operations"] = count
        providers = configure_providers(config, here)
        started = time.perf_counter()
        look(here, providers)
        floors["observe_seconds"] = time.perf_counter() - started
    finally:
        leader.release()
        for process in processes:
            process.kill()
            process.wait()


def plant(here: Surroundings, number: int) -> subprocess.Popen[bytes]:
    """One machine as a finished create leaves it: a process, its record, its row, its ownership."""
    name = machine_name("default", number)
    process = subprocess.Popen(["sleep", "3600"], start_new_session=True, stdin=subprocess.DEVNULL)
    folder = here.cloud_folder / "machines" / name
    folder.mkdir(parents=True)
    me = ProcessId.of(process.pid)
    uid = f"{number:032x}"
    record = {
        "name": name,
        "uid": uid,
        "location": "west",
        "type": "small",
        "labels": machine_labels(here.stack_id, "default"),
        "created_at": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
        "argv": ["sleep", "3600"],
        "state": "",
    }
    write_json(folder / RECORD, record)
    write_json(folder / PROCESS, {"pid": me.pid, "started": me.started, "boot": boot_id()})
    with here.database.transaction() as transaction:
        transaction.run(
            SQL["record_machine"],
            {
                "name": name,
                "pool": "default",
                "number": number,
                "provider": "local",
                "type": "small",
                "location": "west",
                "spot": False,
                "rendered": "{}",
                "token_hash": b"-",
            },
        )
        transaction.run(SQL["confirm_machine"], {"name": name, "uid": uid})
        transaction.run("insert into orca.workers (name, pool) values (%(name)s, 'default')", {"name": name})
        transaction.run(
            "insert into orca.owned (stack, urn, type, name, id, uid) values (%(s)s, %(n)s, 't', %(n)s, %(n)s, %(u)s)",
            {"s": f"{here.settings.stack}.machines.default", "n": name, "u": uid},
        )
    return process


def hear_workers(here: Surroundings) -> None:
    with here.database.transaction() as transaction:
        transaction.run("update orca.workers set seen_at = now()")


def small_up(here: Surroundings, figures: dict[str, float], floors: dict[str, float]) -> None:
    progress("small up: one machine more in its stack, the state beside the database")
    configure_providers(parse_config(_POOL, "bench"), here)
    engine = Engine(here.engine)
    ours = []
    theirs = []
    for number in range(UPS + 1):
        started = time.perf_counter()
        name = f"ours-{number}"
        changes = engine.up(
            "bench.machines.ours",
            machine_program(KIND, {name: (declaration_of(here, name), "x")}),
            targets=(urn_of("bench.machines.ours", name),),
            deadline_seconds=60,
            on_start=lambda _: None,
        )
        assert any(change.outputs.get("uid") for change in changes)
        ours.append(time.perf_counter() - started)
        theirs.append(sdk_up(here, f"theirs-{number}"))
    # The first of each makes the stack and imports the SDK.
    figures["small_up_seconds"] = median(ours[1:])
    floors["sdk_stack_up_seconds"] = median(theirs[1:])


KIND = "orca:index:Machine"


def declaration_of(here: Surroundings, name: str) -> dict[str, object]:
    return {
        "folder": str(here.cloud_folder),
        "name": name,
        "location": "west",
        "type": "small",
        "labels": machine_labels(here.stack_id, "default"),
        "argv": ["sleep", "600"],
        "environment": {"ORCA_TOKEN": "x"},
    }


def urn_of(stack: str, name: str) -> str:
    return f"urn:pulumi:{stack}::orca-infra::{KIND}::{name}"


def sdk_up(here: Surroundings, name: str) -> float:
    """The same machine through the SDK's resource class and its Stack.up."""
    import pulumi
    from pulumi import automation

    def program() -> None:
        pulumi.CustomResource(KIND, name, declaration_of(here, name))

    environment = engine_environment(here.engine)
    os.environ["PATH"] = environment["PATH"]
    stack = automation.create_or_select_stack(
        "bench.machines.theirs",
        project_name="orca-infra",
        program=program,
        opts=automation.LocalWorkspaceOptions(env_vars=environment),
    )
    started = time.perf_counter()
    stack.up(target=[urn_of("bench.machines.theirs", name)])
    return time.perf_counter() - started


def due_to_create(here: Surroundings, figures: dict[str, float]) -> None:
    progress(f"due demand: {DUE} times a run that comes due 16 s after it is queued, with a pass each 15 s")
    config = Path(here.settings.config_path)
    config.write_text(_POOL, encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ORCA_", "PULUMI_"))},
        **_LOOP,
        "ORCA_HOME": str(here.settings.home),
        "ORCA_CONFIG": str(config),
        "ORCA_HEARTBEAT_SECONDS": "1",
    }
    loop = subprocess.Popen([sys.executable, "-m", "orca_infra.cli", "run"], env=environment)
    try:
        waits = [one_due(here, number) for number in range(1, DUE + 1)]
    finally:
        loop.send_signal(signal.SIGTERM)
        loop.wait(30)
    figures["due_to_create_seconds"] = max(waits)


def one_due(here: Surroundings, number: int) -> float:
    """Queue a run for a pipeline of which nothing runs; gives the seconds from when it is due to the provider's create."""
    with here.database.transaction() as transaction:
        transaction.run(
            "insert into orca.pipelines (name, placement) values ('p', 'worker:default') on conflict do nothing"
        )
        due_at = transaction.value(
            "insert into orca.runs (pipeline) values ('p') returning queued_at + make_interval(secs => 16)"
        )
    cloud = LocalCloud(here.cloud_folder)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        made = cloud.list() if here.cloud_folder.is_dir() else []
        if made:
            wait = (made[0].created_at - due_at).total_seconds()
            progress(f"  {number}: created {wait:.2f} s after it was due")
            clear(here)
            return wait
        time.sleep(0.1)
    raise SystemExit("no machine was made within 60 s")


def clear(here: Surroundings) -> None:
    """Let the machine's run end, and have the machine go, so that the next run needs a new one."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with here.database.transaction() as transaction:
            confirmed = transaction.value(
                "select count(*) from orca.pool_machines where ended_at is null and confirmed_at is null"
            )
            running = transaction.value("select count(*) from orca.runs where state in ('queued', 'running')")
        if not confirmed and not running:
            break
        time.sleep(0.2)
    cloud = LocalCloud(here.cloud_folder)
    for machine in cloud.list():
        cloud.preempt(machine.name)
    while time.monotonic() < deadline and cloud.list():
        time.sleep(0.2)


main()
