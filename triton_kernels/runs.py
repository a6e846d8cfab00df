"""Index pairs -> runs. The Triton counterpart of csrc/cuda/runs.cuh.

One launch marks the pairs that begin a run and counts them in each tile; the next numbers the runs and writes them.
"""

import torch
import triton
import triton.language as tl

from .arith import last_not_above, quotient
from .launch import TILED, check_words, device_of, kernel, leap, tiles
from .scan import own_items, sum_of_tiles
from .structs import GROUP, JOB_SIZE, LIST


@triton.jit
def same_run(src, dst, last_src, last_dst, src_step, dst_step):
    """Whether a pair (src, dst) belongs to the run of the pair before it: both indices go up by one step."""
    return (src > last_src) & (src == last_src + src_step) & (dst > last_dst) & (dst == last_dst + dst_step)


@triton.jit
def index_of(side, pages, offset, local, valid):
    """Index of row number `local` of a page list. The list begins at pages[offset]; `side` points to a struct Side."""
    rows = tl.load(side + 2, mask=valid, other=1)
    page = quotient(local, rows)
    id = tl.load(pages + offset + page, mask=valid, other=0).to(tl.int64)
    row = local - page * rows
    return id * tl.load(side + 3, mask=valid, other=0) + row * tl.load(side + 4, mask=valid, other=0)


@triton.jit
def store_heads(heads, sums, tile, at, valid, continues):
    """Stores which pairs begin a run, and how many of this tile do. `continues`: the pair before is of the same run."""
    head = valid & ~continues
    tl.store(heads + at, head.to(tl.int8), mask=valid)
    tl.store(sums + tile, tl.sum(head.to(tl.int64)))


@kernel
def mark_pages_kernel(
    groups,  # struct Group [num_groups]
    num_groups: tl.int64,
    job,
    lists: tl.int64,
    lists_leap: tl.int64,
    pairs: tl.int64,
    pages,
    status,
    src,  # [pairs], written: indices on the source
    dst,  # [pairs], written: indices on the destination
    heads,  # int8 [pairs], written: whether a run begins at this pair
    sums,
    BLOCK: tl.constexpr,
):
    """Turns page ids into index pairs (see csrc/pairs.h), and marks the first pair of each run."""
    if tl.load(status) != 0:
        return
    tile, at = own_items(BLOCK)
    valid = at < pairs
    rows = job + JOB_SIZE
    number = last_not_above(rows, LIST, at * 0, lists, lists_leap, at)
    row = rows + number * LIST
    group = groups + (number % num_groups) * GROUP
    k = at - tl.load(row, mask=valid, other=0)
    src_offset, dst_offset = tl.load(row + 1, mask=valid, other=0), tl.load(row + 2, mask=valid, other=0)
    src_step, dst_step = tl.load(row + 4, mask=valid, other=0), tl.load(row + 6, mask=valid, other=0)
    src_row = tl.load(row + 3, mask=valid, other=0) + k * src_step
    dst_row = tl.load(row + 5, mask=valid, other=0) + k * dst_step
    src_index = index_of(group + 2, pages, src_offset, src_row, valid)
    dst_index = index_of(group + 7, pages, dst_offset, dst_row, valid)
    follows = valid & (k > 0)
    last_src = index_of(group + 2, pages, src_offset, tl.where(follows, src_row - src_step, 0), follows)
    last_dst = index_of(group + 7, pages, dst_offset, tl.where(follows, dst_row - dst_step, 0), follows)
    src_apart, dst_apart = tl.load(group + 6, mask=valid, other=0), tl.load(group + 11, mask=valid, other=0)
    continues = follows & same_run(src_index, dst_index, last_src, last_dst, src_apart, dst_apart)
    tl.store(src + at, src_index, mask=valid)
    tl.store(dst + at, dst_index, mask=valid)
    store_heads(heads, sums, tile, at, valid, continues)


@kernel
def mark_pairs_kernel(
    src,
    dst,
    pairs: tl.int64,
    indptr,  # [lists + 1]
    lists: tl.int64,
    lists_leap: tl.int64,
    heads,
    sums,
    status,  # 0 before; set to 1 where indptr is malformed
    BLOCK: tl.constexpr,
):
    """Marks the first pair of each run of the given index pairs, and checks that indptr rises from 0 to `pairs`."""
    tile, at = own_items(BLOCK)
    cut = tl.load(indptr + at, mask=at <= lists, other=0)
    after = tl.load(indptr + at + 1, mask=at < lists, other=0)
    wrong = ((at < lists) & (cut > after)) | ((at == 0) & (cut != 0)) | ((at == lists) & (cut != pairs))
    tl.atomic_max(status, 1, mask=tl.max(wrong.to(tl.int32)) > 0)
    valid = at < pairs
    begin = tl.load(indptr + last_not_above(indptr, 1, at * 0, lists, lists_leap, at))
    follows = valid & (at > tl.maximum(begin, 0))  # a malformed indptr may hold a negative number
    src_index, last_src = tl.load(src + at, mask=valid, other=0), tl.load(src + at - 1, mask=follows, other=0)
    dst_index, last_dst = tl.load(dst + at, mask=valid, other=0), tl.load(dst + at - 1, mask=follows, other=0)
    store_heads(heads, sums, tile, at, valid, follows & same_run(src_index, dst_index, last_src, last_dst, 1, 1))


@kernel
def number_kernel(
    src,
    dst,
    heads,
    sums,
    pairs: tl.int64,
    status,
    run_src,
    run_dst,
    start,  # [pairs + 2], written: run i is pairs start[i] to start[i + 1] - 1; the last word is the number of runs
    BLOCK: tl.constexpr,
):
    """Numbers the runs, and writes the first indices of each and where it begins among the pairs."""
    refused = tl.load(status) != 0
    tile, at = own_items(BLOCK)
    valid = (at < pairs) & (refused == 0)
    head = tl.load(heads + at, mask=valid, other=0).to(tl.int64)
    run = sum_of_tiles(sums, tile, BLOCK) + tl.cumsum(head) - head
    begins = head != 0
    tl.store(run_src + run, tl.load(src + at, mask=begins, other=0), mask=begins)
    tl.store(run_dst + run, tl.load(dst + at, mask=begins, other=0), mask=begins)
    tl.store(start + run, at, mask=begins)
    last = (tile == tl.num_programs(0) - 1) & (refused == 0)
    runs = sum_of_tiles(sums, tl.num_programs(0), BLOCK)
    tl.store(start + runs, pairs, mask=last)
    tl.store(start + pairs + 1, tl.where(refused, 0, runs), mask=tile == tl.num_programs(0) - 1)


@triton.jit
def runs_before(start, runs, pairs_leap, pair):
    """Number of runs that begin before a pair."""
    found = last_not_above(start, 1, pair * 0, runs, pairs_leap, pair - 1) + 1
    return tl.where((pair > 0) & (runs > 0), found, 0)


@kernel
def finish_kernel(
    start,
    pairs: tl.int64,
    pairs_leap: tl.int64,
    indptr,
    lists: tl.int64,
    status,
    runs,  # [3, pairs]
    run_indptr,  # [lists + 1]
    BLOCK: tl.constexpr,
):
    """Writes the lengths of the runs, zeros behind the last run, and where the runs of each list begin."""
    refused = tl.load(status) != 0
    _, at = own_items(BLOCK)
    total = tl.load(start + pairs + 1)
    run, behind = at < total, (at >= total) & (at < pairs)
    first, after = tl.load(start + at, mask=run, other=0), tl.load(start + at + 1, mask=run, other=0)
    tl.store(runs + 2 * pairs + at, after - first, mask=at < pairs)
    tl.store(runs + at, after * 0, mask=behind)
    tl.store(runs + pairs + at, after * 0, mask=behind)
    cut = tl.load(indptr + at, mask=(at <= lists) & (refused == 0), other=0)
    before = runs_before(start, total, pairs_leap, cut)
    tl.store(run_indptr + at, tl.where(refused & (at == lists), -1, before), mask=at <= lists)


def find_runs(
    src: torch.Tensor, dst: torch.Tensor, indptr: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find the longest stretches in which both indices go up by one; see kvplan.ops.find_runs.

    Where indptr does not rise from 0 to the number of pairs, there are no runs, and the last word of run_indptr is -1.
    """
    check_words(src, "src", src.device)
    check_words(dst, "dst", src.device)
    pairs = src.numel()
    torch._check(pairs == dst.numel(), lambda: f"src and dst must be of one length, not {pairs} and {dst.numel()}")
    if indptr is None:
        indptr = torch.arange(2, device=src.device) * pairs  # made on the device: a copy from the host would wait
    check_words(indptr, "indptr", src.device)
    lists = indptr.numel() - 1
    torch._check(
        lists >= (pairs > 0),
        lambda: f"indptr must rise from 0 to {pairs}, the length of src; it has {indptr.numel()} words",
    )
    runs, run_indptr = src.new_empty((3, pairs)), src.new_empty(lists + 1)
    grid = (tiles(max(pairs, lists + 1)),)
    status = src.new_zeros(1)
    sums, start = src.new_empty(grid[0]), src.new_empty(pairs + 2)
    heads = src.new_empty(pairs, dtype=torch.int8)
    with device_of(src):
        mark_pairs_kernel[grid](src, dst, pairs, indptr, lists, leap(lists), heads, sums, status, **TILED)
        number_kernel[grid](src, dst, heads, sums, pairs, status, runs, runs[1], start, **TILED)
        finish_kernel[grid](start, pairs, leap(pairs), indptr, lists, status, runs, run_indptr, **TILED)
    return runs, run_indptr
