"""Which way a plan goes: `auto` against the cost model written out once more, and `explain` in words. No clock."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from engine_peer import layout_of, make_engine
from hypothesis import given
from hypothesis import strategies as st
from strategies import profile

from kvplan import Memory, Plan, Segment, engines
from kvplan.engines.routes import stretches

PIECE = 16 << 20


def plan_of(sizes, gap: int = 64, merges: bool = True) -> Plan:
    """Descriptors of these sizes, apart in the source; in the destination one behind another, or apart."""
    sizes = np.asarray(sizes, dtype=np.int64)
    ends = np.cumsum(sizes)
    apart = ends - sizes + gap * np.arange(len(sizes))
    table = np.stack([(1 << 40) + apart, (1 << 44) + (ends - sizes if merges else apart), sizes])
    return Plan(torch.from_numpy(table), [Segment(Memory.DRAM, Memory.DRAM, 0, len(sizes))] if len(sizes) else [])


def ways(plan: Plan, cost, op="write", piece: int = PIECE) -> list[tuple[int, int, bool]]:
    return [(part.start, part.stop, part.packed) for part in stretches(plan, op, "auto", cost, piece)]


@pytest.mark.parametrize("name", list(engines.COSTS))
def test_the_table_and_the_model(name):
    """s* and N* are where the model's routes cross: c x B bytes, and fixed cost by c."""
    cost = engines.COSTS[name]
    c, b = cost.per_descriptor, cost.bandwidth
    assert cost.smaller_than == pytest.approx(c * b) and cost.more_than == pytest.approx(cost.fixed / c)
    size = cost.smaller_than
    assert cost.direct(1000, 1000 * size * 0.99) == pytest.approx(1000 * c)
    assert cost.direct(1000, 1000 * size * 1.01) == pytest.approx(1000 * size * 1.01 / b)
    first = 1000 * 1024 / cost.copy
    assert cost.packed(10, 1000 * 1024, PIECE) == pytest.approx(
        cost.fixed + max(first, 10 * c, 1000 * 1024 / b) + first
    )


def test_published_crossings():
    """packing.md's: 32 KB and 8 KB over TCP, 46 KB and 82 KB over RDMA."""
    crossing = {name: cost.smaller_than / 1000 for name, cost in engines.COSTS.items()}
    assert crossing["mooncake", "tcp"] == pytest.approx(33, rel=0.1)
    assert crossing["nixl", "tcp"] == pytest.approx(8.2, rel=0.1)
    assert crossing["mooncake", "rdma"] == pytest.approx(82, rel=0.1)
    assert crossing["nixl", "rdma"] == pytest.approx(46, rel=0.1)


@pytest.mark.parametrize(
    ("engine", "count", "nbytes", "merges", "packed"),
    [
        ("mooncake", 131_072, 1024, True, True),  # TP 4 -> 8
        ("nixl", 131_072, 1024, True, True),
        ("mooncake", 131_072, 256, True, True),
        ("nixl", 131_072, 256, True, True),
        ("mooncake", 131_072, 1024, False, False),  # nothing merges: staging here alone is of no use
        ("nixl", 31_744, 16_384, False, False),  # DeepSeek-V4, scattered on both sides
        ("mooncake", 2_000, 37_000, True, False),  # above s*
        ("nixl", 2_000, 16_384, True, False),
        ("mooncake", 5, 1024, True, False),  # at most N*
        ("nixl", 20, 1024, True, False),
    ],
)
def test_what_auto_does_with_known_cases(engine, count, nbytes, merges, packed):
    plan = plan_of([nbytes] * count, merges=merges)
    assert ways(plan, engines.COSTS[engine, "tcp"]) == [(0, count, packed)]


def test_a_pull_merges_by_its_source():
    plan = plan_of([1024] * 10_000)
    turned = Plan(plan.table[[1, 0, 2]], plan.segments)
    cost = engines.COSTS["nixl", "tcp"]
    assert ways(turned, cost, "read") == [(0, 10_000, True)] and ways(turned, cost) == [(0, 10_000, False)]


def test_parts_go_their_own_way_and_segments_stay_apart():
    cost = engines.Cost(1e-5, 1e9)  # 10,000 bytes, 50 descriptors
    small, large = [1000] * 1000, [3 << 20] * 2
    plan = plan_of([*small, *large, *small, *large])
    assert ways(plan, cost) == [(0, 1000, True), (1000, 1002, False), (1002, 2002, True), (2002, 2004, False)]
    # One of 64 KiB between rows costs less to copy than a stretch of its own.
    assert ways(plan_of([*small, 1 << 16, *small]), cost) == [(0, 2001, True)]
    # Few rows between large ones are not worth a stretch.
    assert ways(plan_of([*large, *small[:40], *large]), cost) == [(0, 44, False)]
    plan = plan_of(small * 2)
    other = Memory("DRAM", 1)
    cut = Plan(plan.table, [Segment(Memory.DRAM, Memory.DRAM, 0, 1000), Segment(Memory.DRAM, other, 1000, 2000)])
    assert ways(cut, cost) == [(0, 1000, True), (1000, 2000, True)]


@profile(300)
@given(
    st.lists(st.tuples(st.sampled_from([100, 1000, 9_999, 10_000, 30_000, 5 << 20]), st.integers(1, 90)), max_size=9),
    st.booleans(),
    st.sampled_from([1 << 20, PIECE]),
)
def test_auto_never_packs_what_the_model_says_is_slower(runs, merges, piece):
    cost = engines.Cost(1e-5, 1e9, fixed=2e-4)
    sizes = list(itertools.chain.from_iterable([size] * count for size, count in runs))
    plan = plan_of(sizes, merges=merges)
    found = stretches(plan, "write", "auto", cost, piece)
    assert [part.start for part in found] == [0, *(part.stop for part in found)][:-1]
    assert sum(map(len, found)) == len(sizes)
    for part in found:
        mine = sizes[part.start : part.stop]
        assert part.nbytes == sum(mine)
        if part.packed:
            assert part.merged == (1 if merges else len(mine))
            direct = max(len(mine) * 1e-5, sum(mine) / 1e9)
            copies = sum(mine) / 4e9
            engine = max(part.merged * 1e-5, sum(mine) / 1e9)
            assert 2e-4 + max(copies, engine) + min(piece, sum(mine)) / 4e9 < direct
            assert len(mine) > 20 and min(mine) < 10_000
    for was, now in itertools.pairwise(found):
        assert was.packed or now.packed  # what goes straight is one stretch


def test_how_is_the_callers_choice():
    plan = plan_of([1024] * 5000)
    cost = engines.COSTS["mooncake", "tcp"]
    assert [part.packed for part in stretches(plan, "write", "never", cost, PIECE)] == [False]
    assert [part.packed for part in stretches(plan_of([1 << 20]), "write", "always", cost, PIECE)] == [True]
    assert [part.packed for part in stretches(plan, "write", "auto", None, PIECE)] == [False]
    assert stretches(plan_of([]), "write", "auto", cost, PIECE) == []


@pytest.mark.parametrize("field", ["per_descriptor", "bandwidth", "copy", "fixed"])
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, "1", None, True])
def test_costs_that_are_none_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value!r}"):
        engines.Cost(**{"per_descriptor": 1e-6, "bandwidth": 1e9} | {field: value})


def test_costs_that_may_be_nothing():
    free = engines.Cost(0, 1e9, fixed=0)
    assert free.smaller_than == 0 and free.more_than == math.inf
    with pytest.raises(ValueError, match="bandwidth is 0"):
        engines.Cost(1e-6, 0)
    with pytest.raises(ValueError, match="copy is 0"):
        engines.Cost(1e-6, 1e9, copy=0)


def test_explain_says_what_would_be_packed_and_warns():
    plan = plan_of([1024] * 131_072)
    with engines.LocalEngine() as engine:
        assert "nothing says that staging is faster" in plan.explain(engine)
        engine.cost = engines.COSTS["mooncake", "tcp"]
        said = plan.explain(engine)
        assert "descriptors 0 to 131071 (131072 of 1024 bytes on average)" in said
        assert "WARNING: tiny pieces, and no staging" in said and "7.86e+03 ms without" in said
        said = plan.explain(engine, staging=engines.Staging(PIECE))
        assert "by way of staging, 1 descriptors for the engine" in said and "WARNING" not in said
        said = plan.explain(engine, op="read")
        assert "straight to the peer" in said and "WARNING" not in said
        assert plan.explain() == "\n".join(said.splitlines()[:3])


def test_auto_is_what_submit_does():
    memory = np.zeros(1 << 20, np.uint8)
    memory[: 1 << 19] = np.random.default_rng(1).integers(1, 200, 1 << 19)
    fields = [{"name": "kv", "layer": 0, "base": 0, "page_bytes": 1 << 19, "num_pages": 1}]
    src, dst = (layout_of(fields, part) for part in (memory, memory[1 << 19 :]))
    rows = np.arange(2000)
    table = np.stack([memory.ctypes.data + 128 * rows, memory.ctypes.data + (1 << 19) + 64 * rows, 64 + 0 * rows])
    plan = Plan(torch.from_numpy(table), [Segment(Memory.DRAM, Memory.DRAM, 0, 2000)], src, dst)
    with make_engine("local") as engine, make_engine("local") as target:
        engine.register(src)
        target.register(dst)
        for cost, sizes in ((None, [2000]), (engines.COSTS["nixl", "tcp"], [1])):
            engine.cost = cost
            engine.sizes.clear()
            staging = engines.Staging(1 << 18, 1 << 18)
            engine.submit(plan, engines.Peer(target.session, dst), staging=staging).wait(20)
            assert engine.sizes == sizes
            got = memory[1 << 19 :][: 2000 * 64].reshape(2000, 64)
            np.testing.assert_array_equal(got, memory[: 2000 * 128].reshape(2000, 128)[:, :64])
            memory[1 << 19 :] = 0
