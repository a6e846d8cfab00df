"""Transfers, step by step: chunks, turns, failures and timeouts; and the address check, against plain Python."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from engine_peer import Together
from stepped import Stepped, until

from kvplan import Layout, Memory, Region, TransferError, TransferTimeout, engines
from kvplan.engines.check import Spans


@pytest.fixture
def stepped():
    sides = Together("local")
    sides.engine.close()
    sides.engine = Stepped()
    sides.engine.register(sides.layout)
    yield sides
    sides.engine.let_go()
    sides.close()


def test_failed_chunk_ends_a_transfer_and_is_named(stepped):
    plan = stepped.plan(20)[0]
    transfer = stepped.engine.submit(plan, stepped.peer)
    stepped.engine.step()
    stepped.engine.step(-7)
    with pytest.raises(
        TransferError, match=r"returned -7; descriptors 0 to 9 arrived, 10 to 19 may .* 20 to 39 were ne"
    ):
        transfer.wait(10)
    with pytest.raises(TransferError) as caught:  # and again
        transfer.wait(0)
    assert (caught.value.code, caught.value.failed, caught.value.settled) == (-7, range(10, 40), True)
    assert transfer.done() and transfer.arrived == 10


def test_transfers_to_one_peer_take_turns(stepped):
    first, second = (stepped.engine.submit(stepped.plan(10)[0], stepped.peer) for _ in range(2))
    stepped.engine.step()
    until(lambda: first.arrived == 10)
    stepped.engine.step()
    until(lambda: second.arrived == 10)
    stepped.engine.step()
    first.wait(10)
    assert not second.done()


def test_a_wait_that_times_out_leaves_the_transfer_going(stepped):
    plan, wanted = stepped.plan(20)
    transfer = stepped.engine.submit(plan, stepped.peer)
    patient = []
    watcher = threading.Thread(target=lambda: patient.append(transfer.exception()))
    watcher.start()
    for limit in (0, 0.05):
        with pytest.raises(
            TransferTimeout, match="not done within .* s; descriptors none arrived.*It goes on"
        ) as caught:
            transfer.wait(limit)
        assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, TransferError)
        assert caught.value.settled is False and caught.value.failed == range(40)
    with pytest.raises(TransferTimeout):
        transfer.exception(0.01)
    assert not transfer.done() and not transfer.settled and transfer.settle(0) is False
    assert "still at work" in transfer.unsettled
    for _ in range(4):
        stepped.engine.step()
    transfer.wait(10)
    watcher.join(10)
    assert patient == [None] and transfer.done() and transfer.settled
    np.testing.assert_array_equal(stepped.dst, wanted)


def test_cancel_stops_further_chunks_and_whoever_waits_hears_of_it(stepped):
    transfer = stepped.engine.submit(stepped.plan(20)[0], stepped.peer)
    whole = stepped.engine.submit(stepped.plan(5)[0], stepped.peer)
    others = []
    watcher = threading.Thread(target=lambda: others.append(transfer.exception()))
    watcher.start()
    assert transfer.cancel() is True and transfer.cancel() is True
    watcher.join(10)
    assert "it was cancelled" in str(others[0]) and not isinstance(others[0], TransferTimeout)
    assert others[0].settled is False and others[0].failed == range(40)
    assert transfer.done() and not transfer.settled and "moving" not in repr(transfer)
    stepped.engine.step()
    until(lambda: transfer.settled)
    with pytest.raises(TransferError, match="0 to 9 arrived, 10 to 39 were never sent") as caught:
        transfer.wait(0)
    assert caught.value.settled is True and caught.value.failed == range(10, 40)
    whole.cancel()
    stepped.engine.step()
    until(lambda: whole.settled)
    with pytest.raises(TransferError, match="it was cancelled; descriptors 0 to 9 arrived. Nothing"):
        whole.wait(0)  # all of it came, but cancelled it stays
    assert whole.arrived == 10


def test_a_peer_that_cannot_be_told_is_an_error_though_all_arrived(stepped, monkeypatch):
    plan, wanted = stepped.plan(20)
    transfer = stepped.engine.submit(plan, stepped.peer, notify=b"all")
    stepped.engine.step()
    until(lambda: transfer.arrived == 10)
    stepped.target.close()  # before its time: what is left of its pages is not written
    for _ in range(4):
        stepped.engine.step()
    with pytest.raises(TransferError, match="there is no open LocalEngine"):
        transfer.wait(10)
    assert transfer.arrived == 10 and transfer.settle(0) is True

    def fail(session, notice):
        raise ConnectionError("gone")

    stepped.target = engines.LocalEngine()
    stepped.target.register(stepped.peer.layout)
    stepped.peer = engines.Peer(stepped.target.session, stepped.peer.layout)
    monkeypatch.setattr(stepped.engine, "_tell", fail)
    transfer = stepped.engine.submit(plan, stepped.peer, notify=b"all")
    for _ in range(5):
        stepped.engine.step()
    message = "all arrived, but the peer could not be told: gone.*0 to 39 arrived"
    with pytest.raises(TransferError, match=message) as caught:
        transfer.wait(10)
    assert caught.value.settled is True and transfer.arrived == 40
    np.testing.assert_array_equal(stepped.dst, wanted)


# ---- the address check, against plain Python


@pytest.mark.parametrize("seed", range(30))
def test_address_check_agrees_with_plain_python(seed):
    rng = np.random.default_rng(seed)
    top = (1 << 64) if seed % 2 else (1 << 20)
    regions, base = [], 0
    for number in range(int(rng.integers(1, 6))):
        base += int(rng.integers(0, top // 16))
        nbytes = int(rng.integers(1, 5000))
        regions.append(Region("r", number, base, nbytes, 1))
        base += nbytes
    if seed % 2:
        regions.append(Region("last", 0, (1 << 64) - 100, 100, 1))
    spans = Spans([Layout(regions, page_size=1)])
    chosen = sorted(rng.integers(0, len(regions), int(rng.integers(0, 3000))))
    ranges = []
    for number in chosen:
        region = regions[number]
        start = int(rng.integers(0, region.page_bytes))
        ranges.append((region.base + start, int(rng.integers(1, region.page_bytes - start + 1))))
    if ranges and seed % 3:
        at, region = int(rng.integers(len(ranges))), regions[0]
        wrong = [
            (ranges[at][0], 0),
            (region.base + region.page_bytes, 1),
            (max(region.base - 1, 0), 5001),
            (ranges[at][0], (1 << 64) - 1),
            ((1 << 64) - 1, 2),
            (0, 1 << 63),
        ]
        ranges[at] = wrong[int(rng.integers(len(wrong)))]

    def inside(address: int, nbytes: int) -> bool:
        return nbytes > 0 and any(r.base <= address and address + nbytes <= r.base + r.page_bytes for r in regions)

    expected = next((n for n, one in enumerate(ranges) if not inside(*one)), -1)
    table = np.array(ranges, dtype=np.uint64).reshape(-1, 2).T.copy()
    assert spans.first_outside(Memory.DRAM, table[0], table[1]) == expected
    assert spans.first_outside(Memory.VRAM(0), table[0], table[1]) == (0 if ranges else -1)


@pytest.mark.parametrize("position", [0, 1, 63, 64, 100, 640, 999])
@pytest.mark.parametrize(
    "wrong",
    [(1000, 1), (4999, 1), (6000, 1), (5000, 0), (9000, 0), (5999, 2), (5000, 1 << 63), (9000, 1001), (10000, 1)],
)
def test_one_wrong_descriptor_among_many_good_ones_is_found(position, wrong):
    """Good ones lie in the last span: an address below all spans is as far from it as a wrapped offset can be."""
    spans = Spans([Layout([Region("r", 0, 5000, 1000, 1), Region("r", 1, 9000, 1000, 1)], page_size=1)])
    table = np.full((2, 1000), 8, dtype=np.uint64)
    table[0] = 9000 + np.arange(1000) % 900
    assert spans.first_outside(Memory.DRAM, *table) == -1
    table[:, position] = wrong
    assert spans.first_outside(Memory.DRAM, *table) == position
