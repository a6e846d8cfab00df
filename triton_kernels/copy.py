"""Carries out descriptors. The Triton counterpart of csrc/cuda/copy.cuh.

The bytes of each descriptor are cut into tiles, and each program copies an equal share of all tiles in a row. So no
program has much more to do than another, however unequal the descriptors are, and each searches only once for where its
share begins.
"""

import torch
import triton
import triton.language as tl

from .arith import last_not_above
from .launch import TILED, check_words, device_of, kernel, leap, tiles
from .scan import own_items, place_items_kernel

TILE = 16384  # bytes
LANES = 2048  # words a program loads before it stores them
PROGRAMS = 1024  # of the copy: several for each multiprocessor of any GPU


@triton.jit
def valid_count(count, room):
    """Number of descriptors to carry out: `count`, or 0 where count is not from 0 to room.

    The caller passes the last word of a plan's info, or the count of an expansion, which is -1 where that is refused.
    """
    found = room
    if count is not None:
        found = tl.load(count)
    return tl.where((found >= 0) & (found <= room), found, 0)


@kernel
def count_tiles_kernel(
    table,  # [3, room]
    room: tl.int64,
    count,  # [1], or None: all of the table
    starts,  # [room + 1], written: the number of tiles of each descriptor
    sums,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tile, at = own_items(BLOCK)
    nbytes = tl.load(table + 2 * room + at, mask=at < valid_count(count, room), other=0).to(tl.uint64)
    found = (nbytes // TILE + (nbytes % TILE != 0).to(tl.uint64)).to(tl.int64)
    tl.store(starts + at, found, mask=at < room)
    tl.store(sums + tile, tl.sum(found))


@triton.jit
def copy_bytes(src, dst, first, last, LANES: tl.constexpr):
    """Copies bytes first to last - 1; these are fewer than LANES."""
    at = first + tl.arange(0, LANES)
    held = tl.load(src.to(tl.pointer_type(tl.uint8)) + at, mask=at < last)
    tl.store(dst.to(tl.pointer_type(tl.uint8)) + at, held, mask=at < last)


@triton.jit
def copy_words(src, dst, nbytes, WORD: tl.constexpr, WIDTH: tl.constexpr, ALIGN: tl.constexpr, LANES: tl.constexpr):
    """Copies bytes in words of WIDTH bytes. Both addresses must be equal modulo ALIGN.

    The words begin at the first multiple of ALIGN; the bytes before them and behind them are copied one by one.
    """
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
    """Copies bytes in the widest words to which both addresses can be aligned at once.

    Which these are, the lowest bit in which the addresses differ says.
    """
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
    starts,  # [room + 1]: the first tile of each descriptor; the last word is the number of tiles
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
    at = last_not_above(starts, 1, program * 0, room, room_leap, tile)
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
    """The table for tensors that lie elsewhere than it says: each address within a moved tensor follows the tensor.

    A home is where a tensor lay when the table was made. Source addresses are looked up among the homes of `read`, and
    of those tensors in `written` that share no home with one in `read`. Rarely needed, hence in plain torch.
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
        for tensor, home in reversed(moved):  # where homes overlap, the first tensor counts
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            offset = before - home
            size = (last + 1) * tensor.element_size()
            inside = (offset >= 0) & (offset < size)
            after = torch.where(inside, offset + signed(tensor.data_ptr()), after)
            # A range that begins inside and ends outside is not copied, unless another tensor there holds it whole.
            fits = (table[2] >= 0) & (table[2] <= size - offset)
            nbytes = torch.where(inside, torch.where(fits, table[2], 0), nbytes)
        table = table.clone()
        table[row], table[2] = after, nbytes
    return table


def signed(address: int) -> int:
    """An unsigned 64-bit address as the int64 with the same bits."""
    return address - (1 << 64) if address >= 1 << 63 else address


def copy_(
    table: torch.Tensor,
    count: torch.Tensor | None,
    read: list[torch.Tensor],
    written: list[torch.Tensor],
    homes: list[int],
) -> None:
    """Carry out the first `count` descriptors of a table; see kvplan.ops.copy_.

    Nothing moves where count is not from 0 to the number of descriptors in the table.
    """
    torch._check(
        len(homes) == len(read) + len(written),
        lambda: f"homes must have an address for each tensor, not {len(homes)} for {len(read) + len(written)}",
    )
    check_words(table, "table", table.device)
    torch._check(table.dim() == 2 and table.shape[0] == 3, lambda: f"table must be [3, N], not {list(table.shape)}")
    table = relocated(table, read, written, homes)
    if count is not None:
        check_words(count, "count", table.device)
        torch._check(count.numel() == 1, lambda: f"count must be one number, not {count.numel()}")
    room = table.shape[1]
    if room == 0:
        return
    grid = (tiles(room),)
    starts, sums = table.new_empty(room + 1), table.new_empty(grid[0])
    programs = 3 if table.is_cpu else PROGRAMS  # the interpreter runs programs one after another
    with device_of(table):
        count_tiles_kernel[grid](table, room, count, starts, sums, TILE=TILE, **TILED)
        place_items_kernel[grid](starts, sums, room, **TILED)
        copy_kernel[(programs,)](table, room, starts, leap(room), TILE=TILE, LANES=LANES)
