"""Packing: copies and merged descriptors together do what the plan says, and nothing else."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pack_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import request_of
from strategies import Cluster, clusters, profile

import kvplan
from kvplan import Heads, Interleave, Layout, Memory, Plan, PlanError, Region, Request, Segment, ops
from kvplan.ops import packing
from kvplan.planning.packed import Packed, pack

BOTH = pytest.mark.parametrize("op", ["write", "read"])
BACKENDS = pytest.mark.parametrize("call", [ops.pack, packing.pack], ids=["op", "torch"])
PIECES = st.sampled_from([1, 2, 3, 7, 16, 64, 1 << 20])


def rows_of(plan: Plan) -> list[oracle.Row]:
    return oracle.unsigned(plan.table)


def expected(plan: Plan, op: str, piece: int, edges: Sequence[int]) -> tuple[Any, ...]:
    cuts = [0, *(segment.stop for segment in plan.segments)]
    return oracle.pack(rows_of(plan), cuts, op == "read", piece, edges)


def tables(packed: Packed) -> tuple[list[oracle.Row], list[oracle.Row], list[oracle.Row]]:
    return oracle.unsigned(packed.copies), oracle.unsigned(packed.merged), oracle.unsigned(packed.pieces)


def check(plan: Plan, op: str, piece: int) -> Packed:
    """That `plan.packed` is what the oracle says, and moves the bytes that the plan moves."""
    packed = plan.packed(op, piece)
    remote = plan.src_layout if op == "read" else plan.dst_layout
    copies, merged, pieces, info = expected(plan, op, piece, [] if remote is None else list(remote.bases))
    assert tables(packed) == (copies, merged, pieces)
    kept = [(a, b) for a, b in itertools.pairwise(info[1:]) if b > a]
    assert [(s.start, s.stop) for s in packed.segments] == kept
    assert [(s.src_memory, s.dst_memory) for s in packed.segments] == [
        (s.src_memory, s.dst_memory) for s in plan.segments
    ]
    assert (packed.op, packed.piece, packed.descriptors, len(packed)) == (op, piece, len(plan), len(pieces) - 1)
    assert packed.total_bytes == plan.total_bytes
    memory = oracle.Bytes(rows_of(plan))
    assert memory.by_staging((copies, merged, pieces), op == "read", piece) == memory.direct(rows_of(plan))
    return packed


# ----------------------------------------------------------------------------------------------------- random plans


def plans(cluster: Cluster, batch: bool) -> Any:
    requests = [request_of(cluster)]
    if batch:
        empty = kvplan.Request({key: [] for key in cluster.src_pages}, {space: [] for space in cluster.dst_pages})
        requests = [empty, *requests, empty]
    for src, dst in cluster.pairs():
        yield kvplan.pair(src, dst, allow_unsent=cluster.unsent(src)).plan_batch(requests)


@given(clusters(), PIECES, st.booleans(), st.booleans())
@profile(200)
def test_any_plan(cluster: Cluster, piece: int, read: bool, batch: bool) -> None:
    for plan in plans(cluster, batch):
        check(plan, "read" if read else "write", piece)


END = 1 << 64
ADDRESSES = st.sampled_from([0, 1, 8, (1 << 63) - 8, 1 << 63, END - 40, END - 8, END - 1])


@st.composite
def any_tables(draw: st.DrawFn) -> tuple[list[oracle.Row], list[int], int, list[int]]:
    """(rows, cuts, piece, edges) of a table that nobody planned: sizes of 0, ends of 2^64, neighbours and others."""
    piece = draw(PIECES)
    rows: list[oracle.Row] = []
    for _ in range(draw(st.integers(0, 12))):
        src, dst, nbytes = (
            draw(ADDRESSES),
            draw(ADDRESSES),
            draw(st.integers(0, 9) | st.sampled_from([piece, 3 * piece])),
        )
        if rows and draw(st.booleans()):
            src = (rows[-1][0] + rows[-1][2]) % END
        if rows and draw(st.booleans()):
            dst = (rows[-1][1] + rows[-1][2]) % END
        rows.append((src, dst, min(nbytes, 99)))
    ends = sorted(draw(st.lists(st.integers(0, len(rows)), max_size=3)))
    some = [address for row in rows for address in row[:2]]
    edges = draw(st.lists(st.sampled_from(some), unique=True)) if some else []
    return rows, [0, *ends, len(rows)], piece, sorted(edges)


def called(call: Any, rows: Sequence[oracle.Row], cuts: list[int], read: bool, piece: int, edges: Sequence[int]) -> Any:
    words = torch.from_numpy(np.array(edges, dtype=np.uint64).view(np.int64))
    *found, info = call(oracle.bits(rows), cuts, read, piece, words)
    assert all(t.dtype == torch.int64 and t.dim() == 2 and t.shape[0] == 3 and t.is_contiguous() for t in found)
    return *(oracle.unsigned(table) for table in found), info.tolist()


@BACKENDS
@given(any_tables(), st.booleans())
@profile(400)
def test_any_table(call: Any, table: tuple[list[oracle.Row], list[int], int, list[int]], read: bool) -> None:
    rows, cuts, piece, edges = table
    want = oracle.pack(rows, cuts, read, piece, edges)
    assert called(call, rows, cuts, read, piece, edges) == want


# ------------------------------------------------------------------------------------------ real memory, real copies


class Pools:
    """Memory of one side: a layout whose regions lie in one array, with guards between them."""

    GUARD = 96

    def __init__(self, regions: Sequence[dict[str, Any]], page_size: int, seed: int) -> None:
        spans = [fields["page_bytes"] * fields["num_pages"] for fields in regions]
        self.memory = np.random.default_rng(seed).integers(0, 256, sum(spans) + self.GUARD * (len(spans) + 1), np.uint8)
        made, at = [], self.GUARD
        for fields, span in zip(regions, spans, strict=True):
            made.append(Region(base=self.memory.ctypes.data + at, **fields))
            at += span + self.GUARD
        self.layout = Layout(made, page_size=page_size)


def heads(rank: int, of: int, **more: Any) -> list[dict[str, Any]]:
    """K and V of two layers: 8 heads of 16 bytes, 4 tokens a page, of which this rank of `of` holds its share."""
    share = 8 // of
    held = Heads(rank * share, (rank + 1) * share, 8)
    return [
        {"name": name, "layer": layer, "page_bytes": 4 * share * 16, "row_bytes": share * 16, "num_pages": 40,
         "heads": held, **more}
        for layer in range(2) for name in ("k", "v")
    ]  # fmt: skip


def rows(of: int, rank: int) -> list[dict[str, Any]]:
    """Two layers of rows of 24 bytes, of which rank `rank` of `of` holds every `of`-th."""
    share = Interleave(of, rank) if of > 1 else None
    return [{"name": "kv", "layer": layer, "page_bytes": 4 * 24, "row_bytes": 24, "num_pages": 40, "interleave": share}
            for layer in range(2)]  # fmt: skip


def two_kinds() -> list[dict[str, Any]]:
    return [{"name": "kv", "layer": 0, "page_bytes": 64, "num_pages": 40, "space": "host"},
            {"name": "kv", "layer": 1, "page_bytes": 96, "num_pages": 40, "memory": Memory.VRAM(0)}]  # fmt: skip


def one_kind() -> list[dict[str, Any]]:
    return [{**fields, "space": "device", "memory": Memory.DRAM} for fields in two_kinds()]


HOSTED = {"host": range(20, 30), "device": range(5, 15)}
CASES: dict[str, tuple[Any, ...]] = {
    "heads 4 to 8": (heads(0, 4), heads(1, 8), 4, 4, {}),
    "heads 8 to 4": (heads(3, 8), heads(1, 4), 4, 4, {}),
    "heads 2 to 8": (heads(1, 2), heads(5, 8), 4, 4, {}),
    "heads 8 to 1": (heads(3, 8), heads(0, 1), 4, 4, {}),
    "heads alike": (heads(1, 4), heads(1, 4), 4, 4, {}),
    "rows 1 to 4": (rows(1, 0), rows(4, 1), 4, 16, {}),
    "rows 4 to 1": (rows(4, 3), rows(1, 0), 16, 4, {}),
    "last page partial": (heads(0, 4), heads(1, 8), 4, 4, {"num_tokens": 38}),
    "two kinds of memory": (one_kind(), two_kinds(), 4, 4, {}),
}


def planned(case: str, src: Pools, dst: Pools, batch: bool) -> Plan:
    given = CASES[case][4]
    rng = np.random.default_rng(len(case))
    pairing = kvplan.pair(src.layout, dst.layout)
    requests = []
    order = {space: rng.permutation(40) for space in dst.layout.spaces}
    source = rng.permutation(40)
    per_source = src.layout.page_size / dst.layout.page_size
    for k in range(2 if batch else 1):
        n = 10 if per_source <= 1 else 2
        m = int(np.ceil(n * per_source))
        pages = {space: ids[k * m : (k + 1) * m] for space, ids in order.items()}
        requests.append(Request(source[k * n : (k + 1) * n], pages, **given))
    return pairing.plan_batch(requests)


@BOTH
@pytest.mark.parametrize("batch", [False, True], ids=["one", "batch"])
@pytest.mark.parametrize("piece", [50, 1000, 16 << 20])
@pytest.mark.parametrize("case", CASES)
def test_bytes_arrive_and_the_rest_is_untouched(case: str, piece: int, batch: bool, op: str) -> None:
    src_fields, dst_fields, src_size, dst_size, _ = CASES[case]
    src, dst = Pools(src_fields, src_size, 1), Pools(dst_fields, dst_size, 2)
    plan = planned(case, src, dst, batch)
    assert len(plan)
    before = src.memory.copy(), dst.memory.copy()
    ops.copy_(plan.table)
    want = dst.memory.copy()
    dst.memory[:] = before[1]
    packed = check(plan, op, piece)
    arena = np.full(
        piece + 2 * Pools.GUARD if piece < 1 << 20 else packed.total_bytes + 2 * Pools.GUARD, 0xA5, np.uint8
    )
    pieces = packed.pieces.tolist()
    for k in range(len(packed)):
        (c, m, at), (c_end, m_end, end) = ([row[number] for row in pieces] for number in (k, k + 1))
        begin = arena.ctypes.data + Pools.GUARD - at  # where byte 0 of staging would be
        gathered, moved = packed.copies[:, c:c_end].clone(), packed.merged[:, m:m_end].clone()
        gathered[int(op == "write")] += begin
        moved[int(op == "read")] += begin
        for table in (gathered, moved) if op == "write" else (moved, gathered):
            ops.copy_(table)
        assert end - at <= piece
    assert (dst.memory == want).all() and (src.memory == before[0]).all()
    assert (arena[: Pools.GUARD] == 0xA5).all() and (arena[-Pools.GUARD :] == 0xA5).all()


@pytest.mark.parametrize(
    ("case", "op", "count"),
    [("heads 4 to 8", "write", 4 * 10), ("heads 8 to 4", "read", 4 * 10), ("rows 1 to 4", "write", 2 * 3)],
)
def test_slices_are_merged_to_whole_pages(case: str, op: str, count: int) -> None:
    """What is sliced on one side is a page, or the rows of one, on the other."""
    src_fields, dst_fields, src_size, dst_size, _ = CASES[case]
    plan = planned(case, Pools(src_fields, src_size, 1), Pools(dst_fields, dst_size, 2), batch=False)
    packed = plan.packed(op)
    assert packed.merged.shape[1] <= count < len(plan) / 3
    assert packed.copies.shape[1] == len(plan)


# ------------------------------------------------------------------------------------------------------- by examples


def test_a_piece_ends_behind_the_last_descriptor_that_fits() -> None:
    rows = [(1000 * k, 5000 + 30 * k, 30) for k in range(5)]
    found = called(ops.pack, rows, [0, 5], False, 70, [])
    assert found[0] == [(1000 * k, 30 * k, 30) for k in range(5)]
    assert found[1] == [(0, 5000, 60), (60, 5060, 60), (120, 5120, 30)]
    assert found[2:] == ([(0, 0, 0), (2, 1, 60), (4, 2, 120), (5, 3, 150)], [-1, 0, 3])


def test_a_descriptor_larger_than_a_piece_is_cut() -> None:
    rows = [(100, 9000, 10), (500, 9010, 25), (525, 9035, 4), (900, 9039, 7)]
    copies, merged, pieces, info = called(ops.pack, rows, [0, 4], False, 10, [])
    assert copies == [(100, 0, 10), (500, 10, 10), (510, 20, 10), (520, 30, 9), (900, 39, 7)]
    assert merged == [(0, 9000, 10), (10, 9010, 10), (20, 9020, 10), (30, 9030, 9), (39, 9039, 7)]
    assert pieces == [(0, 0, 0), (1, 1, 10), (2, 2, 20), (3, 3, 30), (4, 4, 39), (5, 5, 46)] and info == [-1, 0, 5]


def test_nothing_is_merged_over_an_edge() -> None:
    """Two allocations may touch, and be registered apart."""
    rows = [(7 * k, (1 << 63) + 10 * k, 10) for k in range(4)]
    assert called(ops.pack, rows, [0, 4], False, 99, [(1 << 63) + 20])[1] == [
        (0, 1 << 63, 20),
        (20, (1 << 63) + 20, 20),
    ]
    src = Layout([Region("kv", k, (k + 1) << 20, 64, 8) for k in range(2)], page_size=4)
    dst = Layout([Region("kv", k, (1 << 30) + 512 * k, 64, 8) for k in range(2)], page_size=4)
    packed = kvplan.pair(src, dst).plan(range(8), range(8)).packed()
    assert oracle.unsigned(packed.merged) == [(0, 1 << 30, 512), (512, (1 << 30) + 512, 512)]
    assert oracle.unsigned(packed.copies) == [(1 << 20, 0, 512), (2 << 20, 512, 512)]


def test_no_segments() -> None:
    for op in ("write", "read"):
        packed = Plan(torch.empty(3, 0, dtype=torch.int64), []).packed(op)
        assert (len(packed), packed.pieces.tolist(), packed.segments) == (0, [[0], [0], [0]], ())


def test_descriptors_of_no_bytes_are_left_out() -> None:
    rows = [(0, 0, 0), (5, 50, 5), (END - 1, END - 1, 0), (10, 55, 5), (0, 0, 0)]
    assert called(ops.pack, rows, [0, 1, 5], False, 99, []) == (
        [(5, 0, 10)], [(0, 50, 10)], [(0, 0, 0), (1, 1, 10)], [-1, 0, 0, 1],
    )  # fmt: skip


def test_a_plan_that_is_still_on_its_device() -> None:
    src, dst = Pools(heads(0, 4), 4, 1), Pools(heads(1, 8), 4, 2)
    pairing = kvplan.pair(src.layout, dst.layout)
    request = Request([3, 1, 2], [8, 9, 1])
    made = pairing.planner([request], device="cpu").run()
    plan = pairing.plan([3, 1, 2], [8, 9, 1])
    for op in ("write", "read"):
        assert tables(made.packed(op, 200)) == tables(plan.packed(op, 200))
        assert made.packed(op, 200).segments == plan.packed(op, 200).segments


def test_views_of_a_table() -> None:
    plan = planned("heads 4 to 8", Pools(heads(0, 4), 4, 1), Pools(heads(1, 8), 4, 2), batch=True)
    for part in (plan.request(1), *plan.chunks(7)):
        check(part, "write", 100)


@BACKENDS
@pytest.mark.parametrize("seed", range(20))
def test_many_descriptors(call: Any, seed: int) -> None:
    """More than any block has that the op works in."""
    draw = random.Random(seed)
    rows, src, dst = [], 1 << 40, END - (1 << 34)
    for _ in range(20_000):
        nbytes = draw.choice([0, 1, 64, 1000, 1024]) if seed % 2 else 256
        src += draw.choice([0, 0, 8]) if seed % 3 else 0
        dst += draw.choice([0, 0, 8]) if seed % 5 else 0
        rows.append((src, dst, nbytes))
        src, dst = src + nbytes, dst + nbytes
    cuts = [0, *sorted(draw.randrange(len(rows)) for _ in range(seed % 4)), len(rows)]
    edges = sorted({rows[draw.randrange(len(rows))][draw.randrange(2)] for _ in range(40 * (seed % 2))})
    piece = draw.choice([1, 500, 1024, 4096, 1 << 20]) if seed else 16 << 20
    if piece == 1:
        rows, cuts = rows[:100], [0, 100]
    want = oracle.pack(rows, cuts, seed % 2 == 0, piece, edges)
    assert called(call, rows, cuts, seed % 2 == 0, piece, edges) == want


# ---------------------------------------------------------------------------------------------------------- refusals

TOO_FAR = {
    "source": ([(8, 8, 8), (END - 7, 8, 8)], 1),
    "destination": ([(8, END - 1, 2)], 0),
    "2^63 bytes": ([(8, 8, 1 << 62), (8, 8, 1 << 62)], 1),
    "half of all bytes": ([(8, 8, 5), (0, 0, 1 << 63)], 1),
    "nearly all bytes": ([(8, 8, 5), (0, 0, END - 1)], 1),
    "2^63 bytes, behind others": ([(8, 8, (1 << 63) - 2), (8, 8, 0), (8, 8, 1), (8, 8, 1), (8, 8, 1 << 63)], 3),
}


@BACKENDS
@pytest.mark.parametrize("what", TOO_FAR)
def test_what_passes_64_bits_is_refused(call: Any, what: str) -> None:
    rows, bad = TOO_FAR[what]
    for read in (False, True):
        want = [], [], [(0, 0, 0)], [bad, 0, 0]
        assert called(call, rows, [0, len(rows)], read, 1 << 60, []) == want
    plan = Plan(oracle.bits(rows), [Segment(Memory.DRAM, Memory.DRAM, 0, len(rows))])
    with pytest.raises(PlanError, match=rf"descriptor {bad}: {rows[bad][2]} bytes from {rows[bad][0]:#x} to "):
        plan.packed(piece=1 << 60)


@BACKENDS
def test_the_last_byte_of_the_address_space(call: Any) -> None:
    rows = [(0, END - 6, 4), (END - 2, END - 2, 2), (0, 0, 3)]
    assert called(call, rows, [0, 3], False, 99, []) == (
        [(0, 0, 4), (END - 2, 4, 2), (0, 6, 3)], [(0, END - 6, 6), (6, 0, 3)], [(0, 0, 0), (3, 2, 9)], [-1, 0, 1],
    )  # fmt: skip
    assert called(call, rows[1:], [0, 2], True, 99, [])[1] == [(END - 2, 0, 2), (0, 2, 3)]


@BACKENDS
def test_forms(call: Any) -> None:
    table, none = torch.zeros(3, 4, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
    for cuts in ([], [0], [0, 3], [0, 5], [1, 4], [0, 3, 2, 4], [0, -1, 4]):
        with pytest.raises(RuntimeError, match="cuts must rise from 0 to the table's 4"):
            call(table, cuts, False, 9, none)
    for piece in (0, -1, -(1 << 63)):
        with pytest.raises(RuntimeError, match=f"piece is {piece}; it must be at least 1"):
            call(table, [0, 4], False, piece, none)
    for bad in (torch.zeros(4, 3, dtype=torch.int64), torch.zeros(3, 4), torch.zeros(12, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match=r"table must be int64 \[3, N\]"):
            call(bad, [0, 4], False, 9, none)
    for bad in (torch.zeros(3), torch.zeros(1, 3, dtype=torch.int64)):
        with pytest.raises(RuntimeError, match="edges must be a"):
            call(table, [0, 4], False, 9, bad)


@pytest.mark.parametrize("op", ["push", "", None, 1])
def test_an_op_that_is_none_is_refused(op: Any) -> None:
    with pytest.raises(ValueError, match="it must be 'write' or 'read'"):
        Plan(torch.empty(3, 0, dtype=torch.int64), []).packed(op)


@pytest.mark.parametrize("piece", [0, -1, True, 2.0, None, 1 << 63])
def test_a_piece_that_is_none_is_refused(piece: Any) -> None:
    with pytest.raises(ValueError, match="piece is .*; it must be a number of bytes from 1"):
        Plan(torch.empty(3, 0, dtype=torch.int64), []).packed("write", piece)


def test_segments_that_leave_gaps_are_refused() -> None:
    table = torch.ones(3, 5, dtype=torch.int64)
    for cuts in ([(0, 2), (3, 5)], [(0, 4)], [(0, 6)], [(0, 3), (3, 2), (2, 5)]):
        with pytest.raises(PlanError, match="segments"):
            pack(table, "write", 9, [Segment(Memory.DRAM, Memory.DRAM, *cut) for cut in cuts])


# ------------------------------------------------------------------------------------------------------------- words


def test_words() -> None:
    table = oracle.bits([(100 * k, 4096 + 8 * k, 8) for k in range(6)])
    segments = [Segment(Memory.DRAM, Memory.DRAM, 0, 4), Segment(Memory.DRAM, Memory.VRAM(1), 4, 6)]
    packed = pack(table, "write", 16, segments)
    assert repr(packed) == (
        "Packed(write, 6 descriptors by way of staging: 6 local copies, 3 descriptors for the engine, 3 pieces of at "
        "most 16 bytes)"
    )
    assert packed.explain().splitlines() == [
        "write of 6 descriptors, 48 bytes: 6 copies into staging here, then 3 descriptors into the peer",
        "segment DRAM -> DRAM: 2 pieces of at most 16 bytes, 32 bytes: 4 copies, 2 descriptors of 16 bytes on average",
        "segment DRAM -> VRAM:1: 1 piece of at most 16 bytes, 16 bytes: 2 copies, 1 descriptor of 16 bytes on average",
    ]
    read = pack(table, "read", 48, segments).explain().splitlines()[0]
    assert (
        read == "read of 6 descriptors, 48 bytes: 6 descriptors from the peer into staging, then 2 copies from it here"
    )
