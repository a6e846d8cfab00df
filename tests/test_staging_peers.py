"""Packed transfers between two processes, over each engine: every byte, and faults in the middle on both sides."""

from __future__ import annotations

import contextlib
import time

import numpy as np
import pytest
from engine_peer import APART, DST_FIELDS, GUARD, NIXL_TIMEOUT, PAGE, PAGES, make_pair, need
from stepped import until
from test_staging import ROW, ROWS, rows_plan

from kvplan import Plan, Segment, TransferError, engines

KV = slice(DST_FIELDS[1]["base"], DST_FIELDS[1]["base"] + PAGE * PAGES)
CALL_ENDS = {"mooncake": 5.5, "nixl": NIXL_TIMEOUT + 0.5}  # seconds in which a call to a peer that hangs does


@pytest.fixture(params=APART)
def sides(request, tmp_path_factory):
    need(request.param)
    sides = make_pair(request.param, tmp_path_factory)
    yield sides
    with contextlib.suppress(ProcessLookupError):
        sides.go_on()
    sides.close()


def repeated(plan: Plan, times: int) -> Plan:
    """The same, again and again: work for long enough."""
    table = plan.table.repeat(1, times)
    part = plan.segments[0]
    parts = [Segment(part.src_memory, part.dst_memory, 0, table.shape[1])]
    return Plan(table, parts, plan.src_layout, plan.dst_layout)


@pytest.mark.parametrize("order", ["scattered", "contiguous"])
def test_rows_arrive_in_whole_pages(sides, order):
    pages = np.arange(PAGES) if order == "contiguous" else np.random.default_rng(1).permutation(PAGES)
    plan, wanted = rows_plan(sides, pages)
    staging = engines.Staging(4 << 14, 1 << 14)
    for _ in range(2):
        sides.dst[:] = GUARD
        transfer = sides.engine.submit(plan, sides.peer, staging=staging, pack="always")
        transfer.wait(60)
        np.testing.assert_array_equal(sides.dst, wanted)
        assert transfer.arrived == len(plan) == PAGES * ROWS and staging.free == 4
    if order == "contiguous":
        assert set(sides.engine.sizes) == {1}  # a piece is one descriptor
    assert sides.engine.most <= sides.engine.max_in_flight


def test_rows_are_pulled_and_scattered(sides):
    sides.dst[:] = np.random.default_rng(3).integers(1, 200, sides.dst.size)
    plan, wanted = rows_plan(sides, np.random.default_rng(1).permutation(PAGES), pull=True)
    staging = engines.Staging(4 << 14, 1 << 14)
    sides.engine.submit(plan, sides.peer, op="read", staging=staging, pack="always").wait(60)
    np.testing.assert_array_equal(sides.src, wanted)
    assert staging.free == 4


def test_plans_of_two_memories_arrive_packed(sides):
    plan, wanted = sides.plan(1000)
    staging = engines.Staging(3 << 12, 1 << 12)
    sides.engine.submit(plan, sides.peer, staging=staging, pack="always").wait(60)
    np.testing.assert_array_equal(sides.dst, wanted)


def test_peer_killed_in_the_middle(sides):
    """Only due pages are written, no slot is free before the peer's end is known, and then all goes on."""
    order = np.random.default_rng(1).permutation(PAGES)[: PAGES // 2]
    plan, wanted = rows_plan(sides, order)
    long = repeated(plan, 40)
    staging = engines.Staging(2 << 12, 1 << 12)
    transfer = sides.engine.submit(long, sides.peer, staging=staging, pack="always")
    until(lambda: transfer.arrived or transfer.done())
    assert 0 < transfer.arrived < len(long)
    sides.kill()
    with pytest.raises(TransferError) as caught:
        transfer.wait(30)
    error = caught.value
    assert error.code and 0 < error.failed.start < error.failed.stop == len(long) and error.settled is False
    assert transfer.settle(0.3) is False and transfer.unsettled
    assert staging.free == 1  # the one that was being sent is not used again
    assert ((sides.dst == GUARD) | (sides.dst == wanted)).all()
    kv = sides.dst[KV].reshape(-1, ROW)
    whole = transfer.arrived if transfer.arrived < len(plan) else len(plan)
    sent = wanted[KV].reshape(PAGES, PAGE)[order].reshape(-1, ROW)[:whole]
    np.testing.assert_array_equal(kv.reshape(PAGES, PAGE)[order].reshape(-1, ROW)[:whole], sent)  # what has arrived
    sides.engine.peer_ended(sides.peer.session)
    assert transfer.settle(0) and staging.free == 2
    sides.start()
    sides.dst[:] = GUARD
    plan, wanted = rows_plan(sides, order)
    sides.engine.submit(plan, sides.peer, staging=staging, pack="always").wait(60)
    np.testing.assert_array_equal(sides.dst, wanted)


def test_peer_killed_while_it_is_read(sides):
    """What is read by half stays in staging: pages here are written by whole pieces alone."""
    sides.dst[:] = np.random.default_rng(3).integers(1, 200, sides.dst.size)
    order = np.random.default_rng(1).permutation(PAGES)[: PAGES // 2]
    plan, wanted = rows_plan(sides, order, pull=True)
    before = sides.src.copy()
    long = repeated(plan, 40)
    staging = engines.Staging(2 << 12, 1 << 12)
    transfer = sides.engine.submit(long, sides.peer, op="read", staging=staging, pack="always")
    until(lambda: transfer.arrived or transfer.done())
    sides.kill()
    with pytest.raises(TransferError) as caught:
        transfer.wait(30)
    assert caught.value.failed.start > 0
    assert ((sides.src == before) | (sides.src == wanted)).all()
    arrived = min(transfer.arrived, len(plan))
    rows, due = sides.src.reshape(-1, 2, ROW)[:arrived, 0], wanted.reshape(-1, 2, ROW)[:arrived, 0]
    np.testing.assert_array_equal(rows, due)
    settled = transfer.settle(1)
    assert staging.free == 2 - (not settled)
    sides.engine.peer_ended(sides.peer.session)
    assert transfer.settle(0) and staging.free == 2


@pytest.mark.parametrize("op", ["write", "read"])
def test_peer_that_hangs_holds_its_slot_until_it_goes_on(sides, op):
    """A slot is not used again while what was sent from it, or is read into it, may still move."""
    sides.dst[:] = GUARD if op == "write" else 7
    one, wanted = rows_plan(sides, range(32), pull=op == "read")
    sides.engine.submit(one, sides.peer, op=op, staging=(staging := engines.Staging(1 << 12, 1 << 12)), pack="always")
    until(lambda: sides.engine.stats().arrived == 1)
    pages = np.arange(100, 164)
    plan, wanted = rows_plan(sides, pages, start=1000, pull=op == "read")
    before = sides.src.copy()
    sides.stop()
    begun = time.monotonic()
    transfer = sides.engine.submit(plan, sides.peer, op=op, staging=staging, pack="always")
    waits = sides.engine.submit(
        rows_plan(sides, pages + 500, start=5000, pull=op == "read")[0], sides.peer, op=op, staging=staging,
        pack="always",
    )  # fmt: skip
    with pytest.raises(TimeoutError):
        transfer.wait(0.2)
    with pytest.raises(TransferError) as caught:
        transfer.wait(30)
    assert time.monotonic() - begun < CALL_ENDS[sides.kind] + 5 and not caught.value.settled
    assert transfer.settle(0) is False and staging.free == 0
    assert not waits._sent and waits.cancel() and waits.settle(5)  # it has waited for the slot, and for nothing else
    sides.go_on()
    assert transfer.settle(20) is True and staging.free == 1
    if op == "read":
        np.testing.assert_array_equal(sides.src, before)  # it came too late to be scattered
        assert transfer.arrived == 0
    else:
        assert ((sides.dst == GUARD) | (sides.dst == wanted)).all()
    again, wanted = rows_plan(sides, pages, start=1000, pull=op == "read")
    sides.engine.submit(again, sides.peer, op=op, staging=staging, pack="always").wait(30)
    np.testing.assert_array_equal(sides.src if op == "read" else sides.dst, wanted)


def test_peer_that_unregisters_gets_nothing(sides):
    plan, _ = rows_plan(sides, range(100))
    staging = engines.Staging(2 << 12, 1 << 12)
    sides.engine.submit(plan, sides.peer, staging=staging, pack="always").wait(30)
    sides.dst[:] = GUARD
    before = sides.peer
    sides.tell("unregister")
    transfer = sides.engine.submit(plan, before, staging=staging, pack="always")
    with pytest.raises(TransferError):
        transfer.wait(30)
    assert (sides.dst == GUARD).all()
    sides.tell("register")
    if sides.kind == "nixl":  # the agent of that session has ended, and all its connections with it
        sides.engine.peer_ended(before.session)
    assert transfer.settle(20) and staging.free == 2
    sides.dst[:] = GUARD
    plan, wanted = rows_plan(sides, range(200))
    sides.engine.submit(plan, sides.peer, staging=staging, pack="always").wait(30)
    np.testing.assert_array_equal(sides.dst, wanted)
