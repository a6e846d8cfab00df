"""All stages of planning in turn, without waiting for the device. The Triton counterpart of csrc/cuda/launch.h."""

import torch
import triton
import triton.language as tl

from .descriptors import PROGRAMS, descriptors_kernel, moves_whole
from .pages import PLACES, check_kernel, id_at
from .runs import mark_pages_kernel, number_kernel, runs_before
from .words import (
    CHECK,
    ENTRY,
    GROUP,
    HEADER,
    JOB,
    JOB_SIZE,
    LIST,
    MOST_DESCRIPTORS,
    ROOM,
    TILED,
    UNKNOWN_JOB,
    check_here,
    check_words,
    device_of,
    items_of,
    kernel,
    last_not_above,
    leap,
    place,
    tiles,
)

FACTS = tl.constexpr(5)  # words of a status in info


@triton.jit
def name_piece(bounds, segments, segments_leap, requests, piece):
    """(segment, request, entry) of a piece: pieces are ordered by these."""
    segment = last_not_above(bounds, 1, piece * 0, segments, segments_leap, piece // tl.maximum(requests, 1))
    first = tl.load(bounds + segment)
    entries = tl.load(bounds + segment + 1) - first
    rest = piece - first * requests
    request = rest // tl.maximum(entries, 1)  # no division by zero where there are no pieces
    return segment, request, first + rest - request * entries


@kernel
def count_pieces_kernel(
    entries,
    groups,  # struct Group [num_groups]
    num_groups: tl.int64,
    bounds,
    segments: tl.int64,
    segments_leap: tl.int64,
    job,
    requests: tl.int64,
    pieces: tl.int64,
    pairs: tl.int64,
    pairs_leap: tl.int64,
    start,
    starts,  # [pieces + 1]: gets how many descriptors each makes
    columns,  # [3, pieces], see descriptors_kernel
    sums,
    status,
    BLOCK: tl.constexpr,
):
    """Descriptors of each piece."""
    if tl.load(status) != 0:
        return
    tile = tl.program_id(0)
    at = items_of(tile, BLOCK)
    valid = at < pieces
    _, request, number = name_piece(bounds, segments, segments_leap, requests, tl.where(valid, at, 0))
    entry = entries + number * ENTRY
    group = tl.load(entry + 5, mask=valid, other=0)
    row = job + JOB_SIZE + (request * num_groups + group) * LIST
    begin, end = tl.load(row, mask=valid, other=0), tl.load(row + LIST, mask=valid, other=0)
    runs = tl.load(start + pairs + 1)
    first, last = runs_before(start, runs, pairs_leap, begin), runs_before(start, runs, pairs_leap, end)
    src_step = tl.load(groups + group * GROUP + 6, mask=valid, other=1)
    dst_step = tl.load(groups + group * GROUP + 11, mask=valid, other=1)
    src_stride, dst_stride = tl.load(entry + 1, mask=valid, other=0), tl.load(entry + 3, mask=valid, other=0)
    nbytes = tl.load(entry + 4, mask=valid, other=0)
    whole = moves_whole(src_stride, dst_stride, nbytes, src_step, dst_step)
    count = tl.where(valid, tl.where(whole, last - first, end - begin), 0)
    tl.store(starts + at, count, mask=valid)
    tl.store(columns + at, 2 * number + whole.to(tl.int64), mask=valid)
    tl.store(columns + pieces + at, first, mask=valid)
    tl.store(columns + 2 * pieces + at, last, mask=valid)
    tl.store(sums + tile, tl.sum(count))


@triton.jit
def tell(info, status, job, lists, checks, checks_leap, places, pages, total, room, mask):
    """The first words of a plan's info, from its status word (see check_kernel); returns whether it is refused."""
    bad = (status > 0) & (status != UNKNOWN_JOB)
    place = tl.where(bad, places - status, 0)
    rows = job + JOB_SIZE + LIST * (lists + 1)
    check = rows + CHECK * last_not_above(rows, CHECK, place * 0, tl.where(bad, checks, 0), checks_leap, place)
    within = place - tl.load(check, mask=bad, other=0)
    full = (status == 0) & (total > room)
    code = tl.where(full, ROOM, tl.where(status == UNKNOWN_JOB, JOB, 0)) + tl.load(check + 2, mask=bad, other=0)
    position = tl.load(check + 7, mask=bad, other=0) + within + tl.where(full, room, 0)
    tl.store(info, code, mask=mask)
    tl.store(info + 1, tl.load(check + 5, mask=bad, other=0), mask=mask)
    tl.store(info + 2, tl.load(check + 6, mask=bad, other=0), mask=mask)
    tl.store(info + 3, position, mask=mask)
    tl.store(info + 4, id_at(pages, check, place, bad) + tl.where(full, total, 0), mask=mask)
    return (status != 0) | full


@kernel
def place_pieces_kernel(
    starts,
    sums,
    bounds,
    segments: tl.int64,
    segments_leap: tl.int64,
    job,
    requests: tl.int64,
    lists: tl.int64,
    pieces: tl.int64,
    checks: tl.int64,
    checks_leap: tl.int64,
    places: tl.int64,
    pages,
    status,
    room: tl.int64,
    info,
    BLOCK: tl.constexpr,
):
    """Where the descriptors of each piece begin. Writes all of info: where the plan is refused, zeros behind why."""
    why = tl.load(status)
    tile = tl.program_id(0)
    items = tl.where(why != 0, 0, pieces)
    start, total = place(starts, sums, items, BLOCK)
    total = tl.where(why != 0, 0, total)
    refused = tell(info, why, job, lists, checks, checks_leap, places, pages, total, room, tile == 0)
    tl.store(starts + pieces, tl.where(refused, 0, total), mask=tile == 0)
    cuts = segments * requests
    tl.store(info + FACTS + cuts, tl.where(refused, 0, total), mask=tile == 0)
    at = items_of(tile, BLOCK)
    tl.store(info + FACTS + at, at * 0, mask=refused & (at < cuts))
    if refused == 0:
        valid = at < pieces
        segment, request, number = name_piece(bounds, segments, segments_leap, requests, tl.where(valid, at, 0))
        begins = valid & (number == tl.load(bounds + segment))
        tl.store(info + FACTS + segment * requests + request, start, mask=begins)


def _check(tables: torch.Tensor, job: torch.Tensor, pages: torch.Tensor, sizes: list[int], table: torch.Tensor,
           info: torch.Tensor) -> None:  # fmt: skip
    for tensor, what in ((tables, "tables"), (job, "job"), (table, "table"), (info, "info")):
        check_words(tensor, what)
        check_here(tensor, what, pages.device, pinned=what in ("table", "info"))
    torch._check(
        pages.dtype in (torch.int32, torch.int64) and pages.dim() == 1 and pages.is_contiguous(),
        lambda: "pages must be a contiguous 1-D int32 or int64 tensor",
    )
    torch._check(table.dim() == 2 and table.shape[0] == 3, lambda: "table must be [3, N]")
    torch._check(len(sizes) == JOB_SIZE.value, lambda: f"sizes must be the first {JOB_SIZE.value} words of the job")
    torch._check(all(0 <= size <= MOST_DESCRIPTORS.value for size in sizes), lambda: "sizes are not those of a job")
    requests, lists, _, checks, *_, given, _ = sizes
    words = JOB_SIZE.value + LIST.value * (lists + 1) + CHECK.value * (checks + 1)
    torch._check(
        given == pages.numel() and tables.numel() >= HEADER.value and job.numel() == words,
        lambda: "sizes, job and pages do not belong together",
    )
    cuts = info.numel() - FACTS.value - 1
    torch._check(
        cuts >= 0 and (cuts % requests == 0 if requests else cuts == 0),
        lambda: f"info must have {FACTS.value + 1} + segments * requests words",
    )


def plan_(
    tables: torch.Tensor, job: torch.Tensor, pages: torch.Tensor, sizes: list[int], table: torch.Tensor,
    info: torch.Tensor,
) -> None:  # fmt: skip
    """Plan a prepared job into `table` and `info`; see kvplan.ops.plan_."""
    _check(tables, job, pages, sizes, table, info)
    requests, lists, pieces, checks, pairs, places, hashed, _, most = sizes
    num_entries, num_groups = (pieces // requests, lists // requests) if requests else (0, 0)
    segments = (info.numel() - FACTS.value - 1) // requests if requests else 0
    # Where the job is not the one that sizes say, these may end up anywhere: nothing is read there then.
    entries = tables[HEADER.value :]
    groups = entries[ENTRY.value * num_entries :]
    bounds = tables[max(tables.numel() - segments - 1, 0) :]
    room = table.shape[1]
    slots = 1
    while slots < 2 * hashed:  # at most half full
        slots *= 2
    pair_grid, piece_grid = (tiles(pairs),), (tiles(max(pieces, segments * requests)),)
    status, hashes = torch.zeros(1 + slots, dtype=torch.int64, device=pages.device).split((1, slots))
    lengths = (*(pairs,) * 4, pairs + 2, pieces + 1, 3 * pieces, *pair_grid, *piece_grid)
    scratch = torch.empty(sum(lengths), dtype=torch.int64, device=pages.device)  # one allocation
    run_src, run_dst, src, dst, start, starts, columns, pair_sums, piece_sums = scratch.split(lengths)
    heads = pages.new_empty(pairs, dtype=torch.int8)
    with device_of(pages):
        check_kernel[(tiles(places, PLACES["BLOCK"]),)](
            tables, tables.numel(), segments, job, *sizes, leap(checks), pages, hashes, slots - 1, status, **PLACES
        )
        mark_pages_kernel[pair_grid](
            groups, max(num_groups, 1), job, lists, leap(lists), pairs, pages, status, src, dst, heads, pair_sums,
            **TILED,
        )  # fmt: skip
        number_kernel[pair_grid](src, dst, heads, pair_sums, pairs, status, run_src, run_dst, start, **TILED)
        count_pieces_kernel[piece_grid](
            entries, groups, num_groups, bounds, segments, leap(segments), job, requests, pieces, pairs,
            leap(pairs), start, starts, columns, piece_sums, status, **TILED,
        )  # fmt: skip
        place_pieces_kernel[piece_grid](
            starts, piece_sums, bounds, segments, leap(segments), job, requests, lists, pieces, checks, leap(checks),
            places, pages, status, room, info, **TILED,
        )  # fmt: skip
        descriptors_kernel[(min(tiles(min(most, room)), PROGRAMS),)](
            entries, groups[6:], GROUP.value, 5, run_src, run_dst, start, leap(pairs), starts, columns, pieces,
            leap(pieces), table, room, TAIL=False, **TILED,
        )  # fmt: skip
