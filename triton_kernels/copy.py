"""Carries out descriptors. The Triton counterpart of csrc/cuda/copy.cuh.

The bytes of all descriptors are cut into tiles, and each program takes an equal share of consecutive ones: however
unequal descriptors are, none is left to one program, nor does a program look for its place more than once.
"""

import torch
import triton
import triton.language as tl

from .words import TILED, check_here, check_words, device_of, items_of, kernel, leap, place, tiles

TILE = 16384  # bytes
LANES = 2048  # words a program has under way
PROGRAMS = 1024  # that copy, several for each multiprocessor of any GPU


@triton.jit
def descriptors_of(count, room):
    """How many descriptors there are; none where count is out of range, which it is where a plan is refused."""
    found = room
    if count is not None:
        found = tl.load(count)
    return tl.where((found >= 0) & (found <= room), found, 0)


@kernel
def count_tiles_kernel(
    table,  # [3, room]
    room: tl.int64,
    count,  # [1] or None: room
    starts,  # [room + 1]: gets the tiles of each descriptor
    sums,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile = tl.program_id(0)
    at = items_of(tile, BLOCK)
    nbytes = tl.load(table + 2 * room + at, mask=at < descriptors_of(count, room), other=0).to(tl.uint64)
    found = (nbytes // TILE + (nbytes % TILE != 0).to(tl.uint64)).to(tl.int64)
    tl.store(starts + at, found, mask=at < room)
    tl.store(sums + tile, tl.sum(found))


@kernel
def place_tiles_kernel(starts, sums, room: tl.int64, BLOCK: tl.constexpr):
    _, total = place(starts, sums, room, BLOCK)
    tl.store(starts + room, total, mask=tl.program_id(0) == 0)


@triton.jit
def copy_bytes(src, dst, first, last, LANES: tl.constexpr):
    """Bytes [first, last) of two places; fewer than LANES."""
    at = first + tl.arange(0, LANES)
    held = tl.load(src.to(tl.pointer_type(tl.uint8)) + at, mask=at < last)
    tl.store(dst.to(tl.pointer_type(tl.uint8)) + at, held, mask=at < last)


@triton.jit
def copy_words(src, dst, nbytes, WORD: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr):
    """[src, src + nbytes) in words of WIDTH bytes, the first at a multiple of ALIGN, modulo which both addresses are
    equal. The ends go byte by byte."""
    head = tl.minimum((-dst) & (ALIGN - 1), nbytes)
    words = ((nbytes - head) & -ALIGN) // WIDTH
    end = head + words * WIDTH
    if ALIGN > 1:
        copy_bytes(src, dst, head * 0, head, ALIGN)
        copy_bytes(src, dst, end, nbytes, ALIGN)
    words = tl.multiple_of(words, ALIGN // WIDTH)
    source = tl.multiple_of((src + head).to(tl.pointer_type(WORD)), ALIGN)
    target = tl.multiple_of((dst + head).to(tl.pointer_type(WORD)), ALIGN)
    done = words * 0
    while done < words:
        done = tl.multiple_of(done, LANES)
        at = done + tl.arange(0, LANES)
        held = tl.load(source + at, mask=at < words)
        tl.store(target + at, held, mask=at < words)
        done += LANES


@triton.jit
def copy_range(src, dst, nbytes, LANES: tl.constexpr):
    """The lowest bit in which the addresses differ bounds the width."""
    apart = src ^ dst
    if apart & 15 == 0:
        copy_words(src, dst, nbytes, tl.int64, 8, 16, LANES)
    elif apart & 7 == 0:
        copy_words(src, dst, nbytes, tl.int64, 8, 8, LANES)
    elif apart & 3 == 0:
        copy_words(src, dst, nbytes, tl.int32, 4, 4, LANES)
    elif apart & 1 == 0:
        copy_words(src, dst, nbytes, tl.int16, 2, 2, LANES)
    else:
        copy_words(src, dst, nbytes, tl.uint8, 1, 1, LANES)


@kernel
def copy_kernel(
    table,
    room: tl.int64,
    starts,
    room_leap: tl.int64,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    program, programs = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    total = tl.load(starts + room)
    each = total // programs
    more = total - each * programs
    tile = program * each + tl.minimum(program, more)
    end = tile + each + (program < more).to(tl.int64)
    at = program * 0
    step = room_leap
    while step > 0:
        probe = at + step
        first = tl.load(starts + probe, mask=probe < room, other=0)
        at = tl.where((probe < room) & (first <= tile), probe, at)
        step = step >> 1
    while tile < end:
        stop = tl.minimum(tl.load(starts + at + 1), end)
        if tile < stop:
            skipped = (tile - tl.load(starts + at)) * TILE
            left = tl.load(table + 2 * room + at) - skipped
            nbytes = tl.minimum(left.to(tl.uint64), ((stop - tile) * TILE).to(tl.uint64)).to(tl.int64)
            copy_range(tl.load(table + at) + skipped, tl.load(table + room + at) + skipped, nbytes, LANES)
            tile = stop
        at += 1


def relocated(
    table: torch.Tensor, read: list[torch.Tensor], written: list[torch.Tensor], homes: list[int]
) -> torch.Tensor:
    """The table with the addresses of tensors that lie elsewhere now; rarely needed, so in plain torch.

    A source is looked for in `read` first, and in `written` where no tensor of that home is in `read`.
    """
    named = set(homes[: len(read)])
    targets = list(zip(written, homes[len(read) :], strict=True))
    sources = [*zip(read, homes, strict=False), *(pair for pair in targets if pair[1] not in named)]
    for row, tensors in ((0, sources), (1, targets)):
        moved = [(tensor, home) for tensor, home in tensors if signed(tensor.data_ptr()) != home and tensor.numel()]
        if not moved:
            continue
        before, nbytes = table[row], table[2].clone()
        after = before.clone()
        for tensor, home in reversed(moved):  # the first that holds an address counts
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            offset = before - home  # as unsigned, below the size: neither negative nor past it
            size = (last + 1) * tensor.element_size()
            inside = (offset >= 0) & (offset < size)
            after = torch.where(inside, offset + signed(tensor.data_ptr()), after)
            # What begins inside and ends outside is not moved; but another tensor of that home may hold it whole.
            fits = (table[2] >= 0) & (table[2] <= size - offset)
            nbytes = torch.where(inside, torch.where(fits, table[2], 0), nbytes)
        table = table.clone()
        table[row], table[2] = after, nbytes
    return table


def signed(address: int) -> int:
    """The bits of an address, as int64."""
    return address - (1 << 64) if address >= 1 << 63 else address


def copy_(
    table: torch.Tensor,
    count: torch.Tensor | None,
    read: list[torch.Tensor],
    written: list[torch.Tensor],
    homes: list[int],
) -> None:
    """Carry out the first `count` descriptors of a table; see kvplan.ops.copy_. Nothing moves where count is out of
    range."""
    torch._check(len(homes) == len(read) + len(written), lambda: "homes must have an address for each tensor")
    table = relocated(table, read, written, homes)
    check_words(table, "table")
    torch._check(table.dim() == 2 and table.shape[0] == 3, lambda: "table must be [3, N]")
    if count is not None:
        check_words(count, "count")
        check_here(count, "count", table.device)
        torch._check(count.numel() == 1, lambda: "count must be one number")
    room = table.shape[1]
    if room == 0:
        return
    grid = (tiles(room),)
    starts, sums = table.new_empty(room + 1), table.new_empty(grid[0])
    programs = 3 if table.is_cpu else PROGRAMS  # the interpreter runs them in turn
    with device_of(table):
        count_tiles_kernel[grid](table, room, count, starts, sums, TILE=TILE, **TILED)
        place_tiles_kernel[grid](starts, sums, room, **TILED)
        copy_kernel[(programs,)](table, room, starts, leap(room), TILE=TILE, LANES=LANES)
