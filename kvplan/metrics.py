"""What engines do, for Prometheus. Needs the package prometheus_client: pip install 'kvplan[metrics]'.

    from kvplan import metrics
    watch = metrics.watch(engine, name="decode-0")      # in prometheus_client's own registry

| metric | kind | labels |
|---|---|---|
| kvplan_transferred_bytes_total | counter | engine, peer |
| kvplan_transferred_descriptors_total | counter | engine, peer |
| kvplan_transfers_total | counter | engine, peer, end: arrived, failed or cancelled |
| kvplan_transfers_now | gauge | engine, peer, state: in_flight, queued or unsettled |
| kvplan_transfer_seconds | histogram | engine, end: from `submit` to the end |
| kvplan_plan_seconds | histogram | none: each plan made in this process |

Peers are counted one by one only where `peers=True`, since every peer that comes and goes makes new time series. Else
their label is "", and the counts are those of all.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, TypeAlias

from .engines import PeerStats
from .planning import hooks

try:
    import prometheus_client
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ModuleNotFoundError as error:
    raise ImportError("kvplan.metrics needs prometheus_client: pip install 'kvplan[metrics]'") from error

if TYPE_CHECKING:
    from .engines import Engine, Transfer

_TRANSFER_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60)
_PLAN_S = (10e-6, 20e-6, 50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 50e-3, 0.1, 1)
_ENDS = ("arrived", "failed", "cancelled")
_STATES = ("in_flight", "queued", "unsettled")


Counts: TypeAlias = "CounterMetricFamily"


class Watch:
    """The metrics of one engine in a registry, until `stop`. Made by `watch`."""

    def __init__(self, engine: Engine, name: str, peers: bool, collector: _Collector) -> None:
        self.engine, self.name, self.peers, self._collector = engine, name, peers, collector
        self._seconds = {end: collector.transfer.labels(name, end) for end in _ENDS}
        collector.watches[name] = self
        engine.add_observer(self._ended)

    def _ended(self, transfer: Transfer) -> None:
        times = transfer.times
        if transfer._end is not None and times.ended is not None:
            self._seconds[transfer._end].observe(times.ended - times.submitted)

    def stop(self) -> None:
        """Take the engine's counts out of the registry; its histogram stays. Once it has returned it does nothing."""
        if self._collector.watches.pop(self.name, None) is not None:
            self.engine.remove_observer(self._ended)


class _Collector:
    """All of kvplan in one registry."""

    def __init__(self, registry: Any) -> None:
        self.registry = registry
        self.watches: dict[str, Watch] = {}  # by name
        self.transfer = prometheus_client.Histogram(
            "kvplan_transfer_seconds",
            "From submit to the end of a transfer",
            ["engine", "end"],
            buckets=_TRANSFER_S,
            registry=registry,
        )
        self.plan = prometheus_client.Histogram(
            "kvplan_plan_seconds", "Planning, for each plan made in this process", buckets=_PLAN_S, registry=registry
        )
        registry.register(self)

    def describe(self) -> list[Metric]:
        """What `collect` yields, for the registry to find a name that is taken."""
        return [*self._families()]

    def collect(self) -> list[Metric]:
        """What the registry asks for at every scrape."""
        moved, count, ended, now = families = self._families()
        for watch in list(self.watches.values()):
            stats = watch.engine.stats()
            rows: dict[str, PeerStats] = dict(stats.peers) if watch.peers else {"": stats}
            for peer, row in rows.items():
                moved.add_metric([watch.name, peer], row.bytes)
                count.add_metric([watch.name, peer], row.descriptors)
                for end in _ENDS:
                    ended.add_metric([watch.name, peer, end], getattr(row, end))
                for state in _STATES:
                    now.add_metric([watch.name, peer, state], getattr(row, state))
        return [*families]

    def _families(self) -> tuple[Counts, Counts, Counts, GaugeMetricFamily]:
        labels = ["engine", "peer"]
        return (
            CounterMetricFamily("kvplan_transferred_bytes", "Bytes that arrived", labels=labels),
            CounterMetricFamily("kvplan_transferred_descriptors", "Descriptors that arrived", labels=labels),
            CounterMetricFamily("kvplan_transfers", "Transfers by their end", labels=[*labels, "end"]),
            GaugeMetricFamily("kvplan_transfers_now", "Transfers by their state", labels=[*labels, "state"]),
        )


_collectors: list[_Collector] = []  # one for each registry
_lock = threading.Lock()


def _planned(seconds: float) -> None:
    for collector in _collectors:
        collector.plan.observe(seconds)


def watch(engine: Engine, *, name: str | None = None, peers: bool = False, registry: Any = None) -> Watch:
    """Have a registry show what `engine` does, and how long planning takes in this process.

    Args:
        engine: any engine of kvplan.
        name: value of the label "engine"; by default its kind.
        peers: whether counts are shown for each peer (at most 1,024, and those with something to do).
        registry: of prometheus_client; by default its own.

    Raises:
        ValueError: the registry shows another engine of this name, or other metrics of these names.
    """
    registry = prometheus_client.REGISTRY if registry is None else registry
    name = type(engine).__name__ if name is None else name
    with _lock:
        collector = next((one for one in _collectors if one.registry is registry), None)
        if collector is None:
            collector = _Collector(registry)
            _collectors.append(collector)
            hooks.planned = _planned
        if name in collector.watches:
            raise ValueError(f"the registry shows an engine {name!r} already: give another name")
        return Watch(engine, name, peers, collector)
