"""What the benches share: a database and surroundings of their own, the machine's size, and the last line."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from orca_infra.db import embedded
from orca_infra.kube.client import Kube
from orca_infra.kube.kinds import POD
from orca_infra.kube.watching import Gone, Relisted, Seen
from orca_infra.machines.providers.local_cloud import LocalCloud
from orca_infra.settings import read_settings
from orca_infra.surroundings import Surroundings, open_surroundings


def progress(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


@contextmanager
def surroundings(environment: dict[str, str] | None = None) -> Iterator[Surroundings]:
    """A temporary home with an embedded Postgres; everything in it is ended and removed."""
    folder = Path(tempfile.mkdtemp(prefix="orca-bench-"))
    folder.chmod(0o755)
    (folder / "orca.toml").write_text("[pools]\n", encoding="utf-8")
    variables = {"ORCA_HOME": str(folder / "home"), "ORCA_CONFIG": str(folder / "orca.toml"), **(environment or {})}
    opened = open_surroundings(read_settings(variables), say=progress)
    try:
        yield opened
    finally:
        if opened.cloud_folder.is_dir():
            cloud = LocalCloud(opened.cloud_folder)
            for machine in cloud.list():
                cloud.delete(machine.name)
        opened.close()
        embedded.stop(folder / "home" / "postgres")
        shutil.rmtree(folder, ignore_errors=True)


class Pods:
    """The Pods of one namespace, counted by a watch: to list thousands again and again would be part of the figure."""

    def __init__(self, kube: Kube, namespace: str) -> None:
        self._ready: set[str] = set()
        self._there: set[str] = set()
        self._stop = threading.Event()
        threading.Thread(target=self._follow, args=[kube, namespace], daemon=True).start()

    @property
    def ready(self) -> int:
        return len(self._ready)

    @property
    def there(self) -> int:
        return len(self._there)

    def close(self) -> None:
        self._stop.set()

    def _follow(self, kube: Kube, namespace: str) -> None:
        for change in kube.follow(POD, namespace=namespace, silence_seconds=90, stop=self._stop):
            if isinstance(change, Relisted):
                self._there.clear()
                self._ready.clear()
            for pod in (
                change.items if isinstance(change, Relisted) else [change.object] if isinstance(change, Seen) else ()
            ):
                uid = pod["metadata"]["uid"]
                self._there.add(uid)
                conditions = pod.get("status", {}).get("conditions", [])
                if any(c["type"] == "Ready" and c["status"] == "True" for c in conditions):
                    self._ready.add(uid)
            if isinstance(change, Gone):
                uid = change.object["metadata"]["uid"]
                self._there.discard(uid)
                self._ready.discard(uid)


def report(
    bench: str, *, figures: dict[str, float], floors: dict[str, float], targets: dict[str, float], **more: Any
) -> None:
    """Print the bench's last line. Every target names a figure that has to be at most that."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    line = {
        "bench": bench,
        "machine": {"cores": os.cpu_count(), "memory_gib": round(memory), "python": platform.python_version()},
        "figures": {name: round(value, 4) for name, value in figures.items()},
        "floors": {name: round(value, 4) for name, value in floors.items()},
        "targets": targets,
        "met": all(figures[name] <= most for name, most in targets.items()),
        **more,
    }
    print(json.dumps(line))
