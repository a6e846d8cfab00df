"""When a transfer is settled, and what says so: fences, questions, the end of a peer, groups and quarantine."""

from __future__ import annotations

import asyncio
import logging
import threading
import time

import numpy as np
import pytest
from engine_peer import DST_FIELDS, GAP, GUARD, PAGE, PAGES, Together, make_pair, need, table_plan
from stepped import Stepped, until

from kvplan import Layout, Plan, PlanError, Region, TransferError, TransferTimeout, engines, pair
from kvplan.engines.collisions import Unsettled
from kvplan.engines.outcome import Outcome
from kvplan.engines.stats import Counters
from kvplan.engines.transfer import Transfer


@pytest.fixture
def stepped():
    sides = Together("local")
    sides.engine.close()
    sides.engine = Stepped()
    sides.engine.register(sides.layout)
    yield sides
    sides.engine.let_go()
    sides.close()


# ---- a stand-in that keeps order and goes on after a failure, as Mooncake over TCP does


class InOrder(engines.LocalEngine):
    """Fails when told to; what failed stays in its queue, and is carried out before what comes later."""

    _stops_on_failure = False
    _in_order = True
    _unsettled = "The queue may go on."

    def __init__(self) -> None:
        super().__init__()
        self.fail = False  # refuse what comes, and queue it
        self.left: list[tuple] = []
        self.fences = 0
        self.word = np.zeros(2, np.uint64)  # where fences go: source and target
        self.may = threading.Event()
        self.may.set()

    def _fence(self, session, op):
        self.fences += 1
        return engine_fence(self.word)

    def _move(self, session, chunk, op):
        self.may.wait()
        if self.fail:
            self.left.append((session, chunk, op))
            return Outcome(-1)
        for session_, chunk_, op_ in [*self.left, (session, chunk, op)]:
            if chunk_.src_layout is None and len(chunk_) == 1 and int(chunk_.table[2, 0]) == 8:
                continue  # a fence
            super()._move(session_, chunk_, op_)
        self.left.clear()
        return Outcome()


def engine_fence(word: np.ndarray):
    return table_plan((word.ctypes.data, word.ctypes.data + 8, 8))


@pytest.fixture
def in_order():
    sides = Together("local")
    sides.engine.close()
    sides.engine = InOrder()
    sides.engine.register(sides.layout)
    yield sides
    sides.engine.may.set()
    sides.close()


def failed_transfer(sides, **arguments):
    sides.engine.fail = True
    plan, wanted = sides.plan(20, **arguments)
    transfer = sides.engine.submit(plan, sides.peer, label="r1")
    assert transfer.exception(10).settled is False
    return transfer, plan, wanted


def test_a_fence_settles_and_touches_no_page(in_order):
    transfer, _, wanted = failed_transfer(in_order)
    assert transfer.settle(0.1) is False and "does not arrive either" in transfer.unsettled
    in_order.engine.fail = False
    assert transfer.settle(10) is True and transfer.settled and transfer.unsettled is None
    np.testing.assert_array_equal(in_order.dst, wanted)  # what was left came before the fence
    stats = in_order.engine.stats()
    assert (stats.failed, stats.arrived, stats.descriptors, stats.unsettled) == (1, 0, 0, 0)  # no fence among them
    assert transfer.times.ended <= transfer.times.settled


def test_many_who_settle_share_one_fence(in_order):
    memory = np.zeros(64, np.uint8)
    more = Layout([Region("more", 0, memory.ctypes.data, 64, 1)], page_size=16)
    in_order.engine.register(more)
    transfer, _, _ = failed_transfer(in_order)
    in_order.engine.fail = False
    in_order.engine.may.clear()
    for _ in range(500):
        assert transfer.settle(0) is False
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(transfer.settle(10))) for _ in range(8)]
    for thread in threads:
        thread.start()
    in_order.engine.unregister(more)  # a fence is no reason not to
    assert in_order.engine.fences == 1
    in_order.engine.may.set()
    for thread in threads:
        thread.join()
    assert answers == [True] * 8 and in_order.engine.fences == 1


def test_a_fence_that_began_before_the_call_had_ended_shows_nothing(in_order):
    """Two fail one after the other. The fence for the first begins while the call of the second is at work."""
    engine = in_order.engine
    first, _, _ = failed_transfer(in_order, stop=1000)
    engine.may.clear()
    second = engine.submit(in_order.plan(20, first=1000)[0], in_order.peer)
    until(lambda: second.times.first_call is not None)
    assert first.settle(0) is False
    fence = next(iter(engine._fences._last.values()))
    until(lambda: fence.times.first_call is not None)
    engine.may.set()
    until(lambda: second.done() and fence.done())
    assert not first.settled and not second.settled
    # Now the fence succeeds, but say it had begun before the second's end.
    with engine._lock:
        begun = second._ended - 1e-3
        fence._failure = None
        engine._fences.ended(fence, begun)
        assert not second.settled
    engine.fail = False
    assert second.settle(10) and first.settle(10)


def test_a_later_transfer_that_arrives_settles_too(in_order):
    transfer, _, _ = failed_transfer(in_order, stop=1000)
    in_order.engine.fail = False
    in_order.engine.submit(in_order.plan(5, first=1000)[0], in_order.peer).wait(10)
    assert transfer.settled


# ---- a call that was given up, as NIXL's


class GivesUp(engines.LocalEngine):
    """Its call ends with no answer, and `finished` must be asked by one thread at a time."""

    _stops_on_failure = False

    def __init__(self) -> None:
        super().__init__()
        self.over = False
        self.within = 0

    def _finished(self) -> bool:
        self.within += 1
        assert self.within == 1
        time.sleep(0.001)
        self.within -= 1
        return self.over

    def _move(self, session, chunk, op):
        return Outcome("no answer", finished=self._finished)


def test_any_number_of_threads_may_settle():
    sides = Together("local")
    sides.engine.close()
    engine = sides.engine = GivesUp()
    engine.register(sides.layout)
    for number in range(20):
        engine.over = False
        transfer = engine.submit(sides.plan(3, first=100 * number, stop=100 * number + 100)[0], sides.peer)
        assert transfer.exception(10).code == "no answer"
        answers = []

        def ask(transfer=transfer, answers=answers):
            try:
                answers.append(transfer.settle(10))
            except BaseException as error:
                answers.append(error)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.003)
        engine.over = True
        for thread in threads:
            thread.join()
        assert answers == [True] * 4 and transfer.arrived == 6
    sides.close()


# ---- the end of a peer


def test_peer_ended_settles_and_fails_what_is_queued(in_order):
    engine = in_order.engine
    old, _, _ = failed_transfer(in_order, stop=1000)
    engine.may.clear()
    running, second, queued = (
        engine.submit(in_order.plan(5, first=k, stop=k + 100)[0], in_order.peer) for k in (1000, 1100, 1200)
    )
    behind = engine.submit(in_order.plan(20, stop=1000)[0], in_order.peer, queue_behind=True)
    engine.peer_ended(in_order.peer.session)
    fences = engine.fences
    assert old.settle(0) is True
    for transfer in (running, second, queued, behind):
        with pytest.raises(TransferError, match="its peer has ended"):
            transfer.wait(0)
    assert queued.settled and behind.settled and not running.settled
    engine.may.set()
    assert running.settle(10) and second.settle(10)
    assert engine.fences == fences  # nothing was fenced to it
    assert engine.stats().unsettled == 0
    engine.fail = False
    engine.submit(in_order.plan(5)[0], in_order.peer).wait(10)  # one that is started again may have that session
    with pytest.raises(ValueError, match="session"):
        engine.peer_ended("")


# ---- plans that meet an unsettled transfer


def test_a_plan_that_meets_an_unsettled_transfer_is_refused_or_waits(in_order):
    engine = in_order.engine
    transfer, plan, wanted = failed_transfer(in_order)
    kv = in_order.peer.layout.by_key["kv", 0]
    first = int(plan.table[1, 0]) % (1 << 64)
    message = (
        f"conflicts with the transfer 'r1' of 40 descriptors to {in_order.peer.session}, which has failed and is not "
        f"settled: "
        f"descriptor 0 writes {first:#x} to {first + 63:#x}"
    )
    with pytest.raises(PlanError, match=message):
        engine.submit(plan, in_order.peer)
    assert engine.stats().queued == 0 and kv.page_bytes == 64
    # Reading what it reads is allowed, and so is a place of its own.
    free = sorted(set(range(PAGES)) - {int(a) for a in written_pages(in_order, wanted)})[:20]
    own = pair(in_order.layout, in_order.peer.layout).plan(free, {"host": free, "device": free})
    waits = engine.submit(plan, in_order.peer, queue_behind=True)
    assert waits.state == "waiting" and engine.stats().queued == 1
    with pytest.raises(TransferTimeout):
        waits.wait(0.05)
    engine.fail = False
    waits.wait(10)
    assert transfer.settled
    engine.submit(own, in_order.peer).wait(10)


def written_pages(sides, wanted):
    """Pages of either space in which something is due."""
    gappy = wanted[: (PAGE + GAP) * PAGES].reshape(PAGES, PAGE + GAP)[:, :PAGE]
    start = DST_FIELDS[1]["base"]
    kv = wanted[start : start + PAGE * PAGES].reshape(PAGES, PAGE)
    return np.flatnonzero((gappy != GUARD).any(1) | (kv != GUARD).any(1))


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("new_op", ["write", "read"])
def test_which_bytes_meet(op, new_op):
    """By definition: a byte that one writes and the other reads or writes, in the same process."""
    engine = engines.LocalEngine()
    rng = np.random.default_rng(7)
    for _ in range(300):
        rows, new = (
            [tuple(int(x) for x in (*rng.integers(0, 400, 2), rng.integers(1, 12))) for _ in range(3)] for _ in range(2)
        )
        old_peer, new_peer = ("local:a", ["local:a", "local:b"][int(rng.integers(2))])
        transfer = Transfer(engine, table_plan(*rows), old_peer, op)
        with engine._lock:
            transfer._take()
        unsettled = Unsettled()
        unsettled.add(transfer)

        def touched(rows, peer, op):
            reads, writes = set(), set()
            for src, dst, n in rows:
                here, there = ("here",), ("there", peer)
                src_at, dst_at = (here, there) if op == "write" else (there, here)
                reads |= {(src_at, src + k) for k in range(n)}
                writes |= {(dst_at, dst + k) for k in range(n)}
            return reads, writes

        reads, writes = touched(rows, old_peer, op)
        new_reads, new_writes = touched(new, new_peer, new_op)
        due = bool(new_writes & (reads | writes) or new_reads & writes)
        assert bool(unsettled.collisions(table_plan(*new), new_peer, new_op)) is due
        unsettled.discard(transfer)
        assert not list(unsettled) and not unsettled._touched
    engine.close()


# ---- callbacks, await, groups, quarantine


def test_callbacks_are_called_once_and_their_errors_logged(stepped, caplog):
    heard = []
    transfer = stepped.engine.submit(stepped.plan(5)[0], stepped.peer)
    transfer.add_done_callback(heard.append)
    transfer.add_done_callback(lambda _: 1 / 0)
    stepped.engine.step()
    transfer.wait(10)
    until(lambda: "ZeroDivisionError" in caplog.text)
    transfer.add_done_callback(heard.append)
    assert heard == [transfer, transfer]
    transfer.cancel()
    assert heard == [transfer, transfer]


def test_await(stepped):
    async def both():
        good = stepped.engine.submit(stepped.plan(5)[0], stepped.peer)
        stepped.engine.step()
        await good
        bad = stepped.engine.submit(stepped.plan(5)[0], stepped.peer)
        task = asyncio.ensure_future(wait_for(bad))
        await asyncio.sleep(0.01)
        task.cancel()  # whoever waits goes away; the transfer does not
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not bad.done()
        stepped.engine.step(-3)
        with pytest.raises(TransferError, match="returned -3"):
            await asyncio.wait_for(wait_for(engines.TransferGroup([good, bad])), 10)
        with pytest.raises(TransferError, match="returned -3"):
            await bad

    async def wait_for(one):
        await one

    asyncio.run(both())


def test_a_group_says_that_pages_are_free_when_all_are_settled(stepped):
    engine = stepped.engine
    first, second = (engine.submit(stepped.plan(5, seed=s)[0], stepped.peer, label=f"part {s}") for s in range(2))
    group = engines.TransferGroup([first, second, first], label="r7")
    assert len(group) == 2 and not group.settled and not group.done()
    with pytest.raises(TransferTimeout, match="2 of the 2 transfers of request 'r7' have not ended within"):
        group.wait(0.01)
    engine.step(-5)
    until(lambda: first.done() or second.done())
    with pytest.raises(TransferError, match="1 of the 2 transfers of request 'r7' failed.*returned -5") as caught:
        group.wait(10)  # at once, though the other goes on
    assert caught.value.settled is False and caught.value.code == -5
    error = caught.value.__cause__
    assert error.settled is True and "may be reused" not in str(error) and "free" not in str(error)
    assert group.settle(0) is False and "part" in group.unsettled
    group.cancel()
    assert group.done() and not group.settled
    engine.step()
    assert group.settle(10) is True and group.unsettled is None
    assert "its pages are free" in str(group.exception(0))
    assert "'r7': 1 failed, 1 cancelled" in repr(group) or "'r7': 1 cancelled, 1 failed" in repr(group)
    third = engine.submit(stepped.plan(5, seed=3)[0], stepped.peer)
    group.add(third)
    assert not group.settled
    engine.step()
    assert group.settle(10) and engines.TransferGroup().settle(0)
    with pytest.raises(TypeError, match="holds Transfers"):
        group.add(group)


def test_quarantine_gives_pages_back_once_and_when_settled(in_order):
    transfer, _, _ = failed_transfer(in_order)
    kept = engines.Quarantine()
    kept.add(transfer, [1, 2])
    kept.add(engines.TransferGroup([transfer]), "pages of r1")
    assert kept.free() == [] and kept.free(0.05) == [] and len(kept) == 2
    assert [pages for pages, _ in kept.reasons()] == [[1, 2], "pages of r1"]
    assert all("arrive" in why or "fence" in why for _, why in kept.reasons())
    in_order.engine.fail = False
    found = []
    until(lambda: found.extend(kept.free(10)) or len(found) == 2)
    assert sorted(map(str, found)) == ["[1, 2]", "pages of r1"] and kept.free(10) == []
    with pytest.raises(TypeError, match="Transfer or a TransferGroup"):
        kept.add("r1", [3])


# ---- what is recorded


def test_times_are_those_of_the_events_and_failures_are_logged(stepped, caplog):
    caplog.set_level(logging.INFO, "kvplan")
    plan, _ = stepped.plan(10)
    before = time.monotonic()
    transfer = stepped.engine.submit(plan, stepped.peer, label="r9")
    until(lambda: transfer.times.first_call)
    assert transfer.times.last_byte is None and transfer.times.ended is None and transfer.times.settled is None
    stepped.engine.step()
    stepped.engine.step()
    until(transfer.done)
    after = time.monotonic()
    time.sleep(0.02)
    transfer.wait(0)
    times = transfer.times
    marks = [before, times.submitted, times.first_call, times.last_byte, times.ended, times.settled, after]
    assert marks == sorted(marks)

    failed = stepped.engine.submit(plan, stepped.peer, label="r10")
    stepped.engine.step(-4)
    assert failed.exception(10).code == -4 and failed.times.last_byte is None and failed.times.settled is not None
    until(lambda: "r10" in caplog.text)
    lines = [(record.levelname, record.getMessage()) for record in caplog.records if record.name.startswith("kvplan")]
    assert [level for level, text in lines if "transfer 'r10' of 20" in text and "returned -4" in text] == ["WARNING"]
    layout = Layout([Region("x", 0, stepped.src.ctypes.data, 64, len(stepped.src) // 64)], page_size=16)
    other = engines.LocalEngine()
    other.register(layout)
    other.unregister(layout)
    said = [r.getMessage() for r in caplog.records if r.levelname == "INFO" and repr(other) in r.getMessage()]
    assert len(said) == 2 and f"{len(stepped.src)} bytes" in said[0] and "unregistered" in said[1]


def test_counts_of_peers_that_come_and_go_are_bounded():
    sides = Together("local")
    counters = Counters()
    plan = sides.plan(1)[0]
    for number in range(3000):
        transfer = Transfer(sides.engine, plan, f"local:peer{number}", "write")
        transfer._last, transfer._end = plan, "arrived"
        counters.moved(transfer, len(plan), plan.total_bytes)
        counters.ended(transfer)
    stats = counters.stats([], [])
    assert len(stats.peers) == 1024 and stats.arrived == 3000 and stats.bytes == 3000 * 128
    assert stats.peers["local:peer2999"].bytes == 128
    sides.close()


def test_repr_says_where_a_transfer_stands(stepped):
    transfer = stepped.engine.submit(stepped.plan(20)[0], stepped.peer, label="x" * 200)
    stepped.engine.step()
    until(lambda: transfer.arrived == 10)
    text = repr(transfer)
    assert "moving: 10 of 40 descriptors, 2560 bytes, to local:" in text and "x" * 64 + "..." in text
    assert "x" * 65 not in text
    peer = engines.Peer("p" * 500, stepped.peer.layout)
    assert len(repr(peer)) < 120


# ---- the real thing


@pytest.mark.parametrize("op", ["write", "read"])
def test_mooncake_settles_by_fences_of_either_direction(op, tmp_path_factory):
    need("mooncake")
    sides = make_pair("mooncake", tmp_path_factory)
    try:
        plan = sides.plan(5)[0]
        if op == "read":
            kv, there = sides.layout.by_key["kv", 0], sides.peer.layout.by_key["kv", 0]
            plan = table_plan(*[(there.base + 64 * k, kv.base + 64 * (k + 9), 64) for k in range(5)])
        assert ";fence=0x" in sides.peer.session
        fence = sides.engine._fence(sides.peer.session, op)
        spans = [span for layout in (sides.layout, sides.peer.layout) for span in layout.memory_spans()]
        for address in fence.table[:2, 0].tolist():  # no page is near
            assert not any(base < address + 8 and address < base + nbytes for _, base, nbytes in spans)
        sides.engine.submit(plan, sides.peer, op=op).wait(20)
        sides.tell("unregister")
        transfer = sides.engine.submit(plan, sides.peer, op=op)
        assert transfer.exception(20).settled is False
        sides.tell("register")
        assert transfer.settle(20) is True
        plain = engines.Peer(sides.peer.session.partition(";")[0], sides.peer.layout)
        sides.engine.submit(plan, plain, op=op).wait(20)
        sides.tell("unregister")
        transfer = sides.engine.submit(plan, plain, op=op)
        assert transfer.exception(20).settled is False
        sides.tell("register")
        if not transfer.settled:
            assert transfer.settle(0.2) is False and "has no fence word" in transfer.unsettled
        sides.engine.submit(sides.plan(3, first=2000)[0] if op == "write" else shifted(plan), plain, op=op).wait(20)
        assert transfer.settle(0) is True
    finally:
        sides.close()


def shifted(plan):
    table = plan.table.clone()
    table[1] += 64 * 100
    return Plan(table, plan.segments)
