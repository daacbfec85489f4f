"""The demo: the main job told live, on the real engine, a real Postgres and the loop as it ships.

Everything is in one temporary folder, so any number of demos run at once; at the end, however it comes, nothing is left.
Each line that it prints is a check, with the value that was observed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from types import FrameType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from orca_infra.db import embedded
from orca_infra.errors import OrcaError
from orca_infra.machines.decide import STACK_LABEL
from orca_infra.machines.providers.local_cloud import LocalCloud, MachineRequest
from orca_infra.process import ProcessId, end_session
from orca_infra.screen import status_tables
from orca_infra.settings import read_settings
from orca_infra.stack.tools import search_path
from orca_infra.status import read_status
from orca_infra.surroundings import Surroundings, open_surroundings
from orca_infra.testing.cluster_files import write_private
from orca_infra.testing.demo_cluster import (
    DemoCluster,
    base_is_upped,
    run_cluster_comes_and_goes,
    warm_pod_is_taken,
)

RUNS = 6
_POLL_SECONDS = 0.25
_STEP_SECONDS = 240.0
_CONFIG = """
[pools.default]
provider = "local"
image = "registry.example/orca-worker:1"
locations = ["east", "west"]
max_machines = 1
idle_seconds = 4
[[pools.default.types]]
type = "small"

[local]
create_seconds = 0.3
[local.locations.east]
small = 0
[local.locations.west]
small = 4
"""
_ENVIRONMENT = {
    "ORCA_STACK": "demo",
    "ORCA_POOL_SCALE_SECONDS": "1",
    "ORCA_POOL_GROW_AFTER": "1",
    "ORCA_POOL_TRY_SECONDS": "2",
    "ORCA_HEARTBEAT_SECONDS": "1",
    "ORCA_STRAY_GRACE_SECONDS": "4",
}
_FOREIGN = ("ORCA_", "PULUMI_")


class DemoFailed(Exception):
    """Something that the demo tells did not happen."""


@dataclass
class Stage:
    """What the audience sees, and what the demo works with."""

    folder: Path
    environment: dict[str, str]
    console: Console
    surroundings: Surroundings
    started: float = field(default_factory=monotonic)
    lines: list[Text] = field(default_factory=list)
    live: Live | None = None

    @property
    def cloud(self) -> LocalCloud:
        return LocalCloud(self.surroundings.cloud_folder)

    def status(self) -> dict[str, Any]:
        return read_status(self.surroundings)

    def query(self, query: Any, **parameters: object) -> list[dict[str, Any]]:
        with self.surroundings.database.snapshot() as transaction:
            return transaction.dicts(query, parameters)

    def tell(self, sentence: str) -> None:
        self._add(Text(f"{monotonic() - self.started:5.1f} s  {sentence}", style="bold"))

    def checked(self, what: str, observed: object) -> None:
        self._add(Text.assemble(("         ok ", "green"), f"{what}: {observed}"))

    def until(self, what: str, observe: Callable[[], object]) -> Any:
        """Wait for something to be true; raises DemoFailed when it does not come."""
        deadline = monotonic() + _STEP_SECONDS
        while monotonic() < deadline:
            value = observe()
            self.draw()
            if value:
                return value
            sleep(_POLL_SECONDS)
        raise DemoFailed(f"{what}: did not happen within {_STEP_SECONDS:.0f} s")

    @staticmethod
    def clock() -> float:
        return monotonic()

    @staticmethod
    def failed(sentence: str) -> DemoFailed:
        return DemoFailed(sentence)

    def draw(self) -> None:
        if self.live is not None:
            self.live.update(self._picture())

    def _picture(self) -> RenderableType:
        return Group(*self.lines, Text(), status_tables(self.status()))

    def _add(self, line: Text) -> None:
        if self.live is None:
            self.console.print(line)
        self.lines.append(line)


def run_demo(*, keep: bool, use_cluster: bool = False) -> bool:
    """Tell the story; gives whether all of it happened. Raises SetupError when it cannot begin."""
    console = Console(highlight=False, soft_wrap=True)
    folder = Path(tempfile.mkdtemp(prefix="orca-demo-"))
    folder.chmod(0o755)  # the embedded Postgres runs as another user when this one is root
    cluster: DemoCluster | None = None
    try:
        with _interrupted_by_signals():
            cluster = DemoCluster(use_cluster=use_cluster)
            stage = _set_stage(folder, console, cluster)
            loop = _start_loop(stage)
            try:
                with _live(stage):
                    happened = _tell(stage, loop, cluster)
                if happened:
                    console.print(Text(f"All of it happened, in {monotonic() - stage.started:.0f} s."))
                if keep and happened:
                    _keep(stage, loop)
            finally:
                _end_loop(loop)
    except KeyboardInterrupt:
        console.print(Text("\ninterrupted"))
        return False
    finally:
        _clean(folder)
        if cluster is not None:
            cluster.close()
    return happened


def _keep(stage: Stage, loop: subprocess.Popen[bytes]) -> None:
    """Say how to look around, and wait for Ctrl-C, or for the loop's end."""
    names = [name for name in stage.environment if name.startswith((*_FOREIGN, "KUBECONFIG"))]
    lines = [f"export {name}={shlex.quote(stage.environment[name])}\n" for name in sorted(names)]
    lines.append(f"export PATH={shlex.quote(search_path())}\n")
    write_private(stage.folder / "environment", "".join(lines))
    stage.console.print(
        Text(
            f"\nIt goes on running. To look around, in another shell:\n"
            f"  . {shlex.quote(str(stage.folder / 'environment'))}\n"
            "  orca-infra status\n"
            "  kubectl get namespaces\n"
            '  eval "$(orca-infra env)"; pulumi preview -s demo\n'
            "  orca-infra db psql -c \"insert into orca.runs (pipeline) values ('reports')\"   # and watch a machine come\n"
            "Ctrl-C here ends all of it."
        )
    )
    with suppress(KeyboardInterrupt):
        code = loop.wait()
        stage.console.print(Text(f"The loop ended by itself, with exit code {code}."))


def _set_stage(folder: Path, console: Console, cluster: DemoCluster) -> Stage:
    console.print(
        Text("The demo has its own Postgres, state and make-believe cloud with two locations, in a temporary folder.")
    )
    console.print(Text(f"Its Kubernetes: {cluster.description}."))
    (folder / "orca.toml").write_text(_CONFIG, encoding="utf-8")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    environment |= _ENVIRONMENT | cluster.environment()
    environment |= {
        "ORCA_HOME": str(folder / "home"),
        "ORCA_CONFIG": str(folder / "orca.toml"),
        "PULUMI_BACKEND_URL": (folder / "state").as_uri(),
    }
    if "PULUMI_HOME" in os.environ:
        environment["PULUMI_HOME"] = os.environ["PULUMI_HOME"]
    (folder / "state").mkdir()
    surroundings = open_surroundings(read_settings(environment), say=lambda _: None)
    return Stage(folder=folder, environment=environment, console=console, surroundings=surroundings)


def _start_loop(stage: Stage) -> subprocess.Popen[bytes]:
    guard = shutil.which("setpriv")
    command = [*([guard, "--pdeathsig", "TERM"] if guard else []), sys.executable, "-m", "orca_infra.cli", "run"]
    with (stage.folder / "loop.log").open("wb") as log:
        return subprocess.Popen(
            command, env=stage.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )


def _tell(stage: Stage, loop: subprocess.Popen[bytes], cluster: DemoCluster) -> bool:
    try:
        base_is_upped(stage, cluster)
        _loop_leads(stage, loop)
        machine = _demand_makes_a_machine(stage)
        _runs_finish(stage)
        strangers = _strays_go(stage)
        _idle_away(stage, machine)
        run_cluster_comes_and_goes(stage, cluster)
        warm_pod_is_taken(stage, cluster)
        _nothing_is_left(stage, strangers)
    except (DemoFailed, OrcaError) as error:
        stage.console.print(Text.assemble(("         failed ", "bold red"), str(error)))
        tail = (stage.folder / "loop.log").read_text(errors="replace").splitlines()[-5:]
        stage.console.print(Text("the loop's last words:\n  " + "\n  ".join(tail)))
        return False
    return True


def _loop_leads(stage: Stage, loop: subprocess.Popen[bytes]) -> None:
    stage.tell("The loop starts: one process, a pool without machines.")

    def observed() -> bool:
        if loop.poll() is not None:
            raise DemoFailed(f"the loop ended with exit code {loop.returncode}")
        return bool(stage.status()["pools"])

    stage.until("the loop's first pass", observed)
    pool = stage.status()["pools"][0]
    stage.checked("why nothing is made", pool["message"])


def _demand_makes_a_machine(stage: Stage) -> str:
    stage.tell(f"{RUNS} runs are queued for workers of the pool. East is sold out, west has room.")
    with stage.surroundings.database.transaction() as transaction:
        transaction.run("insert into orca.pipelines (name, placement) values ('reports', 'worker:default')")
        transaction.run(
            "insert into orca.runs (pipeline) select 'reports' from generate_series(1, %(runs)s)", {"runs": RUNS}
        )
    made = stage.until(
        "a machine", lambda: stage.query("select * from orca.pool_machines where confirmed_at is not null")
    )[0]
    refused = stage.query("select location, class, message from orca.pool_offers")
    if [row["class"] for row in refused] != ["NoCapacity"] or refused[0]["location"] != "east":
        raise DemoFailed(f"east was to answer that it has no capacity, and the offers say {refused}")
    stage.checked("east", refused[0]["message"])
    if made["location"] != "west":
        raise DemoFailed(f"the machine was to be made in west, and is in {made['location']}")
    operations = stage.query(
        "select kind, outcome, extract(epoch from ended_at - started_at) as seconds from orca.engine_operations order by id"
    )
    stage.checked("engine", ", ".join(f"{o['kind']} {o['outcome']} in {o['seconds']:.1f} s" for o in operations[:2]))
    stage.checked("west", f"{made['name']}, uid {made['uid']}")
    worker = stage.until(
        "its worker", lambda: stage.query("select * from orca.workers where name = %(n)s", n=made["name"])
    )
    boot = (worker[0]["first_seen_at"] - made["created_at"]).total_seconds()
    stage.checked("its worker showed up", f"{boot:.1f} s after the machine's row was written")
    return str(made["name"])


def _runs_finish(stage: Stage) -> None:
    stage.tell("The worker takes the runs with its token, one after the other.")
    done = "select count(*) as n from orca.runs where state = 'succeeded'"
    stage.until("all runs to succeed", lambda: stage.query(done)[0]["n"] == RUNS)
    workers = stage.query("select distinct worker from orca.runs")
    stage.checked("runs", f"{RUNS} succeeded on {', '.join(row['worker'] for row in workers)}")


def _strays_go(stage: Stage) -> list[str]:
    stage.tell(
        "Three machines are planted behind its back: one with this stack's identity, a foreign one, an unlabelled one."
    )
    identity = stage.surroundings.stack_id
    planted = {
        "planted-ours": {STACK_LABEL: identity},
        "planted-foreign": {STACK_LABEL: "another-stack"},
        "planted-unlabelled": {},
    }
    for name, labels in planted.items():
        stage.cloud.create(
            MachineRequest(
                name=name,
                location="west",
                type="small",
                labels=labels,
                environment={},
                argv=("python", "-c", "import time; time.sleep(600)"),
            )
        )
    stage.until("the stray to go", lambda: stage.cloud.get("planted-ours") is None)
    left = [machine.name for machine in stage.cloud.list() if machine.name in planted]
    if sorted(left) != ["planted-foreign", "planted-unlabelled"]:
        raise DemoFailed(f"only the stray with this stack's identity was to go, and of the three are left {left}")
    stage.checked("the stray is gone, and untouched are", ", ".join(sorted(left)))
    return left


def _idle_away(stage: Stage, machine: str) -> None:
    stage.tell("Nothing is queued: the machine idles away.")
    ended = stage.until(
        "the machine's end",
        lambda: stage.query("select * from orca.pool_machines where name = %(n)s and ended_at is not null", n=machine),
    )[0]
    if ended["reason"] != "Idle" or ended["revoked_at"] is None or ended["revoked_at"] > ended["ended_at"]:
        raise DemoFailed(f"the row was to end Idle with its token revoked before, and says {ended['reason']}")
    stage.checked("its row", f"ended {ended['reason']}, the token revoked before it")
    if stage.cloud.get(machine) is not None:
        raise DemoFailed(f"{machine} was to be deleted, and exists")
    stage.checked("its process", "gone")


def _nothing_is_left(stage: Stage, strangers: list[str]) -> None:
    stage.tell("What is left?")
    for name in strangers:
        stage.cloud.delete(name)
    left = [machine.name for machine in stage.cloud.list()]
    owned = stage.query("select name from orca.owned")
    live = stage.query("select name from orca.pool_machines where ended_at is null")
    if left or owned or live:
        raise DemoFailed(f"left are machines {left}, owned {owned}, rows {live}")
    stage.checked("machines, resources in the engine's state, live rows", "0, 0, 0")


@contextmanager
def _live(stage: Stage) -> Iterator[None]:
    """On a terminal the tables are drawn anew all the time; elsewhere only the lines are printed."""
    if not stage.console.is_terminal:
        yield
        return
    with Live(console=stage.console, refresh_per_second=8, transient=False) as live:
        stage.live = live
        try:
            yield
        finally:
            stage.draw()
            stage.live = None


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end the demo as Ctrl-C does; once it is ending, none of them cuts the cleaning short."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_IGN if signal.getsignal(number) is signal.SIG_IGN else handler)


def _end_loop(loop: subprocess.Popen[bytes]) -> None:
    if loop.poll() is None:
        identity = ProcessId.of(loop.pid)
        loop.terminate()
        try:
            loop.wait(15)
        except subprocess.TimeoutExpired:
            end_session(identity, 2)
            loop.wait()


def _clean(folder: Path) -> None:
    """End every machine and the database of this folder, then remove it."""
    if (folder / "home" / "cloud").is_dir():
        cloud = LocalCloud(folder / "home" / "cloud")
        for machine in cloud.list():
            cloud.delete(machine.name)
    embedded.stop(folder / "home" / "postgres")
    shutil.rmtree(folder, ignore_errors=True)
