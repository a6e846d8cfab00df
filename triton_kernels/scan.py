"""Sums over all programs of a launch. The Triton counterpart of csrc/cuda/scan.cuh.

A sum takes two launches: in the first each program stores the sum of its own tile in `sums`, in the second it adds up
the sums of the tiles before its own. So no program ever waits for another.
"""

import triton
import triton.language as tl

from .launch import kernel


@triton.jit
def tile_items(tile, BLOCK: tl.constexpr):
    """Numbers of the items in a tile, as int64."""
    return tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def own_items(BLOCK: tl.constexpr):
    """(this program's tile, numbers of the items in it)."""
    tile = tl.program_id(0)
    return tile, tile_items(tile, BLOCK)


@triton.jit
def sum_of_tiles(sums, count, BLOCK: tl.constexpr):
    """Sum of the first `count` words of `sums`."""
    lanes = tl.zeros([BLOCK], tl.int64)
    tile = count * 0
    while tile < count:
        at = tile + tl.arange(0, BLOCK)
        lanes += tl.load(sums + at, mask=at < count, other=0)
        tile += BLOCK
    return tl.sum(lanes)


@triton.jit
def place_items(counts, sums, items, BLOCK: tl.constexpr):
    """Replaces the counts of this program's items with where each item begins: the sum of all counts before it.

    Returns (where each item begins, sum of all counts).
    """
    tile, at = own_items(BLOCK)
    count = tl.load(counts + at, mask=at < items, other=0)
    start = sum_of_tiles(sums, tile, BLOCK) + tl.cumsum(count) - count
    tl.store(counts + at, start, mask=at < items)
    return start, sum_of_tiles(sums, tl.num_programs(0), BLOCK)


@kernel
def place_items_kernel(
    counts,  # [items + 1]: counts before, where each item begins after; the last word gets the sum of all counts
    sums,
    items: tl.int64,
    BLOCK: tl.constexpr,
):
    _, total = place_items(counts, sums, items, BLOCK)
    tl.store(counts + items, total, mask=tl.program_id(0) == 0)
