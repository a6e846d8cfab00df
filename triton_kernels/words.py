"""What the kernels of all stages stand on: where words lie in structs (csrc/entry.h, csrc/job.h), searches and sums.

Sums over more than one program are made in two launches, the first of which leaves the sum of each tile in `sums`: no
program ever waits for another.
"""

import contextlib
import inspect

import torch
import triton
import triton.language as tl

BLOCK = 1024  # items a program
TILED = {"BLOCK": BLOCK, "num_warps": 8}  # four items a lane where a warp has 32: more would not stay in registers

# Words of a struct.
HEADER = tl.constexpr(4)
ENTRY = tl.constexpr(6)
GROUP = tl.constexpr(12)
SPACE = tl.constexpr(6)
JOB_SIZE = tl.constexpr(9)
LIST = tl.constexpr(7)
CHECK = tl.constexpr(8)

MOST_DESCRIPTORS = tl.constexpr(1 << 40)
DST_TWICE = tl.constexpr(3)
ROOM = tl.constexpr(12)
JOB = tl.constexpr(13)
UNKNOWN_JOB = tl.constexpr(1 << 62)  # a status word above any number of places


def kernel(function):
    """`triton.jit` that compiles once for all sizes and alignments: no plan of a new size waits for a compiler."""
    names = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=names)


def tiles(items: int, block: int = BLOCK) -> int:
    """Programs for so many items, at least one."""
    return max(1, -(-items // block))


def leap(rows: int) -> int:
    """First leap of a search among so many rows: the highest power of two that is a row's number, or 0."""
    return 1 << (rows - 1).bit_length() - 1 if rows > 1 else 0


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Makes the tensor's device the one that kernels are launched on."""
    return contextlib.nullcontext() if tensor.is_cpu else torch.accelerator.device_index(tensor.device.index)


def check_words(tensor: torch.Tensor, what: str) -> None:
    """Kernels read words one after another."""
    torch._check(
        tensor.dtype == torch.int64 and tensor.is_contiguous(), lambda: f"{what} must be a contiguous int64 tensor"
    )


def check_here(tensor: torch.Tensor, what: str, device: torch.device, pinned: bool = False) -> None:
    """A kernel reaches what lies on its own device; what it only writes may also be pinned host memory."""
    here = tensor.device == device or (pinned and tensor.is_cpu and (tensor.numel() == 0 or tensor.is_pinned()))
    torch._check(here, lambda: f"{what} must be on {device}" + (" or in pinned memory" if pinned else ""))


@triton.jit
def items_of(tile, BLOCK: tl.constexpr):
    """Numbers of a tile's items, in 64 bits."""
    return tile.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def last_not_above(firsts, stride: tl.constexpr, low, rows, leap, places):
    """Number of the last row from `low` and before `rows` whose first word is not above the place. Rows rise; row `low`
    is taken to begin at or before it. Rows are `stride` words apart; `leap` serves any rows up to twice as many."""
    while leap > 0:
        probe = low + leap
        inside = probe < rows
        first = tl.load(firsts + probe * stride, mask=inside, other=0)
        low = tl.where(inside & (first <= places), probe, low)
        leap = leap >> 1
    return low


@triton.jit
def quotient(a, b):
    """a / b of blocks, for a >= 0, b > 0. 64-bit division takes a GPU some hundred instructions, 32-bit a fifth."""
    if tl.max((a | b) >> 31) == 0:  # noqa: SIM108 (Triton compiles no such expression)
        result = (a.to(tl.int32) // b.to(tl.int32)).to(tl.int64)
    else:
        result = a // b
    return result


@triton.jit
def product(a, b):
    """a * b, and whether it stays in int64, for a, b >= 0."""
    low = a * b
    high = tl.umulhi(a.to(tl.uint64), b.to(tl.uint64))
    return low, (a >= 0) & (b >= 0) & (high == 0) & (low >= 0)


@triton.jit
def total_of(sums, count, BLOCK: tl.constexpr):
    """Sum of the first `count` sums of tiles."""
    lanes = tl.zeros([BLOCK], tl.int64)
    tile = count * 0
    while tile < count:
        at = tile + tl.arange(0, BLOCK)
        lanes += tl.load(sums + at, mask=at < count, other=0)
        tile += BLOCK
    return tl.sum(lanes)


@triton.jit
def place(counts, sums, items, BLOCK: tl.constexpr):
    """Turns this program's tile of `counts` into where each item begins; returns (starts, sum of all counts)."""
    tile = tl.program_id(0)
    at = items_of(tile, BLOCK)
    count = tl.load(counts + at, mask=at < items, other=0)
    start = total_of(sums, tile, BLOCK) + tl.cumsum(count) - count
    tl.store(counts + at, start, mask=at < items)
    return start, total_of(sums, tl.num_programs(0), BLOCK)
