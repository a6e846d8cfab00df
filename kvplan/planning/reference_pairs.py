"""The oracle's half that is about layouts: which regions are pairs, and where each head of each row lies in a page.

Written from the definitions, like `reference.py`: it shares no code with what it checks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ..errors import PairingError


@dataclass(frozen=True)
class Pair:
    src: Any
    dst: Any

    def __str__(self) -> str:
        return f"region ({self.src.name!r}, layer {self.src.layer})"

    def total_heads(self) -> int:
        """Of how many heads both sides speak; 1 where neither tells heads apart."""
        for region in (self.src, self.dst):
            if region.heads is not None:
                return int(region.heads.total)
        return 1

    def heads(self, region: Any) -> tuple[int, int]:
        """First head held, and the head after the last."""
        return (0, self.total_heads()) if region.heads is None else (region.heads.start, region.heads.stop)

    def heads_in_common(self) -> list[int]:
        """Heads held on both sides, ascending."""
        there = range(*self.heads(self.dst))
        return [head for head in range(*self.heads(self.src)) if head in there]

    def same_pages(self) -> bool:
        """Whether a page is as many tokens and rows on both sides, and the same of all."""
        return (
            self.src.tokens == self.dst.tokens
            and self.src.rows == self.dst.rows
            and interleave(self.src) == interleave(self.dst)
        )

    def alike(self) -> bool:
        """Whether both sides lay out a page in the same way and in one block, so that pages move whole."""
        src, dst = self.src, self.dst
        if not self.same_pages() or self.heads(src) != self.heads(dst):
            return False
        if not (src.row_bytes and dst.row_bytes) or not (self.has_heads(src) and self.has_heads(dst)):
            return bool(src.order == dst.order and src.page_bytes == dst.page_bytes)
        if src.row_bytes != dst.row_bytes:
            return False
        places = [[self.place(side, row, head) for row, head in self.cells()] for side in (src, dst)]
        extent = src.rows * src.row_bytes
        return places[0] == places[1] and max(places[0]) - min(places[0]) + self.per_head(src) == extent

    def has_heads(self, region: Any) -> bool:
        """Whether one row's heads can be told apart: in order HND nothing can be where heads are not named."""
        return bool(region.order == "NHD" or self.src.heads is not None or self.dst.heads is not None)

    def per_head(self, region: Any) -> int:
        """Bytes of one head of a row."""
        start, stop = self.heads(region)
        return int(region.row_bytes // (stop - start))

    def cells(self) -> list[tuple[int, int]]:
        """(row, head) of everything in a page of the source."""
        return [(row, head) for row in range(self.src.rows) for head in range(*self.heads(self.src))]

    def place(self, region: Any, row: int, head: int) -> int:
        """Bytes from the beginning of a page to one head of one row."""
        first, stop = self.heads(region)
        per_head, row_stride, head_stride = self.per_head(region), region.row_stride, region.head_stride
        if region.order == "NHD":
            row_stride = row_stride or per_head * (stop - first)
            head_stride = head_stride or per_head
        else:
            row_stride = row_stride or per_head
            head_stride = head_stride or region.rows * row_stride
        return int(row * row_stride + (head - first) * head_stride)

    def adjacent(self, cells: list[tuple[int, int]]) -> bool:
        """Whether these (row, head) of a page lie behind one another, without a gap, on both sides."""
        per_head = self.per_head(self.src)
        return all(
            self.place(region, *after) == self.place(region, *before) + per_head
            for region in (self.src, self.dst)
            for before, after in itertools.pairwise(cells)
        )


def interleave(region: Any) -> tuple[int, int, int]:
    """(size, rank, run in tokens)."""
    share = region.interleave
    return (1, 0, 1) if share is None else (share.size, share.rank, share.run)


def run_rows(region: Any) -> int:
    """Rows that lie in one run; at least one."""
    return max(interleave(region)[2] // compression(region), 1)


def compression(region: Any) -> int:
    size, _, _ = interleave(region)
    tokens_per_row, left = divmod(region.tokens, region.rows * size)
    if left or tokens_per_row < 1:
        raise PairingError(
            f"region ({region.name!r}, layer {region.layer}): {region.rows} rows in {size} ranks cannot share "
            f"{region.tokens} tokens"
        )
    return int(tokens_per_row)


def pairs_of(src_layout: Any, dst_layout: Any, allow_unsent: Iterable[Any]) -> list[Pair]:
    """Pairs that this source sends something of, in the order of the source layout. All pairs are checked.

    Page lists are checked only for these pairs: this source owes the others nothing.
    """
    partners = {(region.name, region.layer): region for region in dst_layout.regions}
    held: dict[Any, list[Any]] = {}  # keys of the regions that are held equally often
    for region in sorted(src_layout.regions, key=lambda region: (region.name, region.layer)):
        held.setdefault(region.replica or src_layout.replica, []).append((region.name, region.layer))
    unsent = set(allow_unsent)
    pairs = []
    for region in src_layout.regions:
        key = (region.name, region.layer)
        if key not in partners:
            if region.name in unsent or key in unsent:
                continue
            raise PairingError(f"region ({region.name!r}, layer {region.layer}) has no destination")
        pair = Pair(region, partners[key])
        _check_geometry(pair)
        index, count = region.replica or src_layout.replica
        if held[index, count].index(key) % count == index and pair.heads_in_common():
            pairs.append(pair)
    return pairs


def _check_geometry(pair: Pair) -> None:
    src, dst = pair.src, pair.dst
    if None not in (src.format, dst.format) and src.format != dst.format:
        raise PairingError(f"{pair}: format {src.format!r} here, {dst.format!r} there")
    if compression(src) != compression(dst):
        raise PairingError(f"{pair}: a row covers {compression(src)} tokens here, {compression(dst)} there")
    if src.heads is not None and dst.heads is not None and src.heads.total != dst.heads.total:
        raise PairingError(f"{pair}: {src.heads.total} heads in all here, {dst.heads.total} there")
    if src.row_bytes and dst.row_bytes:
        per_head = []
        for region in (src, dst):
            start, stop = pair.heads(region)
            nbytes, left = divmod(region.row_bytes, stop - start)
            if left:
                raise PairingError(f"{pair}: {region.row_bytes} bytes a row do not divide by {stop - start} heads")
            per_head.append(nbytes)
        if per_head[0] != per_head[1] and not pair.alike():
            raise PairingError(f"{pair}: {per_head[0]} bytes a row and head here, {per_head[1]} there")
    if not pair.alike() and not (src.row_bytes and dst.row_bytes and pair.has_heads(src) and pair.has_heads(dst)):
        raise PairingError(f"{pair}: its rows cannot be told apart, and the two sides store a page differently")
