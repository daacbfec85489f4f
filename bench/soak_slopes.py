"""How fast what a soak measures grows, and how fast it may."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

Sample = dict[str, float]
#: What each may grow by in 1,000 passes of each scope. All but the pass times are of a world at rest, which is the same each
#: time; so a bound is what the measure itself sways by, and far below what 1,000 leaks of anything would come to.
BOUNDS: Mapping[str, float] = {
    "memory_mib": 8.0,
    "threads": 1.0,
    "descriptors": 4.0,  # connections that are idle stay open for a while
    "disk_mib": 1.0,
    "files": 10.0,
    "database_mib": 8.0,
    "state_kib": 64.0,
    "state_keys": 10.0,
    "rows": 20.0,
    "pass_seconds": 0.25,  # other work on the machine makes it sway by as much as a tenth
}
_SAMPLES_LEAST = 4


def slopes(stretches: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Growth in 1,000 passes: of each two samples of one stretch the slope between them, of all these the median (Theil-Sen).

    A stretch is one life of the world and its loop. Its first third is left out: caches fill, and tables find their size. A
    few samples that other work on the machine disturbed change nothing.
    """
    pairs: dict[str, list[float]] = {name: [] for name in BOUNDS}
    used = 0
    for stretch in stretches:
        later = stretch[len(stretch) // 3 :]
        used += len(later)
        for position, one in enumerate(later):
            for other in later[position + 1 :]:
                apart = other["passes"] - one["passes"]
                for name in BOUNDS:
                    pairs[name].append((other[name] - one[name]) * 1000 / apart)
    if used < _SAMPLES_LEAST:
        return {}
    return {name: median(values) for name, values in pairs.items()}
