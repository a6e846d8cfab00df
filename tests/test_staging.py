"""Packed transfers: the same bytes as direct ones, pieces in order, and slots that are used again only when settled."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from engine_peer import DST_FIELDS, GAP, GUARD, PAGE, PAGES, Together, make_engine
from hypothesis import given
from hypothesis import strategies as st
from stepped import Stepped, until
from strategies import clusters, profile
from test_properties import paired, planned
from test_settling import InOrder

from kvplan import Heads, Layout, Memory, Plan, PlanError, Region, Segment, TransferError, engines, pair
from kvplan.engines.outcome import Outcome

ROW = 8  # bytes
ROWS = PAGE // ROW


def rows_plan(sides, pages, *, start: int = 0, pull: bool = False) -> tuple[Plan, np.ndarray]:
    """Pages of "kv", row by row, to and from every second row of other memory: descriptors of 8 bytes.

    A push reads rows 0, 2, 4, ... of what is here, from row `start` on, and writes whole pages at the peer. A pull
    reads whole pages of the peer's, and writes every second row here. Returns the plan, and what must be there then.
    """
    pages = np.asarray(pages)
    here = sides.src.ctypes.data + 2 * ROW * (start + np.arange(len(pages) * ROWS))
    declared = next(region for region in sides.peer.layout.regions if region.name == "kv")
    there = (declared.base + pages[:, None] * PAGE + ROW * np.arange(ROWS)).reshape(-1)
    table = np.array([here, there] if not pull else [there, here], np.uint64)
    table = np.vstack([table, np.full(len(here), ROW, np.uint64)])
    layouts = (sides.layout, sides.peer.layout) if not pull else (sides.peer.layout, sides.layout)
    plan = Plan(torch.from_numpy(table.view(np.int64)), [Segment(Memory.DRAM, Memory.DRAM, 0, len(here))], *layouts)
    kv = slice(DST_FIELDS[1]["base"], DST_FIELDS[1]["base"] + PAGE * PAGES)
    rows = sides.src.reshape(-1, 2, ROW)[start : start + len(here), 0]
    if pull:
        wanted = sides.src.copy()
        rows = wanted.reshape(-1, 2, ROW)[start : start + len(here), 0]
        rows[:] = sides.dst[kv].reshape(PAGES, PAGE)[pages].reshape(-1, ROW)
    else:
        wanted = sides.dst.copy()
        wanted[kv].reshape(PAGES, PAGE)[pages] = rows.reshape(-1, PAGE)
    return plan, wanted


@pytest.fixture
def stepped():
    sides = Together("local")
    sides.engine.close()
    sides.engine = Stepped()
    sides.engine.register(sides.layout)
    yield sides
    sides.engine.let_go()
    sides.close()


@pytest.fixture
def in_order():
    sides = Together("local")
    sides.engine.close()
    sides.engine = InOrder()
    sides.engine.register(sides.layout)
    yield sides
    sides.engine.may.set()
    sides.close()


# ---- the arena


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"nbytes": 0}, "nbytes is 0"),
        ({"nbytes": -(1 << 20)}, "nbytes is -1048576"),
        ({"nbytes": 1 << 63}, "nbytes is 9223372036854775808"),
        ({"nbytes": True}, "nbytes is True"),
        ({"nbytes": 4096.0}, "nbytes is 4096.0"),
        ({"nbytes": 1 << 20, "piece": 0}, "piece is 0"),
        ({"nbytes": 1 << 20}, "multiple of piece, 16777216"),
        ({"nbytes": 100, "piece": 33}, "nbytes is 100; it must be a multiple of piece, 33"),
        ({"nbytes": 4096, "piece": 4096, "memory": "hbm"}, "memory is 'hbm'"),
        ({"nbytes": 4096, "piece": 4096, "memory": Memory("DRAM", 1)}, "memory is "),
    ],
)
def test_bad_sizes_are_refused_in_words(arguments, said):
    with pytest.raises(ValueError, match=said):
        engines.Staging(**arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
@pytest.mark.parametrize(("memory", "said"), [("pinned", "torch sees none"), (Memory.VRAM(3), "torch sees 0 GPUs")])
def test_memory_that_is_not_here_is_refused_in_words(memory, said):
    with pytest.raises(RuntimeError, match=said):
        engines.Staging(1 << 16, 1 << 16, memory)


def test_staging_belongs_to_one_engine_which_registers_it_once():
    with engines.LocalEngine() as engine, engines.LocalEngine() as other, engines.LocalEngine() as target:
        memory = np.zeros(8192, np.uint8)
        src, dst = (Layout([Region("kv", 0, memory.ctypes.data + at, 64, 64)], page_size=1) for at in (0, 4096))
        for one in (engine, other):
            one.register(src)
        target.register(dst)
        plan = pair(src, dst).plan([0, 2, 5], [1, 0, 7])
        staging = engines.Staging(4096, 1024)
        engine.submit(plan, engines.Peer(target.session, dst), staging=staging, pack="never").wait(20)
        assert staging.layout not in engine._spans.layouts
        for _ in range(3):
            engine.submit(plan, engines.Peer(target.session, dst), staging=staging, pack="always").wait(20)
        assert [layout for layout in engine._spans.layouts].count(staging.layout) == 1
        with pytest.raises(ValueError, match="belongs to another engine"):
            other.submit(plan, engines.Peer(target.session, dst), staging=staging, pack="always")
        assert staging.free == staging.slots == 4


def test_arguments_of_submit_are_refused_in_words(stepped):
    plan, _ = rows_plan(stepped, [1])
    staging = engines.Staging(4096, 1024)
    with pytest.raises(ValueError, match="pack must be 'auto', 'never' or 'always', not 'yes'"):
        stepped.engine.submit(plan, stepped.peer, staging=staging, pack="yes")
    with pytest.raises(ValueError, match="pack='always' needs staging"):
        stepped.engine.submit(plan, stepped.peer, pack="always")
    with pytest.raises(TypeError, match="staging must be a Staging, not a int"):
        stepped.engine.submit(plan, stepped.peer, staging=4096)
    vram = Plan(plan.table, [Segment(Memory.VRAM(0), Memory.DRAM, 0, len(plan))], *[plan.src_layout, plan.dst_layout])
    with pytest.raises(PlanError):  # checked as every plan
        stepped.engine.submit(vram, stepped.peer, staging=staging, pack="always")


def test_pages_of_a_gpu_do_not_go_by_way_of_pageable_staging():
    memory = np.zeros(8192, np.uint8)
    src = Layout([Region("kv", 0, memory.ctypes.data, 64, 64, memory=Memory.VRAM(0))], page_size=1)
    dst = Layout([Region("kv", 0, memory.ctypes.data + 4096, 64, 64)], page_size=1)
    with engines.LocalEngine() as engine, engines.LocalEngine() as target:
        engine.register(src)
        target.register(dst)
        plan = pair(src, dst).plan([0, 2, 5], [1, 0, 7])
        with pytest.raises(ValueError, match=r"pages of VRAM:0 cannot go by way of staging in DRAM: .*'pinned'"):
            engine.submit(plan, engines.Peer(target.session, dst), staging=engines.Staging(4096, 1024), pack="always")


# ---- the same bytes


GUARDS = 64


def moved_in(layout: Layout) -> tuple[Layout, list[np.ndarray]]:
    """A layout of the same form over memory that is really there, each span between guard bytes."""
    regions, buffers = list(layout.regions), []
    for memory, base, nbytes in layout.memory_spans():
        buffer = np.full(nbytes + 2 * GUARDS, GUARD, np.uint8)
        buffers.append(buffer)
        shift = buffer.ctypes.data + GUARDS - base
        for k, region in enumerate(layout.regions):
            if region.memory == memory and base <= region.base < base + nbytes:
                allocation = region.allocation and (region.allocation[0] + shift, region.allocation[1])
                there = Memory("DRAM", memory.device + (memory.kind == "VRAM"))  # stands for a GPU
                regions[k] = dataclasses.replace(region, base=region.base + shift, allocation=allocation, memory=there)
    return Layout(regions, page_size=layout.page_size, replica=layout.replica), buffers


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "any"])
def test_random_plans_arrive_packed_as_they_do_directly(plain, op):
    @profile(40)
    @given(clusters(plain), st.sampled_from([1 << 16, 4096, 300, 37]), st.integers(1, 3), st.integers(0, 1 << 32))
    def check(cluster, piece, slots, seed):
        rng = np.random.default_rng(seed)
        for made_up_src, made_up_dst in list(cluster.pairs())[:2]:
            (src, sources), (dst, targets) = moved_in(made_up_src), moved_in(made_up_dst)
            for buffer in sources:
                buffer[:] = rng.integers(1, 200, len(buffer))
            plan = planned(cluster, paired(cluster, src, dst))
            if plan.total_bytes > 200 * piece:
                piece = 1 << 16
            with engines.LocalEngine() as ours, engines.LocalEngine() as theirs:
                ours.register(src if op == "write" else dst)
                theirs.register(dst if op == "write" else src)
                peer = engines.Peer(theirs.session, dst if op == "write" else src)
                ours.submit(plan, peer, op=op).wait(20)
                direct = [buffer.copy() for buffer in targets]
                for buffer in targets:
                    buffer[:] = GUARD
                staging = engines.Staging(slots * piece, piece)
                transfer = ours.submit(plan, peer, op=op, staging=staging, pack="always")
                transfer.wait(20)
                assert transfer.arrived == len(plan) and transfer.settled and staging.free == slots
                stats = ours.stats()
                assert (stats.descriptors, stats.bytes) == (2 * len(plan), 2 * plan.total_bytes)
            for found, wanted in zip(targets, direct, strict=True):
                np.testing.assert_array_equal(found, wanted)

    check()


def heads_layout(memory: np.ndarray, heads: Heads, layers: int, pages: int, tokens: int = 16, head: int = 8) -> Layout:
    size = (heads.stop - heads.start) * head
    regions = [
        Region(name, layer, memory.ctypes.data + (2 * layer + k) * pages * tokens * size, tokens * size, pages,
               row_bytes=size, heads=heads)
        for layer in range(layers)
        for k, name in enumerate("kv")
    ]  # fmt: skip
    return Layout(regions, page_size=tokens)


def test_layers_are_packed_as_whole_plans_are():
    """TP 4 to 8, as prefill sends it: some layers at a time, each in few descriptors."""
    layers, pages = 6, 12
    source = np.random.default_rng(1).integers(1, 200, 2 * layers * pages * 16 * 64).astype(np.uint8)
    whole, parts = (np.full(source.size // 2, GUARD, np.uint8) for _ in range(2))
    src = heads_layout(source, Heads(0, 8, 32), layers, pages)
    ids, theirs = np.random.default_rng(2).permutation(pages), np.arange(pages)
    with engines.LocalEngine() as engine:
        engine.register(src)
        staging = engines.Staging(1 << 14, 1 << 12)
        for memory, steps in ((whole, [range(layers)]), (parts, [range(0, 2), range(2, 3), range(3, 6)])):
            with engines.LocalEngine() as target:
                dst = heads_layout(memory, Heads(4, 8, 32), layers, pages)
                target.register(dst)
                pairing = pair(src, dst)
                group = engines.TransferGroup(
                    engine.submit(
                        pairing.layers(some).plan(ids, theirs),
                        engines.Peer(target.session, dst),
                        staging=staging,
                        pack="always",
                    )
                    for some in steps
                )
                group.wait(20)
                for some, transfer in zip(steps, group.transfers, strict=True):
                    assert transfer.descriptors == 2 * len(some) * pages * 16  # a row each
    assert (whole == parts).all() and (whole != GUARD).all()
    assert staging.free == 4


@pytest.mark.parametrize(("op", "merges"), [("read", True), ("write", False)])
def test_two_prefill_ranks_to_one_decode_rank(op, merges):
    """1,024 tokens of half the heads, 16 regions (sglang#19890): few descriptors for a pull, which finds them whole."""
    layers, pages, tokens, head = 8, 16, 64, 256
    source = np.random.default_rng(1).integers(1, 200, 2 * layers * pages * tokens * 4 * head).astype(np.uint8)
    memory = np.full(2 * source.size, GUARD, np.uint8)
    src = heads_layout(source, Heads(0, 4, 8), layers, pages, tokens, head)
    dst = heads_layout(memory, Heads(0, 8, 8), layers, pages, tokens, head)
    ids = np.random.default_rng(3).permutation(pages)
    plan = pair(src, dst).plan(ids, ids[::-1].copy())
    assert len(plan) == 16_384 and set(plan.nbytes.tolist()) == {1024}
    ours, theirs = (src, dst) if op == "write" else (dst, src)
    with make_engine("local") as engine, make_engine("local") as target:
        engine.register(ours)
        target.register(theirs)
        engine.cost = engines.COSTS["mooncake", "tcp"]
        staging = engines.Staging(2 << 20, 1 << 20)
        engine.submit(plan, engines.Peer(target.session, theirs), op=op, staging=staging).wait(30)
        # A page's rows lie together in the source, so a pull reads whole pages. In the destination none touch.
        assert sum(engine.sizes) == (2 * layers * pages if merges else len(plan))
    due = memory.reshape(2 * layers, pages, tokens, 8, head)
    sent = source.reshape(2 * layers, pages, tokens, 4, head)
    np.testing.assert_array_equal(due[:, ids[::-1], :, :4], sent[:, ids])
    assert (due[:, :, :, 4:] == GUARD).all()


# ---- pieces in order, and what is said of them


def test_the_engine_is_given_merged_descriptors_within_its_limit(stepped):
    engine = stepped.engine
    engine.let_go()
    given = []
    move = engine._move
    engine._move = lambda session, chunk, op: (given.append(chunk.table.clone()), move(session, chunk, op))[1]
    pages = np.arange(0, 64, 2)  # none next to another
    plan, wanted = rows_plan(stepped, pages)
    staging = engines.Staging(4 * 1024, 1024)
    transfer = engine.submit(plan, stepped.peer, staging=staging, pack="always")
    transfer.wait(20)
    np.testing.assert_array_equal(stepped.dst, wanted)
    assert engine.max_in_flight == 10
    assert [table.shape[1] for table in given] == [5, 5, 5, 1, 5, 5, 5, 1]  # 16 pages a piece, half the limit a call
    assert all((table[2] == PAGE).all() for table in given)
    sources = torch.cat([table[0] for table in given]) - given[0][0, 0]
    assert len(plan) == 256 and int(sources.abs().max()) < staging.nbytes


def test_progress_counts_the_callers_descriptors(stepped):
    engine = stepped.engine
    engine.max_in_flight = 1000
    plan, wanted = rows_plan(stepped, range(40))  # 2,560 bytes: pieces of 1,024, 1,024 and 512
    staging = engines.Staging(2 * 1024, 1024)
    transfer = engine.submit(plan, stepped.peer, staging=staging, pack="always")
    until(lambda: transfer.state == "moving" and staging.free == 0)  # the second piece is gathered meanwhile
    assert transfer.arrived == 0
    engine.step()
    until(lambda: transfer.arrived == 128)
    assert engine.stats().descriptors == 128 and engine.stats().bytes == 1024
    engine.step(7)
    error = transfer.exception(20)
    assert (error.code, error.failed) == (7, range(128, 320)) and transfer.settle(10)
    assert "descriptors 0 to 127 arrived, 128 to 255 may have arrived, whole or in part, 256 to 319" in str(error)
    last = plan.table[:2, 128].tolist()
    assert f"goes from region kv layer 0, DRAM {last[0]:#x} to region kv layer 0, DRAM {last[1]:#x}" in str(error)
    kv = stepped.dst[DST_FIELDS[1]["base"] :][: PAGE * PAGES]
    np.testing.assert_array_equal(kv[:1024], wanted[DST_FIELDS[1]["base"] :][:1024])
    assert (kv[1024:] == GUARD).all() and (stepped.dst[: DST_FIELDS[1]["base"]] == GUARD).all()
    until(lambda: staging.free == 2)


def test_a_descriptor_larger_than_a_piece_arrives_when_its_last_piece_has(stepped):
    engine = stepped.engine
    kv = DST_FIELDS[1]["base"]
    size = 2500
    table = torch.tensor([[stepped.src.ctypes.data], [stepped.peer.layout.regions[1].base], [size]], dtype=torch.int64)
    plan = Plan(table, [Segment(Memory.DRAM, Memory.DRAM, 0, 1)], stepped.layout, stepped.peer.layout)
    staging = engines.Staging(2 * 1000, 1000)
    transfer = engine.submit(plan, stepped.peer, staging=staging, pack="always")
    for arrived in (1000, 2000):
        engine.step()
        until(lambda upto=arrived: (stepped.dst[kv : kv + upto] == stepped.src[:upto]).all())
        assert transfer.arrived == 0 and not transfer.done()
    engine.step()
    transfer.wait(20)
    assert transfer.arrived == 1 and engine.stats().bytes == size
    assert (stepped.dst[kv : kv + size] == stepped.src[:size]).all() and (stepped.dst[kv + size :] == GUARD).all()


def test_a_read_has_arrived_when_it_is_scattered_and_leaves_the_rest_alone():
    sides = Together("local")
    sides.dst[:] = np.random.default_rng(3).integers(1, 200, sides.dst.size)
    plan, wanted = rows_plan(sides, np.random.default_rng(4).permutation(PAGES)[:200], start=32, pull=True)
    staging = engines.Staging(3 * 1024, 1024)
    scattered = []
    transfer = sides.engine.submit(plan, sides.peer, op="read", staging=staging, pack="always")
    transfer.add_done_callback(lambda t: scattered.append((sides.src == wanted).all()))
    transfer.wait(20)
    np.testing.assert_array_equal(sides.src, wanted)
    until(lambda: scattered == [True])
    sides.close()


def test_a_notice_is_sent_once_behind_the_last_piece(stepped):
    stepped.engine.let_go()
    plan, wanted = rows_plan(stepped, range(100))
    staging = engines.Staging(2 * 1024, 1024)
    stepped.engine.submit(plan, stepped.peer, staging=staging, pack="always", notify=b"r7").wait(20)
    stepped.target.wait_notice(b"r7", 5)
    np.testing.assert_array_equal(stepped.dst, wanted)
    with pytest.raises(TimeoutError):
        stepped.target.wait_notice(b"r7", 0.05)


def test_parts_of_a_plan_that_go_straight_keep_their_place():
    """Rows, one large descriptor, rows: in plan order, and `arrived` is about all of them."""
    sides = Together("local")
    rows, wanted = rows_plan(sides, range(64), start=0)
    large = torch.tensor([[sides.src.ctypes.data], [sides.peer.layout.regions[1].base + 64 * PAGE], [PAGE * 2000]])
    table = torch.cat([rows.table, large, rows.table], dim=1)
    table[1, -len(rows) :] += 3000 * PAGE
    plan = Plan(table, [Segment(Memory.DRAM, Memory.DRAM, 0, table.shape[1])], rows.src_layout, rows.dst_layout)
    kv = wanted[DST_FIELDS[1]["base"] :]
    kv[64 * PAGE : 2064 * PAGE] = sides.src[: 2000 * PAGE]
    kv[3000 * PAGE : 3064 * PAGE] = kv[: 64 * PAGE]
    sides.engine.cost = engines.Cost(1e-3, 1e6, fixed=1e-5)  # a descriptor is as dear as 1,000 bytes
    given = sides.engine.sizes
    staging = engines.Staging(4 * 1024, 1024)
    transfer = sides.engine.submit(plan, sides.peer, staging=staging)
    transfer.wait(20)
    np.testing.assert_array_equal(sides.dst, wanted)
    assert given == [1, 1, 1, 1, 1, 1, 1, 1, 1]  # four pieces, the large one, four pieces
    assert transfer.arrived == len(plan)
    sides.close()


# ---- slots


def test_a_slot_is_not_used_again_before_its_transfer_has_settled(in_order):
    engine = in_order.engine
    first, _ = rows_plan(in_order, range(10))
    second, _ = rows_plan(in_order, range(100, 110), start=200)
    staging = engines.Staging(1024, 1024)  # one slot
    engine.fail = True
    failed = engine.submit(first, in_order.peer, staging=staging, pack="always")
    with pytest.raises(TransferError) as caught:
        failed.wait(20)
    assert not caught.value.settled and not failed.settled and staging.free == 0
    engine.fail = False
    engine.may.clear()
    waits = engine.submit(second, in_order.peer, staging=staging, pack="always")
    assert waits.state == "queued" and staging.free == 0
    with pytest.raises(PlanError, match="is not settled"):  # its pages are in use as those of a direct one are
        engine.submit(first, in_order.peer)
    engine.may.set()
    assert failed.settle(20)  # by a fence: what was left in the queue is written now, from the slot as it was
    waits.wait(20)
    kv = in_order.dst[DST_FIELDS[1]["base"] :][: PAGE * PAGES].reshape(PAGES, PAGE)
    rows = in_order.src.reshape(-1, 2, ROW)[:, 0]
    np.testing.assert_array_equal(kv[:10].reshape(-1, ROW), rows[: 10 * ROWS])
    np.testing.assert_array_equal(kv[100:110].reshape(-1, ROW), rows[200 : 200 + 10 * ROWS])
    assert (kv[10:100] == GUARD).all() and (kv[110:] == GUARD).all() and staging.free == 1


def test_what_waits_for_a_slot_has_its_holder_settled(in_order):
    """Nobody else asks. Plans of many pieces to the same peer wait, and yet a fence to it comes through."""
    engine = in_order.engine
    first, _ = rows_plan(in_order, range(10))
    staging = engines.Staging(1024, 1024)  # one slot
    engine.fail = True
    failed = engine.submit(first, in_order.peer, staging=staging, pack="always")
    assert failed.exception(20) is not None and staging.free == 0
    later = [
        engine.submit(
            rows_plan(in_order, range(100 * k, 100 * k + 90))[0], in_order.peer, staging=staging, pack="always"
        )
        for k in range(1, 5)
    ]
    engine.fail = False
    for transfer in later:
        transfer.wait(30)
    assert failed.settled and staging.free == 1
    kv = in_order.dst[DST_FIELDS[1]["base"] :][: PAGE * PAGES].reshape(PAGES, PAGE)
    rows = in_order.src.reshape(-1, 2, ROW)[:, 0]
    for k in range(1, 5):
        np.testing.assert_array_equal(kv[100 * k : 100 * k + 90].reshape(-1, ROW), rows[: 90 * ROWS])


def test_the_end_of_a_peer_frees_its_slots(in_order):
    engine = in_order.engine
    plan, _ = rows_plan(in_order, range(10))
    staging = engines.Staging(2048, 1024)
    engine.fail = True
    failed = engine.submit(plan, in_order.peer, staging=staging, pack="always")
    assert failed.exception(20) is not None and staging.free == 1
    engine.peer_ended(in_order.peer.session)
    assert failed.settled and staging.free == 2


def test_what_was_surely_not_taken_frees_its_slot_at_once(in_order):
    engine = in_order.engine
    plan, _ = rows_plan(in_order, range(40))
    staging = engines.Staging(2048, 1024)
    engine._move = lambda *_: Outcome("no connection", started=False)
    failed = engine.submit(plan, in_order.peer, staging=staging, pack="always")
    error = failed.exception(20)
    until(lambda: staging.free == 2)
    assert error.failed == range(320) and "0 to 319 were never sent" in str(error) and failed.settle(5)


@pytest.mark.parametrize("op", ["write", "read"])
def test_transfers_that_wait_for_a_slot_can_be_cancelled_and_go_on_in_order(stepped, op):
    engine = stepped.engine
    engine.max_in_flight = 1000
    staging = engines.Staging(1024, 1024)
    plans = [rows_plan(stepped, range(20 * k, 20 * k + 20), start=400 * k, pull=op == "read")[0] for k in range(4)]
    transfers = [engine.submit(plan, stepped.peer, op=op, staging=staging, pack="always") for plan in plans]
    until(lambda: staging.free == 0)
    with pytest.raises(TimeoutError):
        transfers[1].wait(0.05)
    assert transfers[1].cancel() and transfers[1].settle(5) and transfers[1].arrived == 0
    assert transfers[3].cancel() and transfers[3].settle(5)
    engine.let_go()
    for transfer in (transfers[0], transfers[2]):
        transfer.wait(20)
    kv = stepped.dst[DST_FIELDS[1]["base"] :][: PAGE * PAGES].reshape(PAGES, PAGE)
    if op == "write":
        for number, sent in enumerate([True, False, True, False]):
            assert (kv[20 * number : 20 * number + 20] != GUARD).all() == sent
    assert staging.free == 1 and engine.stats().cancelled == 2


def test_cancelling_between_pieces_settles_and_frees_all_slots(stepped):
    engine = stepped.engine
    engine.max_in_flight = 1000
    plan, wanted = rows_plan(stepped, range(100))
    staging = engines.Staging(2 * 1024, 1024)
    transfer = engine.submit(plan, stepped.peer, staging=staging, pack="always")
    engine.step()
    until(lambda: transfer._sent == 256)
    assert transfer.arrived == 128 and transfer.cancel() and not transfer.settled
    engine.let_go()
    assert transfer.settle(10) and staging.free == 2
    kv = DST_FIELDS[1]["base"]
    assert transfer.arrived == 256  # what was with the engine goes on
    np.testing.assert_array_equal(stepped.dst[: kv + 2048], wanted[: kv + 2048])
    assert (stepped.dst[kv + 2048 :] == GUARD).all()


def test_close_ends_what_waits_for_a_slot(stepped):
    engine = stepped.engine
    staging = engines.Staging(1024, 1024)
    plans = [rows_plan(stepped, range(20 * k, 20 * k + 20))[0] for k in range(2)]
    first, second = (engine.submit(plan, stepped.peer, staging=staging, pack="always") for plan in plans)
    until(lambda: first._sent and staging.free == 0)
    closing = threading.Thread(target=lambda: engine.close(20))
    closing.start()
    assert "closed before it began" in str(second.exception(10))
    engine.let_go()
    closing.join(20)
    assert not closing.is_alive() and staging.free == 1
    first.wait(0)


def test_close_with_a_limit_stops_between_pieces(stepped):
    engine = stepped.engine
    engine.max_in_flight = 1000
    staging = engines.Staging(1024, 1024)
    plan, _ = rows_plan(stepped, range(100))
    transfer = engine.submit(plan, stepped.peer, staging=staging, pack="always")
    until(lambda: transfer._sent)
    with pytest.raises(TimeoutError):
        engine.close(0.1)
    engine.step()
    assert "closed before it was done" in str(transfer.exception(10))
    engine.close(20)
    assert staging.free == 1 and transfer.arrived in (0, 128) and transfer.settled


def test_many_threads_share_an_arena():
    """Eight threads, four slots, plans of one to six pieces, some cancelled: every byte of those that arrived."""
    sides = Together("local")
    staging = engines.Staging(4 * 512, 512)
    wrong: list[object] = []
    rows = sides.src.reshape(-1, 2, ROW)[:, 0]
    kv = sides.dst[DST_FIELDS[1]["base"] :][: PAGE * PAGES].reshape(PAGES, PAGE)

    def work(number: int) -> None:
        rng = np.random.default_rng(number)
        own = number * (PAGES // 8) + rng.permutation(PAGES // 8)
        for turn in range(6):
            pages = own[turn * 48 : turn * 48 + int(rng.integers(1, 48))]
            start = int(rng.integers(0, 8000))
            plan, _ = rows_plan(sides, pages, start=start)
            transfer = sides.engine.submit(plan, sides.peer, staging=staging, pack="always")
            if turn % 3 == 2:
                transfer.cancel()
            if transfer.exception(30) is None:
                if not (kv[pages].reshape(-1, ROW) == rows[start : start + len(pages) * ROWS]).all():
                    wrong.append(pages)
            elif not transfer.settle(30):
                wrong.append(transfer)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not wrong
    until(lambda: staging.free == 4)
    assert (sides.dst[: (PAGE + GAP) * PAGES] == GUARD).all()
    sides.close()
