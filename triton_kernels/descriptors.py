"""Runs x entries -> descriptors. The Triton counterpart of csrc/cuda/descriptors.cuh.

First how many descriptors each piece makes and where it begins, then every word of the table once.
"""

import torch
import triton
import triton.language as tl

from .words import (
    ENTRY,
    MOST_DESCRIPTORS,
    TILED,
    check_here,
    check_words,
    device_of,
    items_of,
    kernel,
    last_not_above,
    leap,
    place,
    product,
    tiles,
)

PROGRAMS = 1 << 14  # that write descriptors; each takes every so many-th tile


@triton.jit
def moves_whole(src_stride, dst_stride, nbytes, src_step, dst_step):
    """Whether an entry moves a whole run as one descriptor: its rows lie gap-free on both sides."""
    src, src_fits = product(src_stride, src_step)
    dst, dst_fits = product(dst_stride, dst_step)
    return src_fits & dst_fits & (src == nbytes) & (dst == nbytes)


@triton.jit
def address_fits(base, index, stride, nbytes):
    """Whether base + index * stride + nbytes stays within the 64-bit address space (its end, 2^64, included)."""
    offset, fits = product(index, stride)
    end = offset + nbytes
    # The highest base is 2^64 - end, for which -end has the bits.
    return fits & (nbytes > 0) & (end > 0) & (base.to(tl.uint64) <= (-end).to(tl.uint64))


@triton.jit
def highest_of(first, pairs, step):
    """Highest index of a run on one side, and whether it is one."""
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
    start,  # [room + 1]: gets the lengths of runs
    sums,
    highest,  # [groups, 2], zeroed: the highest index on either side
    status,  # zeroed: not 0 where something is malformed
    BLOCK: tl.constexpr,
):
    """The checks that page ids need not, for runs given as they are."""
    tile = tl.program_id(0)
    at = items_of(tile, BLOCK)
    total = tl.load(indptr + groups)
    cut = tl.load(indptr + at, mask=at < groups, other=0)
    wrong = (cut > tl.load(indptr + at + 1, mask=at < groups, other=0)) | ((total < 0) | (total > room))
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
def place_runs_kernel(start, sums, room: tl.int64, BLOCK: tl.constexpr):
    """Lengths of runs -> where each begins among the pairs."""
    _, pairs = place(start, sums, room, BLOCK)
    tl.store(start + room, pairs, mask=tl.program_id(0) == 0)


@kernel
def count_entries_kernel(
    entries,
    num_entries: tl.int64,
    steps,
    indptr,
    groups: tl.int64,
    start,
    highest,
    starts,  # [num_entries + 1]: gets how many descriptors each makes
    columns,  # [3, num_entries], see descriptors_kernel
    sums,
    status,
    BLOCK: tl.constexpr,
):
    """Descriptors of each entry."""
    tile = tl.program_id(0)
    at = items_of(tile, BLOCK)
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
    # Another program may refuse now: `given` above is a shortcut, what counts is read in the launch that follows.
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
    count,  # [1]
    BLOCK: tl.constexpr,
):
    """Where the descriptors of each entry begin, and how many there are: none are written where the status is not 0 or
    there is too little room."""
    _, total = place(starts, sums, num_entries, BLOCK)
    refused = tl.load(status) != 0
    first = tl.program_id(0) == 0
    tl.store(starts + num_entries, tl.where(refused | (total > room), 0, total), mask=first)
    tl.store(count, tl.where(refused, -1, total), mask=first)


@kernel
def descriptors_kernel(
    entries,
    steps,  # struct Steps of each group; where they lie is told by the next two
    steps_stride: tl.int64,
    steps_apart: tl.int64,
    runs,
    run_dst,
    start,
    runs_leap: tl.int64,
    starts,  # [pieces + 1]: the first descriptor of each piece, and how many are written
    columns,  # [3, pieces]: twice the entry, plus 1 where it moves runs whole; its first run; the one behind its last
    pieces: tl.int64,
    pieces_leap: tl.int64,
    table,  # [3, room]
    room: tl.int64,
    TAIL: tl.constexpr,  # whether zeros are written behind the last descriptor
    BLOCK: tl.constexpr,
):
    """One lane a descriptor."""
    written = tl.load(starts + pieces)
    end = written
    if TAIL:
        end = room
    tile = tl.program_id(0).to(tl.int64)
    while tile * BLOCK < end:
        at = items_of(tile, BLOCK)
        valid = at < written
        piece = last_not_above(starts, 1, at * 0, pieces, pieces_leap, at)
        kind = tl.load(columns + piece, mask=valid, other=1)
        entry, whole = entries + (kind >> 1) * ENTRY, (kind & 1) != 0
        first = tl.load(columns + pieces + piece, mask=valid, other=0)
        number = at - tl.load(starts + piece, mask=valid, other=0)
        run, within, pairs = first + number, at * 0, at * 0 + 1
        if tl.min(whole.to(tl.int32)) == 0:  # somewhere runs are taken apart: number counts pairs
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
    """Descriptors of all entries over the runs of their groups; see kvplan.ops.expand. Where something is malformed, or
    an address passes 64 bits, count is -1 and the table all zeros."""
    for tensor, what in ((runs, "runs"), (entries, "entries"), (indptr, "indptr"), (steps, "steps")):
        check_words(tensor, what)
        check_here(tensor, what, runs.device)
    room, num_entries, groups = runs.numel() // 3, entries.numel() // 6, steps.numel() // 2
    torch._check(
        runs.dim() == 2 and runs.shape[0] == 3 and indptr.numel() == groups + 1 and capacity >= 0,
        lambda: "runs must be [3, R], and indptr must have a row more than steps",
    )
    torch._check(entries.numel() == 6 * num_entries, lambda: "entries must have rows of 6 words")
    torch._check(steps.numel() == 2 * groups, lambda: "steps must have rows of 2 words")
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
        place_runs_kernel[run_grid](start, sums, room, **TILED)
        count_entries_kernel[entry_grid](
            entries, num_entries, steps, indptr, groups, start, highest, starts, columns, sums, status, **TILED
        )
        place_entries_kernel[entry_grid](starts, sums, num_entries, status, capacity, count, **TILED)
        descriptors_kernel[(min(tiles(capacity), PROGRAMS),)](
            entries, steps, 2, 1, runs, runs[1], start, leap(room), starts, columns, num_entries, leap(num_entries),
            table, capacity, TAIL=True, **TILED,
        )  # fmt: skip
    return table, count
