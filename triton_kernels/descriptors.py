"""Runs x entries -> descriptors. The Triton counterpart of csrc/cuda/descriptors.cuh.

First the kernels count the descriptors of each piece and sum the counts, which gives where each piece begins. Then they
write every word of the table once.
"""

import torch
import triton
import triton.language as tl

from .arith import last_not_above, product
from .launch import TILED, check_words, device_of, kernel, leap, tiles
from .scan import own_items, place_items, place_items_kernel, tile_items
from .structs import ENTRY, MOST_DESCRIPTORS

PROGRAMS = 1 << 14  # at most, to write descriptors: program p writes tiles p, p + programs, p + 2 * programs, ...


@triton.jit
def moves_whole(src_stride, dst_stride, nbytes, src_step, dst_step):
    """Whether an entry moves a whole run as one descriptor: its rows lie without gaps on both sides."""
    src, src_fits = product(src_stride, src_step)
    dst, dst_fits = product(dst_stride, dst_step)
    return src_fits & dst_fits & (src == nbytes) & (dst == nbytes)


@triton.jit
def address_fits(base, index, stride, nbytes):
    """Whether base + index * stride + nbytes is at most 2^64, the end of the address space.

    False too where nbytes is not positive, or index * stride + nbytes is 2^63 or more.
    """
    offset, fits = product(index, stride)
    end = offset + nbytes
    # The highest base that fits is 2^64 - end, whose bits are those of -end.
    return fits & (nbytes > 0) & (end > 0) & (base.to(tl.uint64) <= (-end).to(tl.uint64))


@triton.jit
def highest_of(first, pairs, step):
    """(highest index of a run on one side, whether the run is valid: both its ends are from 0 to 2^63 - 1)."""
    offset, fits = product(pairs - 1, step)
    last = first + offset
    return last, fits & (first >= 0) & (last >= 0)


@kernel
def check_runs_kernel(
    runs,  # [3, room]
    room: tl.int64,
    indptr,  # [groups + 1]
    steps,  # [groups, 2]
    groups: tl.int64,
    groups_leap: tl.int64,
    start,  # [room + 1], written: the length of each run
    sums,
    highest,  # [groups, 2], 0 before; gets the highest index of each group on each side
    status,  # 0 before; set to 1 where something is malformed
    BLOCK: tl.constexpr,
):
    """Checks runs, indptr and steps. Runs that this package makes of page ids need no such check."""
    tile, at = own_items(BLOCK)
    total = tl.load(indptr + groups)
    cut = tl.load(indptr + at, mask=at < groups, other=0)
    wrong = (cut > tl.load(indptr + at + 1, mask=at < groups, other=0)) | (total > room)
    wrong |= (at == 0) & (tl.load(indptr) != 0)
    wrong |= (at < groups) & (tl.load(steps + 2 * at, mask=at < groups, other=1) <= 0)
    wrong |= (at < groups) & (tl.load(steps + 2 * at + 1, mask=at < groups, other=1) <= 0)
    valid = (at < total) & (at < room) & (groups > 0)
    group = last_not_above(indptr, 1, at * 0, groups, groups_leap, at)
    pairs = tl.load(runs + 2 * room + at, mask=valid, other=0)
    src_step = tl.load(steps + 2 * group, mask=valid, other=0)
    dst_step = tl.load(steps + 2 * group + 1, mask=valid, other=0)
    src, src_fits = highest_of(tl.load(runs + at, mask=valid, other=0), pairs, src_step)
    dst, dst_fits = highest_of(tl.load(runs + room + at, mask=valid, other=0), pairs, dst_step)
    good = valid & (pairs > 0) & (pairs <= MOST_DESCRIPTORS) & src_fits & dst_fits
    wrong |= valid & ~good
    tl.atomic_max(highest + 2 * group, src, mask=good)
    tl.atomic_max(highest + 2 * group + 1, dst, mask=good)
    tl.atomic_max(status, 1, mask=tl.max(wrong.to(tl.int32)) > 0)
    pairs = tl.where(good, pairs, 0)
    tl.store(start + at, pairs, mask=at < room)
    tl.store(sums + tile, tl.sum(pairs))


@kernel
def count_entries_kernel(
    entries,
    num_entries: tl.int64,
    steps,
    indptr,
    groups: tl.int64,
    start,
    highest,
    starts,  # [num_entries + 1], written: the number of descriptors of each entry
    columns,  # [3, num_entries], written: see descriptors_kernel
    sums,
    status,
    BLOCK: tl.constexpr,
):
    """Checks the entries, and counts the descriptors of each."""
    tile, at = own_items(BLOCK)
    given = (at < num_entries) & (tl.load(status) == 0)
    entry = entries + at * ENTRY
    group = tl.load(entry + 5, mask=given, other=0)
    valid = given & (group >= 0) & (group < groups)
    src_step = tl.load(steps + 2 * group, mask=valid, other=1)
    dst_step = tl.load(steps + 2 * group + 1, mask=valid, other=1)
    src_stride, dst_stride = tl.load(entry + 1, mask=valid, other=0), tl.load(entry + 3, mask=valid, other=0)
    nbytes = tl.load(entry + 4, mask=valid, other=0)
    good = valid & (src_stride > 0) & (dst_stride > 0)
    highest_src = tl.load(highest + 2 * group, mask=valid, other=0)
    highest_dst = tl.load(highest + 2 * group + 1, mask=valid, other=0)
    good &= address_fits(tl.load(entry, mask=valid, other=0), highest_src, src_stride, nbytes)
    good &= address_fits(tl.load(entry + 2, mask=valid, other=0), highest_dst, dst_stride, nbytes)
    first, last = tl.load(indptr + group, mask=good, other=0), tl.load(indptr + group + 1, mask=good, other=0)
    pairs = tl.load(start + last, mask=good, other=0) - tl.load(start + first, mask=good, other=0)
    whole = good & moves_whole(src_stride, dst_stride, nbytes, src_step, dst_step)
    count = tl.where(good, tl.where(whole, last - first, pairs), 0)
    # Another program may set the status now. Skipping refused input (`given`) only saves time: the next launch decides.
    tl.atomic_max(status, 1, mask=tl.max((given & ~good).to(tl.int32)) > 0)
    tl.store(starts + at, count, mask=at < num_entries)
    tl.store(columns + at, 2 * at + whole.to(tl.int64), mask=good)
    tl.store(columns + num_entries + at, first, mask=good)
    tl.store(columns + 2 * num_entries + at, last, mask=good)
    tl.store(sums + tile, tl.sum(count))


@kernel
def place_entries_kernel(
    starts,
    sums,
    num_entries: tl.int64,
    status,
    room: tl.int64,
    count,  # [1], written: the number of descriptors, or -1 where the input is refused
    BLOCK: tl.constexpr,
):
    """Writes where the descriptors of each entry begin, and how many there are to write.

    None are to be written where the status is not 0, or where there is too little room for all.
    """
    _, total = place_items(starts, sums, num_entries, BLOCK)
    refused = tl.load(status) != 0
    first = tl.program_id(0) == 0
    tl.store(starts + num_entries, tl.where(refused | (total > room), 0, total), mask=first)
    tl.store(count, tl.where(refused, -1, total), mask=first)


@kernel
def descriptors_kernel(
    entries,
    steps,  # index steps of each group, on the source and on the destination
    steps_stride: tl.int64,  # words from the steps of one group to those of the next
    steps_apart: tl.int64,  # words from a group's step on the source to its step on the destination
    runs,
    run_dst,
    start,
    runs_leap: tl.int64,
    starts,  # [pieces + 1]: the first descriptor of each piece; the last word is the number of descriptors to write
    columns,  # [3, pieces]: twice the entry, plus 1 where it moves runs whole; its first run; the run behind its last
    pieces: tl.int64,
    pieces_leap: tl.int64,
    table,  # [3, room]
    room: tl.int64,
    TAIL: tl.constexpr,  # whether zeros are written behind the last descriptor
    BLOCK: tl.constexpr,
):
    """Writes the table. Each lane makes one descriptor."""
    written = tl.load(starts + pieces)
    end = written
    if TAIL:
        end = room
    tile = tl.program_id(0).to(tl.int64)
    while tile * BLOCK < end:
        at = tile_items(tile, BLOCK)
        valid = at < written
        piece = last_not_above(starts, 1, at * 0, pieces, pieces_leap, at)
        kind = tl.load(columns + piece, mask=valid, other=1)
        entry, whole = entries + (kind >> 1) * ENTRY, (kind & 1) != 0
        first = tl.load(columns + pieces + piece, mask=valid, other=0)
        number = at - tl.load(starts + piece, mask=valid, other=0)
        run, within, pairs = first + number, at * 0, at * 0 + 1
        if tl.min(whole.to(tl.int32)) == 0:  # some pieces do not move runs whole: there `number` counts pairs
            last = tl.load(columns + 2 * pieces + piece, mask=valid & ~whole, other=0)
            pair = number + tl.load(start + first, mask=valid & ~whole, other=0)
            run = tl.where(whole, run, last_not_above(start, 1, first, last, runs_leap, pair))
            within = tl.where(whole, 0, pair - tl.load(start + run, mask=valid & ~whole, other=0))
        after = tl.load(start + run + 1, mask=valid & whole, other=1)
        pairs = after - tl.load(start + run, mask=valid & whole, other=0)
        step = steps + tl.load(entry + 5, mask=valid, other=0) * steps_stride
        src = tl.load(runs + run, mask=valid, other=0) + within * tl.load(step, mask=valid, other=0)
        dst = tl.load(run_dst + run, mask=valid, other=0) + within * tl.load(step + steps_apart, mask=valid, other=0)
        src = tl.load(entry, mask=valid, other=0) + src * tl.load(entry + 1, mask=valid, other=0)
        dst = tl.load(entry + 2, mask=valid, other=0) + dst * tl.load(entry + 3, mask=valid, other=0)
        tl.store(table + at, src, mask=at < end)
        tl.store(table + room + at, dst, mask=at < end)
        tl.store(table + 2 * room + at, pairs * tl.load(entry + 4, mask=valid, other=0), mask=at < end)
        tile += tl.num_programs(0)


def expand(
    entries: torch.Tensor, runs: torch.Tensor, indptr: torch.Tensor, steps: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the descriptors of all entries over the runs of their groups; see kvplan.ops.expand.

    Where something is malformed, or an address passes 64 bits, count is -1 and the table is all zeros.
    """
    for tensor, what in ((runs, "runs"), (entries, "entries"), (indptr, "indptr"), (steps, "steps")):
        check_words(tensor, what, runs.device)
    room, num_entries, groups = runs.numel() // 3, entries.numel() // 6, steps.numel() // 2
    torch._check(runs.dim() == 2 and runs.shape[0] == 3, lambda: f"runs must be [3, R], not {list(runs.shape)}")
    torch._check(
        indptr.numel() == groups + 1,
        lambda: f"indptr must have one word more than steps has rows, not {indptr.numel()} for {groups} rows",
    )
    torch._check(capacity >= 0, lambda: f"capacity must not be negative; it is {capacity}")
    torch._check(
        entries.numel() == 6 * num_entries, lambda: f"entries must have rows of 6 words, not {entries.numel()} words"
    )
    torch._check(steps.numel() == 2 * groups, lambda: f"steps must have rows of 2 words, not {steps.numel()} words")
    table, count = runs.new_empty((3, capacity)), runs.new_empty(1)
    status, highest = runs.new_zeros(1 + 2 * groups).split((1, 2 * groups))
    start, starts = runs.new_empty(room + 1), runs.new_empty(num_entries + 1)
    columns = runs.new_empty((3, num_entries))
    run_grid, entry_grid = (tiles(max(room, groups)),), (tiles(num_entries),)
    sums = runs.new_empty(max(run_grid[0], entry_grid[0]))
    with device_of(runs):
        check_runs_kernel[run_grid](
            runs, room, indptr, steps, groups, leap(groups), start, sums, highest, status, **TILED
        )
        place_items_kernel[run_grid](start, sums, room, **TILED)
        count_entries_kernel[entry_grid](
            entries, num_entries, steps, indptr, groups, start, highest, starts, columns, sums, status, **TILED
        )
        place_entries_kernel[entry_grid](starts, sums, num_entries, status, capacity, count, **TILED)
        descriptors_kernel[(min(tiles(capacity), PROGRAMS),)](
            entries, steps, 2, 1, runs, runs[1], start, leap(room), starts, columns, num_entries, leap(num_entries),
            table, capacity, TAIL=True, **TILED,
        )  # fmt: skip
    return table, count
