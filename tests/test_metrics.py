"""Metrics: that what Prometheus is shown is what happened."""

from __future__ import annotations

import numpy as np
import pytest
from engine_peer import Together

from kvplan import TransferError
from kvplan.planning import hooks

prometheus_client = pytest.importorskip("prometheus_client")

from kvplan import metrics  # noqa: E402


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(metrics, "_collectors", [])
    monkeypatch.setattr(hooks, "planned", None)
    return prometheus_client.CollectorRegistry()


@pytest.fixture
def sides():
    sides = Together("local")
    yield sides
    sides.close()


def test_what_is_shown_is_what_happened(registry, sides):
    watch = metrics.watch(sides.engine, name="prefill", registry=registry)
    plan, wanted = sides.plan(20)
    for _ in range(3):
        sides.engine.submit(plan, sides.peer).wait(20)
    np.testing.assert_array_equal(sides.dst, wanted)
    with sides.engine.held():
        cancelled = sides.engine.submit(plan, sides.peer)
        cancelled.cancel()
        assert registry.get_sample_value("kvplan_transfers_now", named("", state="unsettled")) == 1
    assert cancelled.settle(20)
    sides.tell("unregister")
    with pytest.raises(TransferError):
        sides.engine.submit(plan, sides.peer).wait(20)
    sides.tell("register")

    arrived = 3 + (cancelled.arrived == 40)  # its call had begun, and brought all
    value = registry.get_sample_value
    assert value("kvplan_transferred_bytes_total", named("")) == arrived * plan.total_bytes
    assert value("kvplan_transferred_descriptors_total", named("")) == arrived * 40
    for end, count in (("arrived", 3), ("failed", 1), ("cancelled", 1)):
        assert value("kvplan_transfers_total", named("", end=end)) == count
        assert value("kvplan_transfer_seconds_count", {"engine": "prefill", "end": end}) == count
    for state in ("in_flight", "queued", "unsettled"):
        assert value("kvplan_transfers_now", named("", state=state)) == 0
    assert value("kvplan_transfer_seconds_sum", {"engine": "prefill", "end": "arrived"}) > 0
    text = prometheus_client.generate_latest(registry).decode()
    assert text.count("# TYPE kvplan_transfers_total counter") == 1

    watch.stop()
    watch.stop()
    assert value("kvplan_transferred_bytes_total", named("")) is None
    sides.engine.submit(plan, sides.peer).wait(20)
    assert value("kvplan_transfer_seconds_count", {"engine": "prefill", "end": "arrived"}) == 3


def named(peer: str, **more: str) -> dict[str, str]:
    return {"engine": "prefill", "peer": peer, **more}


def test_peers_one_by_one_and_several_engines(registry, sides):
    metrics.watch(sides.engine, name="prefill", peers=True, registry=registry)
    metrics.watch(sides.target, registry=registry)
    plan, _ = sides.plan(5)
    sides.engine.submit(plan, sides.peer).wait(20)
    peer = sides.peer.session
    assert registry.get_sample_value("kvplan_transferred_descriptors_total", named(peer)) == 10
    other = {"engine": type(sides.target).__name__, "peer": ""}
    assert registry.get_sample_value("kvplan_transferred_descriptors_total", other) == 0
    with pytest.raises(ValueError, match="an engine 'prefill' already"):
        metrics.watch(sides.target, name="prefill", registry=registry)
    assert prometheus_client.REGISTRY.get_sample_value("kvplan_transfers_total", named("", end="arrived")) is None


def test_planning_is_timed_once_somebody_watches(registry, sides):
    assert hooks.planned is None
    metrics.watch(sides.engine, name="prefill", registry=registry)
    assert hooks.planned is not None
    hooks.planned(0.25)
    assert registry.get_sample_value("kvplan_plan_seconds_count") == 1
    assert registry.get_sample_value("kvplan_plan_seconds_sum") == 0.25
