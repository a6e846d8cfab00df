"""Peers that die, hang, come back, forget or lie: real processes, every byte of the destination checked.

What a caller sees of each fault is a row of the table in docs/engines.md. `KVPLAN_FAULTS=write` has these tests write
it; `KVPLAN_SOAK=60` has eight threads go on for a minute.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from engine_peer import APART, DST_BYTES, GUARD, NIXL_TIMEOUT, PAGES, make_engine, make_pair, need, table_plan

from kvplan import Layout, Plan, Region, Segment, TransferError, TransferTimeout, engines

SOAK = float(os.environ.get("KVPLAN_SOAK", 1))
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "engines.md"
ROWS: list[tuple[str, str, str, str, str]] = []
CALL_ENDS = {"mooncake": 5.5, "nixl": NIXL_TIMEOUT + 0.5}  # seconds in which a call to a peer that hangs does


@pytest.fixture(params=APART)
def doomed(request, tmp_path_factory):
    sides = make_pair(request.param, tmp_path_factory)
    yield sides
    with contextlib.suppress(ProcessLookupError):
        sides.go_on()
    sides.close()


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    if os.environ.get("KVPLAN_FAULTS") == "write":
        lines = ["| fault | engine | `wait` raises | after | settled |", "|---|---|---|---|---|"]
        lines += ["| " + " | ".join(row) + " |" for row in sorted(ROWS, key=lambda row: row[:2])]
        text = DOCUMENT.read_text()
        marks = "<!-- faults:begin -->", "<!-- faults:end -->"
        new = re.sub(f"{marks[0]}.*{marks[1]}", "\n".join((marks[0], *lines, marks[1])), text, flags=re.S)
        DOCUMENT.write_text(new)


def note(fault: str, sides, error: TransferError, seconds: float, settled: str) -> None:
    said = (
        f"{type(error).__name__}, code {str(error.code).split(':')[0]}"
        if error.code is not None
        else type(error).__name__
    )
    ROWS.append((fault, sides.kind, said, f"{seconds:.1f} s" if seconds >= 0.05 else "at once", settled))


def fail(transfer, timeout: float = 20) -> tuple[TransferError, float]:
    """The error that it ends with, and after how many seconds."""
    begun = time.monotonic()
    with pytest.raises(TransferError) as caught:
        transfer.wait(timeout)
    return caught.value, time.monotonic() - begun


def until(condition, limit: float = 10) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def one_memory(sides, times: int) -> Plan:
    """Pages of one region, again and again: one segment of work for seconds."""
    plan = sides.plan(PAGES)[0]
    first = plan.segments[0]
    table = plan.table[:, first.start : first.stop].repeat(1, times)
    return Plan(table, [Segment(first.src_memory, first.dst_memory, 0, table.shape[1])])


def still_works(sides, seed: int = 99) -> None:
    """The path to what the peer declares now is whole."""
    sides.dst[:] = GUARD
    plan, wanted = sides.plan(50, seed=seed)
    sides.engine.submit(plan, sides.peer).wait(20)
    np.testing.assert_array_equal(sides.dst, wanted)


# ---- peers that die


def test_peer_killed_during_and_before_a_transfer_and_started_again(doomed):
    plan = one_memory(doomed, 60)
    transfer = doomed.engine.submit(plan, doomed.peer)
    while not transfer.arrived and not transfer.done():
        time.sleep(0.001)
    assert transfer.arrived < len(plan)
    doomed.kill()
    error, seconds = fail(transfer)
    assert not isinstance(error, TransferTimeout) and error.settled is False and error.code
    assert 0 < error.failed.start < error.failed.stop == len(plan)
    assert transfer.done() and sum(doomed.engine.sizes) < len(plan)  # the chunks behind the failed one stay here
    assert transfer.settle(0.3) is False and transfer.unsettled
    note("peer killed during a transfer", doomed, error, seconds, "no; after `peer_ended`: yes")
    dead = doomed.peer
    doomed.engine.peer_ended(dead.session)
    assert transfer.settle(0) is True and transfer.unsettled is None and transfer.times.settled >= transfer.times.ended

    late = doomed.plan(3)[0]
    error, seconds = fail(doomed.engine.submit(late, dead))
    assert error.failed == range(6)
    settled = "yes, nothing was sent" if error.settled else "no; after `peer_ended`: yes"
    note("peer killed before a transfer", doomed, error, seconds, settled)
    doomed.engine.peer_ended(dead.session)
    assert doomed.engine.stats().unsettled == 0
    doomed.start()
    assert doomed.peer.session != dead.session
    still_works(doomed)
    fail(doomed.engine.submit(late, dead))  # its place is not taken by the new one
    assert (np.asarray(doomed.dst) != GUARD).sum() == 100 * 64


def test_peer_killed_after_a_transfer(doomed):
    plan, wanted = doomed.plan(500)
    transfer = doomed.engine.submit(plan, doomed.peer)
    transfer.wait(20)
    doomed.kill()
    transfer.wait(0)
    assert transfer.settle(0) is True
    np.testing.assert_array_equal(doomed.dst, wanted)
    doomed.engine.unregister(doomed.layout)  # and nothing of it lingers here
    doomed.engine.register(doomed.layout)


# ---- peers that hang


def test_peer_that_hangs_and_goes_on(doomed, tmp_path_factory):
    other = make_pair(doomed.kind, tmp_path_factory, engine=doomed.engine)
    try:
        for sides in (doomed, other):
            sides.engine.submit(sides.plan(1)[0], sides.peer).wait(20)
        doomed.dst[:] = GUARD
        doomed.stop()
        plan, wanted = doomed.plan(200)
        begun = time.monotonic()
        first, patient, *rest = [doomed.engine.submit(plan, doomed.peer) for _ in range(6)]
        still_works(other)  # which is not held up
        assert time.monotonic() - begun < 1.5
        for transfer in rest:
            transfer.cancel()
            assert transfer.settle(0) is True  # it had not begun

        error, seconds = fail(first, 0.5)
        assert isinstance(error, TransferTimeout) and seconds < 3
        assert error.settled is False and error.failed == range(len(plan))
        assert not first.done() and first.settle(0) is False
        with pytest.raises(RuntimeError, match="under way"):
            doomed.engine.unregister(doomed.layout)
        late, _ = fail(patient)
        late_after = time.monotonic() - begun
        assert not isinstance(late, TransferTimeout) and late.settled is False and patient.done()
        assert late_after < CALL_ENDS[doomed.kind]
        assert first.settle(1) is False and first.done() and first.unsettled
        assert (doomed.dst == GUARD).all()

        doomed.go_on()
        begun = time.monotonic()
        assert first.settle(15) is True and patient.settle(15) is True and first.unsettled is None
        settled = f"no; {time.monotonic() - begun:.2f} s after it goes on: yes"
        after = doomed.dst.copy()
        assert ((after == GUARD) | (after == wanted)).all()
        doomed.src[:] = 201  # these pages are free: nothing may read them any more
        time.sleep(1)
        np.testing.assert_array_equal(doomed.dst, after)
        note("peer stopped, wait(0.5)", doomed, error, seconds, settled)
        note("peer stopped, wait for long", doomed, late, late_after, settled)
        still_works(doomed)
    finally:
        other.close()


def test_close_does_not_wait_for_a_peer_that_hangs(tmp_path_factory):
    """Nothing ends a NIXL transfer to such a peer but kvplan."""
    sides = make_pair("nixl", tmp_path_factory)
    try:
        sides.engine.submit(sides.plan(1)[0], sides.peer).wait(20)
        sides.stop()
        transfer = sides.engine.submit(sides.plan(100)[0], sides.peer)
        begun = time.monotonic()
        sides.engine.close()
        assert time.monotonic() - begun < CALL_ENDS["nixl"] + 1
        assert transfer.done() and transfer.settle(0.2) is False and transfer.unsettled
        with pytest.raises(TransferError):
            transfer.wait(0)
    finally:
        sides.close()


# ---- peers that forget


def test_peer_that_unregisters(doomed):
    plan, _ = doomed.plan(20)
    doomed.engine.submit(plan, doomed.peer).wait(20)
    doomed.dst[:] = GUARD
    before = doomed.peer
    doomed.tell("unregister")
    transfer = doomed.engine.submit(plan, before)
    error, seconds = fail(transfer)
    assert (doomed.dst == GUARD).all()
    early = transfer.settle(0.3)  # a fence of Mooncake may arrive: the peer takes it at any time
    assert early is False or doomed.kind == "mooncake"
    settled = {"mooncake": "no; once registered again: yes", "nixl": "cannot know; it is, since that ended all"}
    note("peer has unregistered", doomed, error, seconds, settled[doomed.kind])
    doomed.tell("register")
    assert transfer.settle(10) is (doomed.kind == "mooncake")
    if early:
        time.sleep(1)
        assert (doomed.dst == GUARD).all()
    still_works(doomed)


# ---- peers that lie


def test_peer_that_declares_more_than_it_has_registered(doomed):
    start = doomed.peer.layout.by_key["gappy", 0].base
    liar = engines.Peer(doomed.peer.session, Layout([Region("kv", 0, start, 64, 1 << 24)], page_size=16))
    for page in (DST_BYTES // 64 + 100, 50_000, (1 << 24) - 1):
        plan = table_plan((doomed.src.ctypes.data, start + 64 * page, 64))
        error, seconds = fail(doomed.engine.submit(plan, liar))
        assert not isinstance(error, TransferTimeout)
    settled = "yes, nothing was sent" if error.settled else "no; a later arrival shows it"
    note("peer declares memory that it has not registered", doomed, error, seconds, settled)
    assert (doomed.dst == GUARD).all() and doomed.process.is_alive()
    still_works(doomed)


# ---- for long


@pytest.mark.parametrize("kind", APART)
def test_eight_threads_send_to_three_peers(kind, tmp_path_factory):
    need(kind)
    engine = make_engine(kind)
    peers = [make_pair(kind, tmp_path_factory, engine=engine) for _ in range(3)]
    errors: list[Exception] = []
    counts = [0] * 8
    ends = time.monotonic() + SOAK

    def send(number: int) -> None:
        # Its own eighth of the pages of every peer, so that what is due there is known.
        first = number * (PAGES // 8)
        try:
            while time.monotonic() < ends:
                for index, sides in enumerate(peers):
                    plan, _ = sides.plan(100, seed=number * 10 + index, first=first, stop=first + PAGES // 8)
                    engine.submit(plan, sides.peer).wait(30)
                    counts[number] += 1
        except Exception as error:
            errors.append(error)

    try:
        plans = [
            [sides.plan(100, seed=n * 10 + i, first=n * (PAGES // 8), stop=(n + 1) * (PAGES // 8))[1] for n in range(8)]
            for i, sides in enumerate(peers)
        ]
        threads = [threading.Thread(target=send, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOAK + 60)
        assert not errors and min(counts) > 0
        for sides, wanted in zip(peers, plans, strict=True):
            due = np.full(len(sides.dst), GUARD, dtype=np.uint8)
            for one in wanted:
                due[one != GUARD] = one[one != GUARD]
            np.testing.assert_array_equal(sides.dst, due)
        if engine.max_in_flight:
            assert engine.most <= 3 * engine.max_in_flight
    finally:
        for sides in peers:
            sides.close()


@pytest.mark.parametrize("kind", APART)
def test_a_thousand_transfers_leave_nothing_behind(kind, tmp_path_factory):
    sides = make_pair(kind, tmp_path_factory)

    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def memory() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    try:
        plan = sides.plan(2)[0]
        for number in range(150):
            if number == 50:
                before = open_files(), memory()
            for transfer in [sides.engine.submit(plan, sides.peer) for _ in range(10)]:
                transfer.wait(20)
        assert open_files() <= before[0] + 2
        assert memory() < before[1] + (4 << 20)
        until(lambda: not sides.engine._lanes.by_key)  # the last thread has left
        assert not sides.engine._transfers and not list(sides.engine._unsettled_transfers)
        assert sides.engine.stats().arrived == 1500 and sides.engine.stats().descriptors == 1500 * len(plan)
    finally:
        sides.close()
