"""What one pair of regions moves, as entries: whole pages, blocks of heads, rows, or runs of rows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

from ..errors import PairingError, quoted
from ..layout import Heads, Interleave, Memory, Region

_ALL = Heads(0, 1, 1)  # where no heads are told apart
_WHOLE = (1, 0, 1, 1, 1)  # Side of csrc/entry.h: a page is one row


@dataclasses.dataclass(frozen=True)
class Slice:
    """What one pair of regions moves: an entry whose group is still spelled out."""

    src_base: int
    src_stride: int
    dst_base: int
    dst_stride: int
    nbytes: int
    space: str
    rule: tuple[int, ...]  # row of the group table after its space number; see Group in csrc/entry.h
    memories: tuple[Memory, Memory]
    regions: tuple[tuple[Region, Region], ...]


def slices(src: Region, dst: Region) -> list[Slice]:
    """The entries of one pair of regions; none where this source owes this destination nothing.

    Raises:
        PairingError: the two cannot be moved row for row, or their bytes mean different things.
    """
    if src.format is not None and dst.format is not None and src.format != dst.format:
        raise PairingError(
            f"{src}: the source's format is {quoted(src.format)}, the destination's {quoted(dst.format)}"
        )
    pair = (src, dst)
    src, dst = _with_heads(src, dst), _with_heads(dst, src)
    src_heads, dst_heads = src.heads or _ALL, dst.heads or _ALL
    if src_heads.total != dst_heads.total:
        raise PairingError(f"{src}: source counts {src_heads.total} heads in all, destination {dst_heads.total}")
    low, high = max(src_heads.start, dst_heads.start), min(src_heads.stop, dst_heads.stop)
    alike = (src.tokens, src.rows, src.interleave) == (dst.tokens, dst.rows, dst.interleave)
    whole = alike and src_heads == dst_heads and _stored_alike(src, dst)
    if not whole:
        _check_rows(src, dst)
    if low >= high:
        return []
    if whole:
        # Where only the padding differs, the rows move without it.
        nbytes = src.page_bytes if src.page_bytes == dst.page_bytes else src.rows * src.row_bytes  # type: ignore
        src_side, dst_side = (src.page_stride, _WHOLE), (dst.page_stride, _WHOLE)
        found = [_entry(src, dst, 0, 0, nbytes, src_side, dst_side, src.tokens)]  # type: ignore[arg-type]
    else:
        firsts = (low - src_heads.start, low - dst_heads.start)
        found = list((_head_blocks if alike and _head_major(src, dst) else _rows)(src, dst, firsts, high - low))
    if src is pair[0] and dst is pair[1]:
        return found
    return [dataclasses.replace(piece, regions=(pair,)) for piece in found]


def _with_heads(region: Region, other: Region) -> Region:
    """A region that names no heads holds all of the other's."""
    if region.heads is not None or other.heads is None:
        return region
    total = other.heads.total
    if region.row_bytes and region.row_bytes % total:
        raise PairingError(f"{region}: row_bytes {region.row_bytes} are no multiple of the {total} heads of the other")
    return dataclasses.replace(region, heads=Heads(0, total, total))


def _stored_alike(src: Region, dst: Region) -> bool:
    """Whether a page is one block of memory, and the same bytes lie at the same places of it, on both sides."""
    if not (src.row_bytes and dst.row_bytes):
        return src.page_bytes == dst.page_bytes and src.order == dst.order
    if src.scattered or dst.scattered or src.row_bytes != dst.row_bytes:
        return False
    if not (src.has_rows and dst.has_rows):
        return src.page_bytes == dst.page_bytes and src.order == dst.order
    rows_alike = src.rows == 1 or src.row_pitch == dst.row_pitch
    return rows_alike and (src.num_heads == 1 or src.head_pitch == dst.head_pitch)


def _entry(
    src: Region, dst: Region, src_offset: int, dst_offset: int, nbytes: int,
    src_side: tuple[int, tuple[int, ...]], dst_side: tuple[int, tuple[int, ...]], tokens: int,
) -> Slice:  # fmt: skip
    """Of what lies at these offsets in a page; `tokens` is what one step of position stands for."""
    return Slice(
        src.base + src_offset, src_side[0], dst.base + dst_offset, dst_side[0], nbytes, dst.space,
        (tokens, *src_side[1], *dst_side[1]), (src.memory, dst.memory), ((src, dst),),
    )  # fmt: skip


def _head_major(src: Region, dst: Region) -> bool:
    """Whether the rows of one head are one block of memory on both sides."""
    return src.rows == 1 or src.head_bytes == src.row_pitch == dst.row_pitch


def _head_blocks(src: Region, dst: Region, firsts: tuple[int, int], count: int) -> Iterator[Slice]:
    """Pages of one size: all rows of a head at once, and all heads where those are one block as well."""
    block = src.rows * src.head_bytes  # type: ignore[operator]
    sides = (src.page_stride, _WHOLE), (dst.page_stride, _WHOLE)
    for k, held in _pieces(count, src.head_pitch == dst.head_pitch == block):
        offsets = (firsts[0] + k) * src.head_pitch, (firsts[1] + k) * dst.head_pitch
        yield _entry(src, dst, *offsets, held * block, *sides, src.tokens)  # type: ignore[arg-type]


def _rows(src: Region, dst: Region, firsts: tuple[int, int], count: int) -> Iterator[Slice]:
    """Row by row: all heads of a row at once where those lie side by side. Rows of a run move at once where those do.

    A side with interleave (size, rank, run) holds, for each j in [0, run), the positions that are rank * run + j modulo
    size * run: `run` plain interleaves. Positions are counted in units: as many rows as lie in one run, and in one
    page, of both sides.
    """
    runs = [region.run_rows for region in (src, dst) if region.interleave]
    unit: int = math.gcd(*runs, src.rows, dst.rows) if runs else 1  # type: ignore[arg-type]
    phases = list(itertools.product(_phases(src, unit), _phases(dst, unit)))
    # An interleaved list starts at a virtual page, so that two phases hold some position of both, or never one.
    met = [(one, other) for one, other in phases if _meet(one[1][1], other[1][1])] or phases[:1]
    for k, held in _pieces(count, src.head_bytes == src.head_pitch == dst.head_pitch):
        nbytes = held * src.head_bytes
        joined = nbytes == src.row_pitch == dst.row_pitch  # the rows of a unit are one block
        at, to = (firsts[0] + k) * src.head_pitch, (firsts[1] + k) * dst.head_pitch
        for row, ((src_at, src_side), (dst_at, dst_side)) in itertools.product(range(1 if joined else unit), met):
            yield _entry(
                src, dst, at + src_at + row * src.row_pitch, to + dst_at + row * dst.row_pitch,
                nbytes * (unit if joined else 1), src_side, dst_side, unit * src.compression,
            )  # fmt: skip


def _pieces(count: int, together: bool) -> list[tuple[int, int]]:
    """(first, how many) heads that move at once."""
    return [(0, count)] if together else [(k, 1) for k in range(count)]


def _phases(region: Region, unit: int) -> Iterator[tuple[int, tuple[int, tuple[int, ...]]]]:
    """For each plain interleave of a region: (offset of its first unit in a page, (stride in bytes, Side)).

    Pages and units are counted in the largest step that divides both. Without padding that step is one unit. With
    padding it is less, and units are several steps apart.
    """
    share = region.interleave or Interleave(1, 0)
    run = max(region.run_rows // unit, 1)
    pitch: int = unit * region.row_pitch
    units: int = region.rows // (unit * run)  # type: ignore[operator]
    stride: int = region.page_stride  # type: ignore[assignment]
    step = stride if units == 1 else math.gcd(stride, run * pitch)  # a page of one unit has no row steps
    steps = (units, stride // step, 1 if units == 1 else run * pitch // step)
    for j in range(run):
        yield j * pitch, (step, (share.size * run, share.rank * run + j, *steps))


def _meet(src: tuple[int, ...], dst: tuple[int, ...]) -> bool:
    """Whether some position is held by both sides."""
    return (src[1] - dst[1]) % math.gcd(src[0], dst[0]) == 0


def _check_rows(src: Region, dst: Region) -> None:
    """Both sides must mean the same by a row: tokens it stands for, bytes of each head."""
    if src.compression != dst.compression:
        raise PairingError(
            f"{src}: a source row stands for {src.compression} tokens, a destination row for {dst.compression} "
            f"(source {_geometry(src)}; destination {_geometry(dst)})"
        )
    for side, region in (("source", src), ("destination", dst)):
        if not region.row_bytes:
            raise PairingError(
                f"{src}: pages differ (source {_geometry(src)}; destination {_geometry(dst)}) and the size of "
                f"one row of the {side} is unknown, so rows cannot be copied one by one; give row_bytes"
            )
        if not region.has_rows:
            raise PairingError(
                f"{src}: the {side} has order 'HND' and names no heads, so rows cannot be copied one by one; give heads"
            )
    if src.row_bytes * dst.num_heads != dst.row_bytes * src.num_heads:  # type: ignore[operator]
        raise PairingError(
            f"{src}: {src.row_bytes} bytes a row for {src.num_heads} heads on the source, {dst.row_bytes} for "
            f"{dst.num_heads} on the destination"
        )


def _geometry(region: Region) -> str:
    text = f"{region.page_bytes} bytes, {region.tokens} tokens, {region.rows} rows a page"
    if region.interleave:
        run = f" in runs of {region.interleave.run} tokens" if region.interleave.run > 1 else ""
        text += f", rank {region.interleave.rank} of {region.interleave.size}{run}"
    return text + (f", order {region.order}" if region.order != "NHD" else "")
