"""A driver's log, kept beside what the run itself writes: `<logs>/<run>/driver.log`."""

from __future__ import annotations

from pathlib import Path

from orca_infra.errors import OrcaError
from orca_infra.kube.client import Kube
from orca_infra.log import Log
from orca_infra.runs.model import SeenObject


def driver_log(logs: Path, run: int) -> Path:
    """Where a run's drivers are heard, all starts one after the other."""
    return logs / str(run) / "driver.log"


def save_log(kube: Kube, driver: SeenObject, logs: Path, log: Log) -> None:
    """Append what the driver's Pod said, under a header line of its own.

    A log that cannot be had is noted in the file and holds up nothing.
    """
    path = driver_log(logs, driver.run or 0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(f"--- run {driver.run} start {driver.start}, Pod {driver.name}, uid {driver.uid}\n".encode())
            try:
                for chunk in kube.logs(driver.namespace, driver.name):
                    file.write(chunk)
            except OrcaError as error:
                file.write(f"--- the log cannot be had: {error}\n".encode())
    except OSError as error:
        log.warning("log not saved", run=driver.run, path=str(path), said=error.strerror)
