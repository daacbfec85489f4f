"""Many passes with seeded demand and faults against the real engine: does anything grow, and does everything go at the end?

    make bench BENCH=soak ARGS="--passes 1000 --seed 7 --resume soak.json"

A loop as anybody runs it (`orca-infra run`, at a quickened cadence) keeps machine pools, run clusters and a runtime pool: the
real engine and its provider, a real Postgres with the engine's state in it, a real API server; machines are processes with
real workers (soak_world.py). Demand comes in tides, and meanwhile faults of the cloud, the database, the API server, the
engine, and of people (soak_faults.py). Between the tides everything has to go: then the simulation's invariants are judged,
and it is measured what is held (soak_measures.py), of which the slope has a bound (soak_slopes.py). So what is measured is
each time the same world at rest.

A pass of the soak is one of each scope: machines, runs and runtimes. With --resume, a file keeps what was found so far, and a
soak that was cut off goes on with a world of its own; growth is judged within each world.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness import progress, report
from soak_measures import sample
from soak_slopes import BOUNDS, Sample, slopes
from soak_world import SoakWorld

from orca_infra.db import embedded
from orca_infra.testing.cluster import TestCluster

_TIDES = 25
_TIDE_PASSES_LEAST = 8
_MOMENT_SECONDS = 0.25
#: How long everything may take to go; on a machine that is busy with other things, too.
_EBB_SECONDS = 240.0
_BROKEN_MOST = 20


@dataclass(slots=True)
class Stretch:
    """One world's part of a soak.

    Attributes:
        first: the passes that were made before it.
        samples: what was held at rest, after each tide.
        broken: what did not hold, or did not go.
        met: how often each kind of demand and of fault came.
        idle_operations: of the engine, while nothing was to be done.
        seconds: how long it took.

    """

    first: int
    samples: list[Sample] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    met: dict[str, int] = field(default_factory=dict)
    idle_operations: int = 0
    seconds: float = 0.0

    @property
    def passes(self) -> int:
        """How many passes were made in all, as of its last sample."""
        return int(self.samples[-1]["passes"]) if self.samples else self.first


@dataclass(slots=True)
class Soak:
    """A soak from its first stretch on, kept in a file."""

    seed: int
    passes: int
    state: str
    stretches: list[Stretch] = field(default_factory=list)
    path: Path | None = None

    @classmethod
    def opened(cls, path: Path | None, *, seed: int, passes: int, state: str) -> Soak:
        """The one that the file has, or a new one."""
        if path is None or not path.exists():
            return cls(seed=seed, passes=passes, state=state, path=path)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        stretches = [Stretch(**one) for one in found["stretches"]]
        return cls(seed=found["seed"], passes=passes, state=found["state"], stretches=stretches, path=path)

    def keep(self) -> None:
        if self.path is not None:
            draft = self.path.with_suffix(".draft")
            kept = {"seed": self.seed, "state": self.state, "stretches": [asdict(one) for one in self.stretches]}
            draft.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            draft.replace(self.path)

    @property
    def made(self) -> int:
        """The passes that were made so far."""
        return self.stretches[-1].passes if self.stretches else 0

    def go_on(self, seconds: float) -> None:
        """Make what is left of the passes; begin no more tides after so many seconds."""
        stretch = Stretch(first=self.made)
        self.stretches.append(stretch)
        began = time.monotonic()
        rng = random.Random(f"{self.seed} {stretch.first}")
        folder = Path(tempfile.mkdtemp(prefix="orca-bench-"))
        folder.chmod(0o755)
        try:
            url = embedded.start(folder / "postgres")
            with TestCluster.start() as cluster, SoakWorld(cluster, url, rng, state=self.state) as world:
                while self.made < self.passes and not stretch.broken and time.monotonic() - began < seconds:
                    self._tide(world, stretch)
                    stretch.seconds = time.monotonic() - began
                    stretch.met = dict(world.wanted + world.faults.met)
                    self.keep()
                    held = ", ".join(f"{name} {value:.4g}" for name, value in stretch.samples[-1].items())
                    progress(f"{self.made} of {self.passes} after {stretch.seconds:.0f} s: {held}")
                if stretch.broken:
                    shutil.copy(world.log, Path(tempfile.gettempdir()) / "soak-loop.log")
        finally:
            embedded.stop(folder / "postgres")
            shutil.rmtree(folder, ignore_errors=True)

    def _tide(self, world: SoakWorld, stretch: Stretch) -> None:
        """One tide, the ebb after it, and what is then held."""
        length = max(_TIDE_PASSES_LEAST, self.passes // _TIDES)
        until = min(world.passes().values()) + length
        world.flood()
        while _made(world) < until and not stretch.broken:
            world.tide()
            stretch.broken += list(world.broken())[:_BROKEN_MOST]
            time.sleep(_MOMENT_SECONDS)
        deadline = time.monotonic() + _EBB_SECONDS
        while True:
            world.ebb()
            if not (left := world.unrest()):
                break
            if time.monotonic() > deadline:
                stretch.broken += [f"not gone after {_EBB_SECONDS:g} s: {one}" for one in left[:_BROKEN_MOST]]
                break
            time.sleep(_MOMENT_SECONDS)
        stretch.broken += list(world.broken_at_rest())[:_BROKEN_MOST]
        before = world.operations()
        found = sample(world)
        stretch.idle_operations += world.operations() - before
        stretch.samples.append({"passes": stretch.first + _made(world), **found})


def _made(world: SoakWorld) -> int:
    """The passes of the scope that has fewest."""
    return min(world.passes().values(), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--passes", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no more tides after this")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument(
        "--state", choices=("postgres", "file"), default="postgres", help="where the engine keeps its state"
    )
    parser.add_argument("--resume", type=Path, help="a file: what is in it is gone on with, what is found goes there")
    arguments = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit("ended early; with --resume it goes on after its last tide"))
    soak = Soak.opened(arguments.resume, seed=arguments.seed, passes=arguments.passes, state=arguments.state)
    progress(f"soak: {arguments.passes} passes, {soak.made} of them made, seed {soak.seed}")
    if soak.made < soak.passes:
        soak.go_on(arguments.seconds)
    grown = slopes([stretch.samples for stretch in soak.stretches])
    met: Counter[str] = Counter()
    for stretch in soak.stretches:
        met.update(stretch.met)
    broken = [what for stretch in soak.stretches for what in stretch.broken]
    figures = {f"{name}_slope": slope for name, slope in grown.items()}
    figures |= {"broken": len(broken), "idle_operations": sum(one.idle_operations for one in soak.stretches)}
    report(
        "soak",
        figures=figures,
        floors={},
        targets={**{f"{name}_slope": BOUNDS[name] for name in grown}, "broken": 0, "idle_operations": 0},
        seed=soak.seed,
        state=soak.state,
        passes=soak.made,
        seconds=round(sum(stretch.seconds for stretch in soak.stretches)),
        stretches=len(soak.stretches),
        samples=[sample for stretch in soak.stretches for sample in stretch.samples],
        broken=broken,
        faults_and_demand=dict(met),
    )
    sys.exit(1 if broken else 0)


if __name__ == "__main__":
    main()
