"""All stages of planning in turn, without waiting for the device. The Triton counterpart of csrc/cuda/launch.h."""

import torch
import triton
import triton.language as tl

from .arith import last_not_above
from .descriptors import PROGRAMS, descriptors_kernel, moves_whole
from .launch import TILED, check_words, device_of, kernel, leap, tiles
from .pages import PLACES, check_at, check_kernel, id_at
from .runs import mark_pages_kernel, number_kernel, runs_before
from .scan import own_items, place_items
from .structs import CHECK, ENTRY, GROUP, HEADER, JOB, JOB_MISMATCH, JOB_SIZE, LIST, MOST_DESCRIPTORS, ROOM, STATUS


@triton.jit
def name_piece(bounds, segments, segments_leap, requests, piece):
    """(segment, request, entry) of a piece, which is what one entry moves for one request. Pieces are in that order."""
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
    starts,  # [pieces + 1], written: the number of descriptors of each piece
    columns,  # [3, pieces], written: see descriptors_kernel
    sums,
    status,
    BLOCK: tl.constexpr,
):
    """Counts the descriptors of each piece."""
    if tl.load(status) != 0:
        return
    tile, at = own_items(BLOCK)
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
def store_status(info, status, job, lists, checks, checks_leap, places, pages, total, room, mask):
    """Writes the first words of a plan's info from its status word (see check_kernel).

    Returns whether the plan is refused.
    """
    bad = (status > 0) & (status != JOB_MISMATCH)
    place = tl.where(bad, places - status, 0)
    check = check_at(job, lists, tl.where(bad, checks, 0), checks_leap, place)
    within = place - tl.load(check, mask=bad, other=0)
    full = (status == 0) & (total > room)
    code = tl.where(full, ROOM, tl.where(status == JOB_MISMATCH, JOB, 0)) + tl.load(check + 2, mask=bad, other=0)
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
    """Writes where the descriptors of each piece begin, and all of info.

    Where the plan is refused, the words of info behind its status are 0.
    """
    why = tl.load(status)
    tile, at = own_items(BLOCK)
    items = tl.where(why != 0, 0, pieces)
    start, total = place_items(starts, sums, items, BLOCK)
    total = tl.where(why != 0, 0, total)
    refused = store_status(info, why, job, lists, checks, checks_leap, places, pages, total, room, tile == 0)
    tl.store(starts + pieces, tl.where(refused, 0, total), mask=tile == 0)
    cuts = segments * requests
    tl.store(info + STATUS + cuts, tl.where(refused, 0, total), mask=tile == 0)
    tl.store(info + STATUS + at, at * 0, mask=refused & (at < cuts))
    if refused == 0:
        valid = at < pieces
        segment, request, number = name_piece(bounds, segments, segments_leap, requests, tl.where(valid, at, 0))
        begins = valid & (number == tl.load(bounds + segment))
        tl.store(info + STATUS + segment * requests + request, start, mask=begins)


def _check(tables: torch.Tensor, job: torch.Tensor, pages: torch.Tensor, sizes: list[int], table: torch.Tensor,
           info: torch.Tensor) -> None:  # fmt: skip
    for tensor, what in ((tables, "tables"), (job, "job"), (table, "table"), (info, "info")):
        check_words(tensor, what, pages.device, pinned=what in ("table", "info"))
    torch._check(
        pages.dtype in (torch.int32, torch.int64) and pages.dim() == 1 and pages.is_contiguous(),
        lambda: f"pages must be a contiguous 1-D int32 or int64 tensor, not {pages.dtype} {list(pages.shape)}",
    )
    torch._check(table.dim() == 2 and table.shape[0] == 3, lambda: f"table must be [3, N], not {list(table.shape)}")
    torch._check(
        len(sizes) == JOB_SIZE.value,
        lambda: f"sizes must be the first {JOB_SIZE.value} words of the job, not {len(sizes)} words",
    )
    torch._check(
        all(0 <= size <= MOST_DESCRIPTORS.value for size in sizes),
        lambda: f"sizes are not those of a job: {list(sizes)}; each must be from 0 to {MOST_DESCRIPTORS.value}",
    )
    requests, lists, _, checks, *_, given, _ = sizes
    words = JOB_SIZE.value + LIST.value * (lists + 1) + CHECK.value * (checks + 1)
    torch._check(
        given == pages.numel() and tables.numel() >= HEADER.value and job.numel() == words,
        lambda: (
            "sizes, job, tables and pages do not belong together: sizes "
            f"{list(sizes)}, {job.numel()} words of job, {tables.numel()} of tables, {pages.numel()} page ids"
        ),
    )
    cuts = info.numel() - STATUS.value - 1
    torch._check(
        cuts >= 0 and (cuts % requests == 0 if requests else cuts == 0),
        lambda: f"info must have {STATUS.value + 1} + segments * {requests} words, not {info.numel()}",
    )


def plan_(
    tables: torch.Tensor, job: torch.Tensor, pages: torch.Tensor, sizes: list[int], table: torch.Tensor,
    info: torch.Tensor,
) -> None:  # fmt: skip
    """Plan a prepared job into `table` and `info`; see kvplan.ops.plan_."""
    _check(tables, job, pages, sizes, table, info)
    requests, lists, pieces, checks, pairs, places, hashed, _, most = sizes
    num_entries, num_groups = (pieces // requests, lists // requests) if requests else (0, 0)
    segments = (info.numel() - STATUS.value - 1) // requests if requests else 0
    # Where sizes are of another job, these three may begin anywhere. check_kernel finds that out, and then no kernel
    # reads them.
    entries = tables[HEADER.value :]
    groups = entries[ENTRY.value * num_entries :]
    bounds = tables[max(tables.numel() - segments - 1, 0) :]
    room = table.shape[1]
    slots = 1
    while slots < 2 * hashed:  # the hash table is at most half full
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
