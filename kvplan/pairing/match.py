"""Source regions matched with destination regions: what moves between each pair, before any request is there."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ..errors import PairingError
from ..layout import Heads, Layout, Memory, Region
from .overlap import first_overlap


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


def match(src: Layout, dst: Layout, allow_unsent: Iterable[str]) -> list[Slice]:
    """What this source sends to this destination, in the order of the source's regions. See `kvplan.pair`.

    Raises:
        PairingError: see `kvplan.pair`.
    """
    if not isinstance(src, Layout) or not isinstance(dst, Layout):
        raise TypeError(f"pair takes two Layouts, not {type(src).__name__} and {type(dst).__name__}")
    if isinstance(allow_unsent, str):
        raise TypeError(f"allow_unsent takes a collection of names: ({allow_unsent!r},)")
    unsent = set(allow_unsent)
    for region in src.regions:
        if region.key not in dst.by_key and region.name not in unsent:
            raise PairingError(
                f"source {region} has no destination: the decode layout holds no region of that name and layer. Name "
                f"it in allow_unsent if it is not meant to be sent"
            )
    _check_destinations(dst, [dst.by_key[region.key] for region in src.regions if region.key in dst.by_key])
    index, count = src.replica
    mine = {key for number, key in enumerate(sorted(src.by_key)) if number % count == index}
    slices = []
    for region in src.regions:
        other = dst.by_key.get(region.key)
        if other is not None:
            piece = _slice(region, other)
            if piece is not None and region.key in mine:
                slices.append(piece)
    return _join_neighbours(slices)


def _check_destinations(dst: Layout, written: Sequence[Region]) -> None:
    """No byte of a written region may belong to another region, or it would be written twice, or unasked."""
    clash = first_overlap(dst.regions, {region.key for region in written})
    if clash is not None:
        raise PairingError(f"destination {clash[0]} and {clash[1]} overlap in memory")


def _slice(src: Region, dst: Region) -> Slice | None:
    """The entry of one pair of regions, or None where this source owes this destination nothing."""
    src_heads, dst_heads = _heads(src, dst)
    low, high = max(src_heads.start, dst_heads.start), min(src_heads.stop, dst_heads.stop)
    whole = (
        src_heads == dst_heads
        and (src.tokens, src.rows, src.interleave) == (dst.tokens, dst.rows, dst.interleave)
        and (src.row_bytes == dst.row_bytes or not (src.row_bytes and dst.row_bytes))
        and (src.page_bytes == dst.page_bytes or 0 < src.row_bytes == dst.row_bytes)  # type: ignore[operator]
    )
    if not whole:
        _check_rows(src, dst, src_heads, dst_heads)
    if low >= high:
        return None
    if whole:
        # A page is one row: see Side in csrc/entry.h. Where only the padding differs, the rows move without it.
        nbytes = src.page_bytes if src.page_bytes == dst.page_bytes else src.rows * src.row_bytes  # type: ignore
        side = (1, 0, 1, 1, 1)
        return Slice(
            src.base, src.page_stride, dst.base, dst.page_stride, nbytes, dst.space,  # type: ignore[arg-type]
            (src.tokens, *side, *side), (src.memory, dst.memory), ((src, dst),),  # type: ignore[arg-type]
        )  # fmt: skip
    head_bytes = src.row_bytes // (src_heads.stop - src_heads.start)  # type: ignore[operator]
    src_stride, src_side = _side(src)
    dst_stride, dst_side = _side(dst)
    return Slice(
        src.base + (low - src_heads.start) * head_bytes, src_stride,
        dst.base + (low - dst_heads.start) * head_bytes, dst_stride,
        (high - low) * head_bytes, dst.space, (src.compression, *src_side, *dst_side),
        (src.memory, dst.memory), ((src, dst),),
    )  # fmt: skip


def _heads(src: Region, dst: Region) -> tuple[Heads, Heads]:
    """Head ranges of both, in one total; a region that names none holds all of the other's."""
    total = src.heads.total if src.heads else dst.heads.total if dst.heads else 1
    src_heads, dst_heads = src.heads or Heads(0, total, total), dst.heads or Heads(0, total, total)
    if src_heads.total != dst_heads.total:
        raise PairingError(f"{src}: source counts {src_heads.total} heads in all, destination {dst_heads.total}")
    return src_heads, dst_heads


def _check_rows(src: Region, dst: Region, src_heads: Heads, dst_heads: Heads) -> None:
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
    src_count, dst_count = src_heads.stop - src_heads.start, dst_heads.stop - dst_heads.start
    if src.row_bytes * dst_count != dst.row_bytes * src_count or src.row_bytes % src_count:  # type: ignore[operator]
        raise PairingError(
            f"{src}: {src.row_bytes} bytes a row for {src_count} heads on the source, {dst.row_bytes} for {dst_count} "
            f"on the destination; give row_bytes if a page ends in padding"
        )


def _geometry(region: Region) -> str:
    text = f"{region.page_bytes} bytes, {region.tokens} tokens, {region.rows} rows a page"
    return text + (f", rank {region.interleave.rank} of {region.interleave.size}" if region.interleave else "")


def _side(region: Region) -> tuple[int, tuple[int, ...]]:
    """(stride in bytes, Side of csrc/entry.h): pages and rows counted in the largest step that divides both.

    Without padding that step is one row. With padding it is less, and rows are several steps apart.
    """
    step = math.gcd(region.page_stride, region.row_bytes)  # type: ignore[arg-type]
    interleave = region.interleave
    size, rank = (interleave.size, interleave.rank) if interleave else (1, 0)
    page_step, row_step = region.page_stride // step, region.row_bytes // step  # type: ignore[operator]
    return step, (size, rank, region.rows, page_step, row_step)  # type: ignore[return-value]


def _join_neighbours(slices: list[Slice]) -> list[Slice]:
    """Slices that lie side by side within one stride on both sides become one: a page of many layers moves at once.

    Only within a stride: then both are parts of one buffer, so no descriptor reaches over two registrations.
    """
    alike: dict[tuple[Any, ...], list[Slice]] = {}
    for piece in slices:
        key = (piece.src_stride, piece.dst_stride, piece.space, piece.rule, piece.memories)
        alike.setdefault(key, []).append(piece)
    place = {id(piece): number for number, piece in enumerate(slices)}
    joined: list[tuple[int, Slice]] = []
    for pieces in alike.values():
        pieces.sort(key=lambda piece: piece.src_base)
        for neighbours in _chains(pieces):
            nbytes = sum(piece.nbytes for piece in neighbours)
            regions = tuple(itertools.chain.from_iterable(piece.regions for piece in neighbours))
            where = min(place[id(piece)] for piece in neighbours)
            joined.append((where, dataclasses.replace(neighbours[0], nbytes=nbytes, regions=regions)))
    return [piece for _, piece in sorted(joined, key=lambda item: item[0])]


def _chains(pieces: Sequence[Slice]) -> Iterator[list[Slice]]:
    """Cuts slices, sorted by source and of equal strides, into longest chains that touch on both sides."""
    chain: list[Slice] = []
    src = dst = 0  # where the next piece would touch
    for piece in pieces:
        if chain and (piece.src_base, piece.dst_base) == (src, dst) and _one_buffer(chain[0], piece):
            chain.append(piece)
        else:
            if chain:
                yield chain
            chain = [piece]
        src, dst = piece.src_base + piece.nbytes, piece.dst_base + piece.nbytes
    if chain:
        yield chain


def _one_buffer(first: Slice, last: Slice) -> bool:
    """Whether both lie within one stride of buffers that show a stride, which a buffer of one page does not."""
    within = last.src_base + last.nbytes - first.src_base <= min(first.src_stride, first.dst_stride)
    return within and all(region.num_pages > 1 for piece in (first, last) for region in piece.regions[0])
