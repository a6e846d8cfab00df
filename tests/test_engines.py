"""Engines: the manners that all of them share, each shown with real transfers (Ascend's over a stand-in)."""

from __future__ import annotations

import re
import threading
import time

import numpy as np
import pytest
from engine_peer import DST_FIELDS, GUARD, KINDS, PAGE, PAGES, layout_of, make_pair, table_plan

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
    pair,
)

SWAPPED = {"source": "destination", "destination": "source"}
SWAP = re.compile("source|destination")


@pytest.fixture(scope="module", params=KINDS)
def shared_sides(request, tmp_path_factory):
    sides = make_pair(request.param, tmp_path_factory)
    yield sides
    sides.close()


@pytest.fixture
def sides(shared_sides):
    shared_sides.dst[:] = GUARD
    shared_sides.engine.sizes.clear()
    return shared_sides


# ---- what arrives


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
    with pytest.raises(ValueError, match="session"):
        sides.engine.submit(plan, engines.Peer("x" * 2000, sides.peer.layout))
    with pytest.raises(TypeError, match="Peer or a session"):
        sides.engine.submit(plan, sides.peer.layout)


@pytest.mark.parametrize(
    "said",
    [None, 5, 1.5, True, [], {}, ["127.0.0.1:80"], "", "\ud800", "127.0.0.1:80\n", "a b\x00", "é:80", "\x1b[2J:1"],
)
def test_what_is_no_session_is_refused_before_the_engine_sees_it(sides, said):
    with pytest.raises(ValueError, match="session"):
        sides.engine.submit(sides.plan(1)[0], engines.Peer(said, sides.peer.layout))
    if isinstance(said, str):
        with pytest.raises(ValueError, match="session"):
            sides.engine.submit(sides.plan(1)[0], said)
    with pytest.raises(TypeError, match=r"must be a Layout, not a dict; see Layout\.from_dict"):
        engines.Peer(sides.peer.session, sides.peer.layout.to_dict())
    assert sides.engine.sizes == []


@pytest.mark.parametrize("said", ["127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536", "127.0.0.1:99999999999", "a:b", ":1"])
def test_mooncake_sessions_are_hosts_with_ports(said):
    engine = object.__new__(engines.MooncakeEngine)
    with pytest.raises(ValueError, match="host:port"):
        engine._check_session(said)
    for right in ("127.0.0.1:1", "[fe80::1%eth0]:65535", "decode-3.cluster_a:17000"):
        engine._check_session(right)


def test_a_peer_may_declare_all_memory_there_is(sides):
    """2**64 bytes, one more than a size can say, in one region or in two that overlap."""
    half = 1 << 63
    for regions in (
        [Region("kv", 0, 0, 1 << 62, 4)],
        [Region("kv", 0, 0, half - 1, 2), Region("kv", 1, half, half - 1, 1), Region("kv", 2, (1 << 64) - 4, 4, 1)],
    ):
        peer = engines.Peer(sides.peer.session, Layout(regions, page_size=1))
        src = sides.layout.by_key["kv", 0]
        with pytest.raises(PlanError, match="source 0x0, 64 bytes of DRAM"):
            sides.engine.submit(table_plan((0, 1 << 40, 64)), peer)
        with pytest.raises(PlanError, match="destination 0xfffffffffffffffe, 64 bytes"):
            sides.engine.submit(table_plan((src.base, (1 << 64) - 2, 64)), peer)
    assert sides.engine.sizes == []


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


# ---- what is refused


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
        (table_plan((src.base, dst.base, 64), dst=Memory("DRAM", 1)), "destination .* 64 bytes of DRAM:1"),
        (Plan(table_plan((src.base, dst.base, 64)).table, []), "segments end at descriptor 0 of 1"),
    ]
    for plan, message in cases:
        with pytest.raises(PlanError, match=message):
            sides.engine.submit(plan, sides.peer)
        back = [Segment(part.dst_memory, part.src_memory, part.start, part.stop) for part in plan.segments]
        with pytest.raises(PlanError, match=SWAP.sub(lambda word: SWAPPED[word[0]], message)):
            sides.engine.submit(Plan(plan.table[[1, 0, 2]], back), sides.peer, op="read")
    for wrong in ({"op": "copy"}, {"notify": b""}, {"notify": b"x" * 1025}, {"notify": "text"}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}|notice"):
            sides.engine.submit(sides.plan(1)[0], sides.peer, **wrong)
    assert sides.engine.sizes == []
    assert (sides.dst == GUARD).all()


def test_what_no_engine_can_take_is_not_registered(sides):
    for region, message in (
        (Region("part", 0, sides.src.ctypes.data + 64, 64, 1), "overlaps a part"),
        (Region("huge", 0, 0, 1 << 62, 3), "2\\*\\*63 or more"),
    ):
        with pytest.raises(LayoutError, match=message):
            sides.engine.register(Layout([region], page_size=16))


@pytest.mark.parametrize("kind", KINDS)
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


def test_read_pulls_pages_from_the_peer(sides):
    """Here the decode side's pages are the source: as when a decode process pulls from its prefill peer."""
    sides.dst[:] = np.random.default_rng(8).integers(1, 200, len(sides.dst), dtype=np.uint8)
    mine = np.full(2 * PAGE * PAGES, GUARD, dtype=np.uint8)
    layout = layout_of(
        [
            {"name": n, "layer": 0, "base": i * PAGE * PAGES, "page_bytes": PAGE, "num_pages": PAGES}
            for i, n in enumerate(("kv", "gappy"))
        ],
        mine,
    )
    sides.engine.register(layout)
    try:
        host, device = (np.random.default_rng(seed).permutation(PAGES)[:300] for seed in (1, 2))
        due = np.random.default_rng(3).permutation(PAGES)[:300]
        plans = [
            pair(Layout([sides.peer.layout.by_key[name, 0]], page_size=16), layout, allow_unsent=()).plan(pages, due)
            for name, pages in (("kv", host), ("gappy", device))
        ]
        for plan in plans:
            sides.engine.submit(plan, sides.peer, op="read").wait(20)
        wanted = np.full((2, PAGES, PAGE), GUARD, dtype=np.uint8)
        gappy, kv = (sides.dst[f["base"] :] for f in DST_FIELDS)
        wanted[0, due] = kv[: PAGE * PAGES].reshape(PAGES, PAGE)[host]
        stride = DST_FIELDS[0]["page_stride"]
        wanted[1, due] = gappy[: stride * PAGES].reshape(PAGES, stride)[device, :PAGE]
        np.testing.assert_array_equal(mine.reshape(2, PAGES, PAGE), wanted)
    finally:
        sides.engine.unregister(layout)


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_peer_is_told_once_all_has_arrived(sides):
    plan, wanted = sides.plan(500)
    if not sides.engine._notifies:
        with pytest.raises(ValueError, match="channel of your own"):
            sides.engine.submit(plan, sides.peer, notify=b"request 7")
        with pytest.raises(ValueError, match="channel of your own"):
            sides.engine.wait_notice(b"request 7", 0)
        return
    transfer = sides.engine.submit(plan, sides.peer, notify=b"request 7")
    sides.engine.submit(sides.plan(0)[0], sides.peer, notify=b"request 8").wait(20)  # nothing to send is told as well
    for notice in (b"request 7", b"request 8"):
        sides.tell(f"notice {notice.decode()}")
    np.testing.assert_array_equal(sides.dst, wanted)
    transfer.wait(20)
    with pytest.raises(TimeoutError, match="request 9"):
        sides.engine.wait_notice(b"request 9", 0.01)
    with sides.engine.held():  # one that is given up is not announced, though it arrives
        given_up = sides.engine.submit(plan, sides.peer, notify=b"request 9")
        given_up.cancel()
    assert given_up.settle(20) and given_up.arrived == len(plan)
    with pytest.raises(TransferError, match="cancelled"):
        given_up.wait(0)


# ---- what is cancelled, and what fails


def test_a_transfer_that_was_waited_for_too_briefly_goes_on(sides):
    plan, wanted = sides.plan(100)
    with sides.engine.held():
        first = sides.engine.submit(plan, sides.peer)
        with pytest.raises(TransferTimeout, match=r"not done within 0\.05 s.*may have arrived.*goes on") as caught:
            first.wait(0.05)
        assert isinstance(caught.value, TimeoutError)
        assert caught.value.settled is False and caught.value.failed == range(len(plan))
        assert not first.done() and first.settle(0.05) is False
        assert "still at work" in first.unsettled
        with pytest.raises(RuntimeError, match="under way"):
            sides.engine.unregister(sides.layout)
    first.wait(20)
    assert first.settle(0) is True and first.done() and first.unsettled is None
    np.testing.assert_array_equal(sides.dst, wanted)


def test_a_cancelled_transfer_is_unsettled_until_its_call_has_ended(sides):
    plan, wanted = sides.plan(100)
    with sides.engine.held():
        first = sides.engine.submit(plan, sides.peer, label="request 5")
        until(lambda: sides.engine.sizes)
        first.cancel()
        message = "transfer 'request 5' of 200.*it was cancelled.*may have arrived.*Neither reuse"
        with pytest.raises(TransferError, match=message) as caught:
            first.wait(0)
        assert caught.value.settled is False and caught.value.failed == range(len(plan))
        assert first.done() and not first.settled and first.settle(0.05) is False
        assert "still at work" in first.unsettled
        assert sides.engine.stats().unsettled == 1
        with pytest.raises(RuntimeError, match="under way"):
            sides.engine.unregister(sides.layout)
        with pytest.raises(PlanError, match="conflicts with the transfer 'request 5'.*cancelled and is not settled"):
            sides.engine.submit(plan, sides.peer)
    assert first.settle(20) is True and first.unsettled is None and first.arrived == len(plan)
    assert sides.engine.stats().unsettled == 0
    np.testing.assert_array_equal(sides.dst, wanted)
    sides.engine.submit(plan, sides.peer).wait(20)


def test_cancel_before_anything_was_sent_settles_at_once(sides):
    plan, _ = sides.plan(10)
    with sides.engine.held():
        running = [sides.engine.submit(plan, sides.peer) for _ in range(2)]  # all the calls that a peer gets at once
        queued = sides.engine.submit(plan, sides.peer)
        queued.cancel()
        assert queued.done() and queued.settle(0) is True
        with pytest.raises(
            TransferError, match="it was cancelled; descriptors none arrived, 0 to 19 were never"
        ) as caught:
            queued.wait(0)
        assert caught.value.settled is True and caught.value.failed is None
        assert not isinstance(caught.value, TransferTimeout)
    for transfer in running:
        transfer.wait(20)
        transfer.cancel()  # too late to matter
        transfer.wait(0)
    assert sides.engine.sizes == [20, 20]


def test_unregistered_destination_is_a_transfer_error(sides):
    kind = sides.engine.__class__.__mro__[2]
    plan, given_up = sides.plan(20, stop=2000)
    sides.tell("unregister")
    try:
        transfer = sides.engine.submit(plan, sides.peer)
        with pytest.raises(TransferError) as caught:
            transfer.wait(20)
        assert (sides.dst == GUARD).all()
        settled = transfer.settle(0.3)
    finally:
        sides.tell("register")
    error = caught.value
    assert not isinstance(error, TransferTimeout)
    assert error.peer == transfer.peer and error.failed == range(len(plan))
    surely = kind is engines.LocalEngine or (kind is engines.NixlEngine and "never sent" in str(error))
    assert error.settled is surely
    if kind is engines.MooncakeEngine:
        # What it had queued may be sent now, since the peer takes it again. That this is over shows in a later arrival:
        # a fence behind it, which the peer takes at any time.
        assert (
            settled or "not received the fence" in transfer.unsettled or "does not arrive either" in transfer.unsettled
        )
        assert transfer.settle(20) is True
        after = sides.dst.copy()
        assert ((after == GUARD) | (after == given_up)).all()
        time.sleep(0.5)
        np.testing.assert_array_equal(sides.dst, after)
        with pytest.raises(TransferError) as caught:
            transfer.wait(0)
        assert caught.value.settled is True
        sides.dst[:] = GUARD
    else:
        assert settled is surely
    later, wanted = sides.plan(20, seed=1)  # the path still works, with what the peer declares now
    sides.engine.submit(later, sides.peer).wait(20)
    np.testing.assert_array_equal(sides.dst, wanted)


def test_layouts_share_whole_spans_or_none(sides):
    sides.engine.register(sides.layout)
    sides.engine.unregister(sides.layout)
    part = Layout([Region("part", 0, sides.src.ctypes.data + 64, 64, 1)], page_size=16)
    with pytest.raises(ValueError, match="is not registered"):
        sides.engine.unregister(part)
    plan, wanted = sides.plan(3)
    sides.engine.submit(plan, sides.peer).wait(20)
    np.testing.assert_array_equal(sides.dst, wanted)
