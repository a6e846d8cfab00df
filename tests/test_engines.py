"""Engines: real transfers between two processes over loopback, and the manners that all engines share."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
from engine_peer import GUARD, PAGE, PAGES, make_pair, table_plan

from kvplan import (
    Layout,
    LayoutError,
    Memory,
    Plan,
    PlanError,
    Region,
    Segment,
    TransferError,
    TransferTimeout,
    engines,
)

os.environ.setdefault("MC_TRANSFER_TIMEOUT", "5")  # seconds until Mooncake gives up on a peer that hangs; its least


@pytest.fixture(scope="module", params=["local", "mooncake"])
def shared_sides(request, tmp_path_factory):
    sides = make_pair(request.param, tmp_path_factory)
    yield sides
    sides.close()


@pytest.fixture
def sides(shared_sides):
    shared_sides.dst[:] = GUARD
    shared_sides.engine.sizes.clear()
    return shared_sides


@pytest.fixture
def doomed(tmp_path_factory):
    sides = make_pair("mooncake", tmp_path_factory)
    yield sides
    sides.close()


# ---- what every engine does


@pytest.mark.parametrize("count", [1, 7, 2000])
def test_scattered_pages_arrive_and_nothing_else_changes(sides, count):
    plan, wanted = sides.plan(count, seed=count)
    transfer = sides.engine.submit(plan, sides.peer)
    transfer.wait(30)
    assert transfer.done() and transfer.arrived == transfer.descriptors == len(plan)
    assert transfer.nbytes == 2 * count * PAGE
    np.testing.assert_array_equal(sides.dst, wanted)


def test_session_alone_is_enough_for_a_plan_that_knows_its_destination(sides):
    plan, wanted = sides.plan(50)
    sides.engine.submit(plan, sides.peer.session).wait(30)
    np.testing.assert_array_equal(sides.dst, wanted)
    bare = Plan(plan.table, plan.segments)
    with pytest.raises(PlanError, match="does not know its destination layout"):
        sides.engine.submit(bare, sides.peer.session)
    with pytest.raises(TypeError, match="Peer or a session"):
        sides.engine.submit(plan, sides.peer.layout)


def test_long_plan_goes_in_chunks(sides):
    plan, wanted = sides.plan(PAGES)
    assert len(plan) > 8000  # 3000 in one call already kill the path to a peer in Mooncake 0.3.13
    sides.engine.submit(plan, sides.peer).wait(60)
    np.testing.assert_array_equal(sides.dst, wanted)
    limit = sides.engine.max_in_flight
    assert sum(sides.engine.sizes) == len(plan)
    assert max(sides.engine.sizes) <= (limit or len(plan))


def test_many_threads_to_one_peer_stay_below_the_limit(sides):
    plans = [sides.plan(700, seed=n, first=1000 * n, stop=1000 * (n + 1)) for n in range(4)]
    wanted = sides.dst.copy()
    for _, one in plans:
        wanted[one != GUARD] = one[one != GUARD]
    errors = []

    def send(plan):
        try:
            transfers = [sides.engine.submit(part, sides.peer) for part in (*plan.chunks(333), plan)]
            for transfer in transfers:
                transfer.wait(60)
        except Exception as error:
            errors.append(error)

    sides.engine.most = 0
    threads = [threading.Thread(target=send, args=(plan,)) for plan, _ in plans]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    np.testing.assert_array_equal(sides.dst, wanted)
    if sides.engine.max_in_flight:
        assert 333 <= sides.engine.most <= sides.engine.max_in_flight


def test_empty_plan_is_done_at_once(sides):
    for plan in (table_plan(), sides.plan(0)[0]):
        transfer = sides.engine.submit(plan, sides.peer)
        assert transfer.done()
        transfer.wait(0)
    assert sides.engine.sizes == []


def test_what_leaves_a_region_is_refused_before_the_engine_sees_it(sides):
    src, dst = sides.layout.by_key["kv", 0], sides.peer.layout.by_key["kv", 0]
    src_end, dst_end = src.base + src.span_bytes, dst.base + dst.span_bytes
    vram = Memory.VRAM(0)
    cases = [
        (
            table_plan((src.base, dst.base, 64), (src.base, dst_end - 63, 64)),
            r"descriptor 1: destination 0x.*region kv",
        ),
        (table_plan((src.base, dst.base - 1, 64)), "descriptor 0: destination .* declared by the peer"),
        # the next source region touches this one, but it is another registration
        (table_plan((src_end - 32, dst.base, 64)), "descriptor 0: source .* registered with this engine"),
        (table_plan((src.base - 1, dst.base, 1)), "descriptor 0: source .*region kv layer 0, DRAM"),
        (table_plan((0, dst.base, 64)), "source 0x0, 64 bytes"),
        (table_plan(((1 << 64) - 8, dst.base, 64)), "source 0xfffffffffffffff8"),
        (table_plan((src.base, (1 << 64) - 8, 64)), "destination 0xfffffffffffffff8"),
        (table_plan((src.base, dst.base, (1 << 64) - 1)), f"{(1 << 64) - 1} bytes"),
        (table_plan((src.base, dst.base, 64), (src.base, dst.base, 0)), "descriptor 1: length 0"),
        (table_plan((src.base, dst.base, 64), src=vram), "source .* 64 bytes of VRAM:0, .* the nearest is region kv"),
        (table_plan((src.base, dst.base, 64), dst=Memory.VRAM(1)), "destination .* 64 bytes of VRAM:1"),
        (Plan(table_plan((src.base, dst.base, 64)).table, []), "segments end at descriptor 0 of 1"),
    ]
    for plan, message in cases:
        with pytest.raises(PlanError, match=message):
            sides.engine.submit(plan, sides.peer)
    assert sides.engine.sizes == []
    assert (sides.dst == GUARD).all()


def test_unregistered_destination_is_a_transfer_error(sides):
    plan, given_up = sides.plan(20, stop=2000)
    sides.tell("unregister")
    try:
        with pytest.raises(TransferError) as caught:
            sides.engine.submit(plan, sides.peer).wait(20)
        assert (sides.dst == GUARD).all()
    finally:
        sides.tell("register")
    error = caught.value
    assert not isinstance(error, TransferTimeout)
    assert error.peer == sides.peer.session and error.failed == range(len(plan))
    assert error.settled is isinstance(sides.engine, engines.LocalEngine)
    assert "none arrived, 0 to 39 may have arrived" in str(error)
    # The path still works. Mooncake first sends what it had queued; once a later transfer is there, that is over.
    later, wanted = sides.plan(20, seed=1, first=2000)
    sides.engine.submit(later, sides.peer).wait(20)
    after = sides.dst.copy()
    late = (after != GUARD) & (wanted == GUARD)
    assert (after[~late] == wanted[~late]).all() and (after[late] == given_up[late]).all()
    assert not (error.settled and late.any())
    time.sleep(0.5)
    np.testing.assert_array_equal(sides.dst, after)


def test_layouts_share_whole_spans_or_none(sides):
    sides.engine.register(sides.layout)
    sides.engine.unregister(sides.layout)
    part = Layout([Region("part", 0, sides.src.ctypes.data + 64, 64, 1)], page_size=16)
    with pytest.raises(LayoutError, match="overlaps a part"):
        sides.engine.register(part)
    with pytest.raises(ValueError, match="is not registered"):
        sides.engine.unregister(part)
    plan, wanted = sides.plan(3)
    sides.engine.submit(plan, sides.peer).wait(20)
    np.testing.assert_array_equal(sides.dst, wanted)


@pytest.mark.parametrize("kind", ["local", "mooncake"])
def test_close_waits_and_then_refuses(kind, tmp_path_factory):
    sides = make_pair(kind, tmp_path_factory)
    try:
        plan, wanted = sides.plan(2000)
        transfer = sides.engine.submit(plan, sides.peer)
        with sides.engine:
            pass
        assert transfer.done()
        transfer.wait(0)
        np.testing.assert_array_equal(sides.dst, wanted)
        sides.engine.close()
        for use in (lambda: sides.engine.submit(plan, sides.peer), lambda: sides.engine.register(sides.layout)):
            with pytest.raises(RuntimeError, match="is closed"):
                use()
    finally:
        sides.close()


# ---- peers that die and peers that hang


def test_peer_killed_during_and_before_a_transfer(doomed):
    table = doomed.plan(PAGES)[0].table.repeat(1, 20)  # the same again and again: seconds of work
    plan = Plan(table, [Segment(Memory.DRAM, Memory.DRAM, 0, table.shape[1])])
    transfer = doomed.engine.submit(plan, doomed.peer)
    while not transfer.arrived and not transfer.done():
        time.sleep(0.001)
    doomed.process.kill()
    with pytest.raises(TransferError, match=r"may have arrived.*Neither reuse nor free them") as caught:
        transfer.wait(20)
    error = caught.value
    assert not isinstance(error, TransferTimeout)
    assert error.settled is False and error.code == -1
    assert 0 < error.failed.start < error.failed.stop == len(plan)
    assert transfer.done() and sum(doomed.engine.sizes) < len(plan)  # the chunks behind the failed one stay here

    doomed.process.wait()
    with pytest.raises(TransferError) as caught:
        doomed.engine.submit(doomed.plan(3)[0], doomed.peer).wait(20)
    assert caught.value.settled is False and caught.value.failed == range(6)


def test_peer_that_hangs_times_out_unsettled(doomed):
    doomed.engine.submit(doomed.plan(1)[0], doomed.peer).wait(20)
    os.kill(doomed.process.pid, signal.SIGSTOP)
    first = doomed.engine.submit(doomed.plan(PAGES)[0], doomed.peer)
    second = doomed.engine.submit(doomed.plan(PAGES)[0], doomed.peer)
    before = time.monotonic()
    with pytest.raises(TransferTimeout, match=r"not done within 0\.5 s") as caught:
        first.wait(0.5)
    assert time.monotonic() - before < 3
    assert isinstance(caught.value, TimeoutError)
    assert caught.value.settled is False and caught.value.failed == range(2 * PAGES)
    assert "1024 to 8191 were never sent" in str(caught.value)
    assert not first.done()
    with pytest.raises(RuntimeError, match="under way"):
        doomed.engine.unregister(doomed.layout)
    with pytest.raises(TransferTimeout, match=r"0 to 8191 were never sent.*may be reused") as caught:
        second.wait(0)
    assert caught.value.settled is True and caught.value.failed is None
    assert second.done()
    doomed.process.kill()  # ends the call at once
    while not first.done() and time.monotonic() - before < 10:
        time.sleep(0.01)
    assert first.done() and doomed.engine.sizes == [2, 1024]


# ---- Mooncake's own


def test_missing_package_or_library_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ImportError, match=r"kvplan\[mooncake\].*kvplan\[mooncake-cuda13\].*kvplan\[mooncake-cpu\]"):
        engines.MooncakeEngine()
    for library, advice in (("libibverbs.so.1", "apt-get install libibverbs1"), ("libcuda.so.1", "mooncake-cpu")):
        package = tmp_path / library / "mooncake"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "engine.py").write_text(f"raise ImportError('{library}: cannot open shared object file')")
        monkeypatch.syspath_prepend(tmp_path / library)
        for name in ("mooncake", "mooncake.engine"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(ImportError, match=f"{library}.*{advice}"):
            engines.MooncakeEngine()


def test_mooncake_refuses_limits_that_break_it():
    for limit in (0, 1025):
        with pytest.raises(ValueError, match=f"max_in_flight is {limit}"):
            engines.MooncakeEngine(max_in_flight=limit)
