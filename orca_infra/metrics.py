"""What Prometheus is told; the only importer of prometheus_client.

`DEFINITIONS` says of each metric its name, kind, labels and meaning, and the reference page is made from it. Labels have few
values: no name of a pipeline, a run, a user or a machine is one, and of pools only the first `POOLS_MOST` have their own.
Counters and histograms count since this process began. Gauges of a scope are as its last pass saw it; while this process does
not lead there are none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from orca_infra import __version__

#: So many pools have series of their own; those after them share the label `other`.
POOLS_MOST = 200
OTHER = "other"
_PREFIX = "orca_infra_"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 900.0)
_CLAIM_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_QUEUE_SECONDS = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)


class Kind(StrEnum):
    """As Prometheus has them."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One metric, without the prefix `orca_infra_`, and without the `_total` that a counter ends with.

    Attributes:
        meaning: one sentence.
        served_by: the loop, or the runtimes' HTTP face.

    """

    name: str
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    served_by: str = "loop"

    @property
    def full_name(self) -> str:
        """As queries have it."""
        return f"{_PREFIX}{self.name}{'_total' if self.kind is Kind.COUNTER else ''}"


def _gauge(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(name=name, kind=Kind.GAUGE, meaning=meaning, labels=labels)


def _counter(name: str, meaning: str, *labels: str) -> Definition:
    return Definition(name=name, kind=Kind.COUNTER, meaning=meaning, labels=labels)


DEFINITIONS: tuple[Definition, ...] = (
    _gauge("build_info", "1, with the version as its label.", "version"),
    _gauge("leader", "1 while this process leads the stack's family, else 0."),
    _gauge("config_age_seconds", "How long ago the orca.toml that is in force was read."),
    _gauge("config_loaded_timestamp_seconds", "When that was, in Unix time."),
    _gauge(
        "config_last_reload_successful",
        "0 while orca.toml as it is now cannot be used and the last good one is in force.",
    ),
    _counter("passes", "Passes by what they came to: changed, unchanged or failed.", "scope", "outcome"),
    Definition(
        name="pass_seconds",
        kind=Kind.HISTOGRAM,
        meaning="What the phases of a pass take: observe, decide, apply.",
        labels=("scope", "phase"),
        buckets=_SECONDS,
    ),
    _gauge("last_pass_timestamp_seconds", "When the last pass that did not fail ended, in Unix time.", "scope"),
    _counter(
        "engine_operations",
        "Operations of the engine by what they came to: Done, or the kind of the error.",
        "scope",
        "kind",
        "outcome",
    ),
    Definition(
        name="engine_operation_seconds",
        kind=Kind.HISTOGRAM,
        meaning="How long operations of the engine take.",
        labels=("scope", "kind"),
        buckets=_SECONDS,
    ),
    _gauge("pool_demand_runs", "Runs that are due and that no worker of the pool has room for.", "pool"),
    _gauge("pool_max_machines", "What the pool's `max_machines` says.", "pool"),
    _gauge(
        "machines",
        "Machines by state (making, booting, idle, busy, draining, removing); `reason` says why one is being removed.",
        "pool",
        "state",
        "reason",
    ),
    _counter("machines_ended", "Machines that ended, by reason.", "pool", "reason"),
    _counter(
        "machine_attempts",
        "Tries to make a machine by what they came to: Made, or the kind of the error (NoCapacity, QuotaExceeded, …).",
        "pool",
        "outcome",
    ),
    _gauge("strays", "What carries this stack's identity and belongs to nobody, past its grace.", "scope"),
    _gauge("strays_held", "Strays that are not deleted because they are so many: an operator has to look.", "scope"),
    _counter("strays_deleted", "Strays that were deleted.", "scope"),
    _gauge("unreadable", "1 for a machine provider that the last pass could not read.", "provider"),
    _gauge("run_clusters", "Run clusters by state: making (objects are still to be made), running, ending.", "state"),
    _gauge("runs_queued", "Runs that wait for a run cluster; at most 1,000 are counted."),
    _gauge("run_cpu_cores", "CPU that the run clusters request."),
    _counter("run_starts_ended", "Starts of runs that ended, by reason.", "reason"),
    Definition(
        name="run_queued_seconds",
        kind=Kind.HISTOGRAM,
        meaning="From queued to the first start, of runs that a pass saw running; `runner` is worker or kubernetes.",
        labels=("runner",),
        buckets=_QUEUE_SECONDS,
    ),
    _gauge("runtime_pool_size", "How many Pods the runtime pool keeps warm.", "pool"),
    _gauge(
        "runtime_pods",
        "Runtime Pods by state: warm, starting, assigned, ending. Those of cold starts have the pool `cold`.",
        "pool",
        "state",
    ),
    _counter("runtime_pods_ended", "Ends of runtime Pods that were written down, by reason.", "reason"),
    Definition(
        name="claim_seconds",
        kind=Kind.HISTOGRAM,
        meaning="From a launch's request to its answer, of launches that were given a runtime; `start` is warm or cold.",
        labels=("start",),
        buckets=_CLAIM_SECONDS,
        served_by="runtimes",
    ),
    Definition(
        name="launches_failed",
        kind=Kind.COUNTER,
        meaning="Launches that were given none, by the kind of the error.",
        labels=("kind",),
        served_by="runtimes",
    ),
)
_BY_NAME: Mapping[str, Definition] = {definition.name: definition for definition in DEFINITIONS}

#: Label values in the definition's order -> the value.
Series = Mapping[tuple[str, ...], float]


class Metrics:
    """The metrics of one process. Every method may be called from any thread."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._lock = threading.Lock()
        self._pools: set[str] = set()
        self._gauges: dict[str, Mapping[str, Series]] = {}
        self._counters = {
            one.name: Counter(_PREFIX + one.name, one.meaning, one.labels, registry=self.registry)
            for one in DEFINITIONS
            if one.kind is Kind.COUNTER
        }
        self._histograms = {
            one.name: Histogram(
                _PREFIX + one.name, one.meaning, one.labels, registry=self.registry, buckets=one.buckets
            )
            for one in DEFINITIONS
            if one.kind is Kind.HISTOGRAM
        }
        for start in ("warm", "cold"):
            self._histograms["claim_seconds"].labels(start)
        self.registry.register(_Gauges(self))
        ProcessCollector(registry=self.registry)
        self.set("process", {"build_info": {(__version__,): 1.0}})
        self.lead(leading=False)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All of it in the form that the `Accept` header asks for, and that form's content type."""
        encoder, content_type = choose_encoder(accept)
        return encoder(self.registry), content_type

    def set(self, source: str, gauges: Mapping[str, Series]) -> None:
        """Replace every gauge that `source` (a scope, say) has set before, by the gauges' names."""
        with self._lock:
            self._gauges[source] = gauges

    def lead(self, *, leading: bool) -> None:
        """This process leads from now on, or does not: then it knows nothing of what there is."""
        with self._lock:
            self._gauges = {name: gauges for name, gauges in self._gauges.items() if name in {"process", "config"}}
        self.set("lead", {"leader": {(): float(leading)}})

    def configured(self, *, loaded_at: float, good: bool) -> None:
        """The orca.toml in force was read at `loaded_at` (Unix time); `good`: the file as it is now is that one."""
        self.set(
            "config",
            {
                "config_loaded_timestamp_seconds": {(): loaded_at},
                "config_last_reload_successful": {(): float(good)},
            },
        )

    def pool(self, name: str) -> str:
        """The label of a pool: its name, for the first of them."""
        with self._lock:
            if name in self._pools or len(self._pools) < POOLS_MOST:
                self._pools.add(name)
                return name
            return OTHER

    @contextmanager
    def phase(self, scope: str, phase: str) -> Iterator[None]:
        """A phase of a pass; how long the block takes, also when it fails."""
        with self._histograms["pass_seconds"].labels(scope, phase).time():
            yield

    def pass_ended(self, scope: str, outcome: str) -> None:
        """`outcome`: changed, unchanged or failed."""
        self._counters["passes"].labels(scope, outcome).inc()
        if outcome != "failed":
            self.set(f"{scope} last", {"last_pass_timestamp_seconds": {(scope,): time.time()}})

    def engine_operation(self, stack: str, kind: str, outcome: str, seconds: float) -> None:
        """An operation on a stack of the family ended."""
        parts = stack.split(".", 2)
        scope = parts[1] if len(parts) > 2 else "base"
        self._counters["engine_operations"].labels(scope, kind, outcome).inc()
        self._histograms["engine_operation_seconds"].labels(scope, kind).observe(seconds)

    def machine_attempt(self, pool: str, outcome: str) -> None:
        """A try to make a machine: `Made`, or the kind of its error."""
        self._counters["machine_attempts"].labels(self.pool(pool), outcome).inc()

    def machine_ended(self, pool: str, reason: str) -> None:
        self._counters["machines_ended"].labels(self.pool(pool), reason).inc()

    def stray_deleted(self, scope: str, count: int = 1) -> None:
        self._counters["strays_deleted"].labels(scope).inc(count)

    def start_ended(self, reason: str) -> None:
        self._counters["run_starts_ended"].labels(reason).inc()

    def run_started(self, runner: str, queued_seconds: float) -> None:
        self._histograms["run_queued_seconds"].labels(runner).observe(queued_seconds)

    def runtime_pod_ends(self, reason: str) -> None:
        self._counters["runtime_pods_ended"].labels(reason).inc()

    def claimed(self, seconds: float, *, warm: bool) -> None:
        self._histograms["claim_seconds"].labels("warm" if warm else "cold").observe(seconds)

    def launch_failed(self, kind: str) -> None:
        self._counters["launches_failed"].labels(kind).inc()

    def gauges(self) -> Iterator[Metric]:
        """The gauges as they are now."""
        with self._lock:
            found = [(name, series) for gauges in self._gauges.values() for name, series in gauges.items()]
        families: dict[str, GaugeMetricFamily] = {}
        for name, series in [*found, *_age(found)]:
            one = _BY_NAME[name]
            family = families.setdefault(name, GaugeMetricFamily(_PREFIX + name, one.meaning, labels=one.labels))
            for labels, value in series.items():
                family.add_metric(labels, value)
        yield from families.values()


def _age(found: Iterable[tuple[str, Series]]) -> list[tuple[str, Series]]:
    """The configuration's age, which passes by itself."""
    loaded_at = next((series[()] for name, series in found if name == "config_loaded_timestamp_seconds"), None)
    return [] if loaded_at is None else [("config_age_seconds", {(): max(0.0, time.time() - loaded_at)})]


class _Gauges(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        return self._metrics.gauges()


#: Of this process.
METRICS = Metrics()
