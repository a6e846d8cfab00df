"""Blocks of one stride, laid on a circle as long as the stride: which of them share a byte, and page for page.

A block is what each page of a region has at one place, `nbytes` at `base + page * stride`. Where some place of the
circle lies within no block, that place is where pages begin: then a block is an arc, at a place within the page, and a
range of such pages. Two blocks meet where arcs and ranges both overlap, and then page for page.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from ..errors import PairingError
from ..layout import Region

Shared = list[tuple[Region, Region, int]]  # page i of the first and page i + shift of the second meet
Clash = tuple[Region, Region]

_MOST_STEPS = 1 << 22  # of all comparisons together, a few seconds; only strides that no allocator makes need more


class Block(NamedTuple):
    """One block of bytes of every page of a region."""

    base: int
    nbytes: int
    stride: int
    pages: int
    region: Region

    @property
    def end(self) -> int:
        """The address behind the last page."""
        return self.base + (self.pages - 1) * self.stride + self.nbytes


class Steps:
    """Counts the comparisons. A peer says what the regions are, so their number has an end."""

    def __init__(self) -> None:
        self.left = _MOST_STEPS

    def take(self, steps: int, a: Block, b: Block) -> None:
        """Raises PairingError: too many have been made."""
        self.left -= steps
        if self.left < 0:
            raise PairingError(
                f"cannot decide whether {a.region} and {b.region} overlap: that takes too many comparisons. Give "
                f"regions that share memory equal strides ({a.stride} and {b.stride} here) and page boundaries"
            )


def blocks_of(region: Region) -> list[Block]:
    """One block, or where the rows of a page lie apart, one for each stretch of bytes that a page has."""
    nbytes, starts = region.page_bytes, [0]
    if region.scattered:
        nbytes = region.head_bytes
        for count, pitch in region.axes():
            if pitch == nbytes and len(starts) == 1:
                nbytes *= count
            else:
                starts = [start + number * pitch for number in range(count) for start in starts]
    stride: int = region.page_stride  # type: ignore[assignment]
    if region.num_pages == 1:
        stride = max(stride, nbytes)  # a single page has no stride
    return [Block(region.base + start, nbytes, stride, region.num_pages, region) for start in starts]


def first_on_circle(
    blocks: Sequence[Block], stride: int, written: Collection[tuple[str, int]], steps: Steps, shared: Shared
) -> Clash | None:
    """Two blocks of this stride that share a byte, at least one of them `written`, or None.

    Blocks of two spaces that meet page for page go to `shared`; see `first_overlap`.
    """
    if len(blocks) == 1:
        return None
    origin = _page_start(blocks, stride)
    if origin is None:
        return _in_pairs(blocks, stride, written, steps, shared)
    arcs = [
        _Arc((block.base - origin) % stride, (block.base - origin) // stride, number, block)
        for number, block in enumerate(blocks)
    ]
    arcs.sort()
    over: dict[tuple[int, int], _Range] = {}  # ranges of pages that have arcs at the place that is looked at
    ends: list[tuple[int, int, _Arc]] = []
    for arc in arcs:
        while ends and ends[0][0] <= arc.start:
            _remove(over, heapq.heappop(ends)[2], written)
        for pages in over.values():
            steps.take(1, arc.block, pages.any().block)
            if pages.first < arc.first + arc.block.pages and arc.first < pages.stop:
                clash = pages.meet(arc, arc.block.region.key in written, steps, shared)
                if clash is not None:
                    return clash
        key = (arc.first, arc.block.pages)
        over.setdefault(key, _Range(arc.first, arc.first + arc.block.pages)).add(arc, written)
        heapq.heappush(ends, (arc.start + arc.block.nbytes, arc.number, arc))
    return None


class _Arc(NamedTuple):
    start: int  # within a page
    first: int  # number of the page in which page 0 of the block lies
    number: int
    block: Block


@dataclasses.dataclass
class _Range:
    """Arcs of the same pages that all lie over one place, so that they all meet, by their spaces."""

    first: int
    stop: int
    written: dict[str, _Arc] = dataclasses.field(default_factory=dict)  # two of one space would be a clash
    others: dict[str, list[_Arc]] = dataclasses.field(default_factory=dict)

    def any(self) -> _Arc:
        return next(self._all())

    def _all(self) -> Iterator[_Arc]:
        return itertools.chain(self.written.values(), itertools.chain.from_iterable(self.others.values()))

    def add(self, arc: _Arc, written: Collection[tuple[str, int]]) -> None:
        region = arc.block.region
        if region.key in written:
            self.written[region.space] = arc
        else:
            self.others.setdefault(region.space, []).append(arc)

    def meet(self, arc: _Arc, is_written: bool, steps: Steps, shared: Shared) -> Clash | None:
        """Two regions of one space, or None: then `arc` is tied to these, where one of two is written.

        If some arc here is written, all are tied to it already, and a tie to it is enough.
        """
        region = arc.block.region
        same = [self.written[region.space]] if region.space in self.written else []
        if is_written:
            same += self.others.get(region.space, [])
        if same:
            return same[0].block.region, region
        met: Iterable[_Arc] = itertools.islice(self.written.values(), 1)
        if is_written and not self.written:
            met = self._all()
        for other in met:
            steps.take(1, arc.block, other.block)
            shared.append((other.block.region, region, other.first - arc.first))
        return None


def _remove(over: dict[tuple[int, int], _Range], arc: _Arc, written: Collection[tuple[str, int]]) -> None:
    key, region = (arc.first, arc.block.pages), arc.block.region
    pages = over[key]
    if region.key in written:
        del pages.written[region.space]
    else:
        pages.others[region.space].remove(arc)
        if not pages.others[region.space]:
            del pages.others[region.space]
    if not pages.written and not pages.others:
        del over[key]


def _page_start(blocks: Iterable[Block], stride: int) -> int | None:
    """A place of the circle that lies within no block, or None."""
    arcs = sorted((block.base % stride, block.nbytes) for block in blocks)
    end = max(start + nbytes for start, nbytes in arcs) - stride  # how far the last ones reach past the start
    for start, nbytes in arcs:
        if start >= end:
            return start
        end = max(end, start + nbytes)
    return None


def _in_pairs(
    blocks: Sequence[Block], stride: int, written: Collection[tuple[str, int]], steps: Steps, shared: Shared
) -> Clash | None:
    """As `first_on_circle`, where blocks cover the whole circle: page boundaries of two spaces differ."""
    for a, b in itertools.combinations(blocks, 2):
        steps.take(1, a, b)
        matters = a.region.key in written or b.region.key in written
        if not matters or a.region.key == b.region.key or a.end <= b.base or b.end <= a.base:
            continue
        # Page i of a meets page i + shift of b for least <= shift <= most.
        least, most = (a.base - b.base - b.nbytes) // stride + 1, (a.base - b.base + a.nbytes - 1) // stride
        least, most = max(least, 1 - a.pages), min(most, b.pages - 1)
        if least > most:
            continue
        if least < most or a.region.space == b.region.space:
            return a.region, b.region
        shared.append((a.region, b.region, least))
    return None
