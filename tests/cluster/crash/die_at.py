"""Make one pass of every scope as `orca-infra run --once` does, and be killed (SIGKILL) at a step of it: die_at.py SCOPE STEP.

Scope `launches` is a launch in place of a pass.

It exits with 0 when the pass never came to that step. Each step is a call of the product's that is replaced by one that first
lets it be made, or does not.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO, NoReturn

from orca_infra.cli.runtimes import launch_hands
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import JOB, POD
from orca_infra.log import make_log
from orca_infra.loop.run import Loop
from orca_infra.machines import apply as machines
from orca_infra.machines.providers.local import LocalProvider
from orca_infra.runs import apply as runs
from orca_infra.runs.logs import DriverLogs
from orca_infra.runtimes import apply as runtimes
from orca_infra.runtimes import launch as launching
from orca_infra.runtimes.launch import LaunchRequest
from orca_infra.settings import Settings, read_settings
from orca_infra.stack.cohorts import Cohorts
from orca_infra.stack.command import PulumiCommand
from orca_infra.stack.operations import RecordedEngine
from orca_infra.surroundings import open_surroundings

_LOOK_SECONDS = 0.02


def die(*_: object) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    raise AssertionError("it lives")


def before(owner: object, name: str, scope: str = "") -> None:
    """Die instead of the call; with a scope, only when the object that is called is of it."""
    call = getattr(owner, name)

    def dying(*arguments: Any, **more: Any) -> Any:
        if not scope or arguments[0]._scope == scope:
            die()
        return call(*arguments, **more)

    setattr(owner, name, dying)


def after(owner: object, name: str) -> None:
    """Die when the call has returned."""
    call = getattr(owner, name)

    def dying(*arguments: Any, **more: Any) -> Any:
        call(*arguments, **more)
        die()

    setattr(owner, name, dying)


def within(owner: object, name: str, has_begun: Callable[[], bool]) -> None:
    """Die in the call, as soon as what it does is seen."""
    call = getattr(owner, name)

    def dying(*arguments: Any, **more: Any) -> Any:
        def watch() -> None:
            while not has_begun():
                time.sleep(_LOOK_SECONDS)
            die()

        threading.Thread(target=watch, daemon=True).start()
        return call(*arguments, **more)

    setattr(owner, name, dying)


def half_appended() -> None:
    """Die when half of what a driver said is in its run's log."""

    def dying(source: BinaryIO, target: BinaryIO) -> None:
        text = source.read()
        target.write(text[: len(text) // 2])
        target.flush()
        die()

    shutil.copyfileobj = dying  # type: ignore[assignment]


def unnoted() -> None:
    """Die when an engine was started, before it is written down which process it is."""
    call = PulumiCommand.run

    def dying(*arguments: Any, on_start: object = None, **more: Any) -> Any:
        return call(*arguments, on_start=die if on_start else None, **more)

    PulumiCommand.run = dying  # type: ignore[method-assign]


def arm(scope: str, step: str, settings: Settings) -> None:
    def is_used_up() -> bool:
        return not (settings.home / "cloud" / "faults.json").exists()

    def is_there() -> bool:
        kind, namespace = (JOB, settings.runs_namespace) if scope == "runs" else (POD, settings.runtimes_namespace)
        return len(kube.list(kind, namespace=namespace).items) > standing

    kube = Kube.connect(kubeconfig=settings.kubeconfig)
    standing = int(os.environ.get("STANDING", "0"))
    steps: dict[tuple[str, str], Callable[[], None]] = {
        ("machines", "before the row"): lambda: before(machines, "_record"),
        ("machines", "between token and machine"): lambda: after(machines, "_record"),
        ("machines", "in the up"): lambda: within(RecordedEngine, "up", is_used_up),
        ("machines", "before it is written down which process the engine is"): unnoted,
        ("machines", "before the up's end is written"): lambda: before(RecordedEngine, "_end"),
        ("machines", "before the confirmation"): lambda: after(machines, "_up"),
        ("machines", "between the token's revocation and the deletion"): lambda: before(machines, "_destroy"),
        ("machines", "in the deletion"): lambda: within(RecordedEngine, "destroy", is_used_up),
        ("machines", "before the deletion's end is written"): lambda: before(RecordedEngine, "_end"),
        ("machines", "before the row's end"): lambda: after(machines, "destroy_names"),
        ("machines", "before a stray's delete"): lambda: before(LocalProvider, "delete"),
        ("machines", "after a stray's delete"): lambda: after(LocalProvider, "delete"),
        ("runs", "before the row"): lambda: before(runs, "render"),
        ("runs", "after the row"): lambda: before(Cohorts, "up", "runs"),
        ("runs", "in the up"): lambda: within(RecordedEngine, "up_new", is_there),
        ("runs", "before it is written down which process the engine is"): unnoted,
        ("runs", "before the up's end is written"): lambda: before(RecordedEngine, "_end"),
        ("runs", "before the confirmation"): lambda: before(Cohorts, "_confirm", "runs"),
        ("runs", "in a log"): lambda: before(DriverLogs, "_keep_one"),
        ("runs", "in the middle of what is appended to a log"): half_appended,
        ("runs", "after a log was appended"): lambda: after(DriverLogs, "_keep_one"),
        ("runs", "before the sweep"): lambda: before(runs, "_delete"),
        ("runs", "in the sweep"): lambda: after(runs, "_delete"),
        ("runs", "before the run's end is written"): lambda: before(runs, "_finish"),
        ("runs", "after a cohort's drop"): lambda: after(RecordedEngine, "drop"),
        ("runs", "in a stray's delete"): lambda: after(runs, "_delete"),
        ("runtimes", "before the row"): lambda: before(runtimes, "record_pods"),
        ("runtimes", "after the row"): lambda: before(Cohorts, "up", "runtimes"),
        ("runtimes", "in the up"): lambda: within(RecordedEngine, "up_new", is_there),
        ("runtimes", "before it is written down which process the engine is"): unnoted,
        ("runtimes", "before the up's end is written"): lambda: before(RecordedEngine, "_end"),
        ("runtimes", "before the confirmation"): lambda: before(Cohorts, "_confirm", "runtimes"),
        ("runtimes", "before the sweep"): lambda: before(runtimes, "_delete"),
        ("runtimes", "in the sweep"): lambda: after(runtimes, "_delete"),
        ("runtimes", "before the row's end"): lambda: before(runtimes, "_finish"),
        ("runtimes", "in a stray's delete"): lambda: after(runtimes, "_delete"),
        ("launches", "before the claim"): lambda: before(launching, "_claim"),
        ("launches", "between claim and Secret"): lambda: before(launching, "_make_secret"),
        ("launches", "after the Secret"): lambda: after(launching, "_make_secret"),
    }
    steps[scope, step]()


def main() -> int:
    scope, step = sys.argv[1:]
    settings = read_settings(os.environ)
    surroundings = open_surroundings(settings, say=lambda _: None)
    arm(scope, step, settings)
    if scope == "launches":
        request = LaunchRequest(environment="e", user="jane", secrets={"GREETING": "hello"}, idempotency_key="once")
        launching.launch(launch_hands(surroundings), request)
    else:
        Loop(surroundings, make_log(form="json")).run_once()
    surroundings.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
