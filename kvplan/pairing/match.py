"""Source regions matched with destination regions: what moves between each pair, before any request is there."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from ..errors import PairingError
from ..layout import Layout
from ..layout.region import INT64_END, integer
from .overlap import shared_spaces
from .shares import shares
from .slices import Slice, slices

Unsent: TypeAlias = "str | tuple[str, int]"  # regions of this name, or the one of this name and layer


def match(src: Layout, dst: Layout, allow_unsent: Iterable[Unsent]) -> list[Slice]:
    """What this source sends to this destination, in the order of the source's regions. See `kvplan.pair`.

    Raises:
        PairingError: see `kvplan.pair`.
    """
    if not isinstance(src, Layout) or not isinstance(dst, Layout):
        raise TypeError(f"pair takes two Layouts, not {type(src).__name__} and {type(dst).__name__}")
    unsent = named(allow_unsent, "allow_unsent")
    for region in src.regions:
        if region.key not in dst.by_key and region.name not in unsent and region.key not in unsent:
            raise PairingError(
                f"source {region} has no destination: the decode layout holds no region of that name and layer. Name "
                f"it in allow_unsent if it is not meant to be sent"
            )
    shared_spaces(dst, src.by_key.keys() & dst.by_key.keys())  # or a PairingError
    mine = shares(src)
    found: list[Slice] = []
    for region in src.regions:
        other = dst.by_key.get(region.key)
        if other is not None:
            pieces = slices(region, other)
            if region.key in mine:
                found += pieces
    return _join_neighbours(found)


def named(names: Iterable[Unsent], what: str) -> set[Unsent]:
    """`names` as a set; TypeError where an item is neither a name nor (name, layer)."""
    if isinstance(names, str):
        raise TypeError(f"{what} takes a collection of names: ({names!r},)")
    found: set[Unsent] = set()
    for item in names:
        if not isinstance(item, str):
            if not isinstance(item, tuple) or len(item) != 2 or not isinstance(item[0], str):
                raise TypeError(f"{what} takes names and (name, layer) pairs, not {item!r}")
            integer(item[1], f"{what}: layer of {item[0]!r}", -INT64_END, INT64_END)
        found.add(item)
    return found


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
