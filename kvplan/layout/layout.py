"""Layouts: all regions of one process (one rank), as its peers see them."""

from __future__ import annotations

import functools
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import LayoutError, listed, quoted
from . import wire
from .bounds import bounded
from .region import INT64_END, Memory, Region, integer, replica_of


class Layout:
    """All regions of one process (one rank), as its peers see them.

    Args:
        regions: `Region`s with distinct (name, layer). Regions of one space share one page table, so they must cover
            the same number of tokens a page.
            A region whose `num_pages` is None gets a bound: the pages that fit before the next region of that memory
            begins, or, where none follows, before 64-bit addresses and 2^31 page ids end. A base within the region's
            first `page_stride` is no end of it: such regions interleave.
        page_size: tokens per page where a region does not say otherwise.
        replica: (index, count): `count` ranks hold these same bytes, this one is number `index`. On a source layout
            each region is sent by exactly one of them. A region may have a replica of its own.

    Raises:
        LayoutError: two regions share (name, layer), or a space covers unequal numbers of tokens a page.

    Attributes:
        unsized: keys of the regions whose `num_pages` is such a bound, and no number that their owner gave.
    """

    def __init__(self, regions: Iterable[Region], *, page_size: int, replica: tuple[int, int] = (0, 1)) -> None:
        self.page_size = integer(page_size, "page_size", 1, INT64_END)
        self.replica = replica_of(replica, "replica")
        regions = [region.resolved(self.page_size) for region in regions]
        self.unsized = frozenset(region.key for region in regions if region.num_pages is None)
        self.regions: tuple[Region, ...] = tuple(bounded(regions) if self.unsized else regions)
        self.by_key: dict[tuple[str, int], Region] = {}
        tokens: dict[str, Region] = {}
        for region in self.regions:
            if self.by_key.setdefault(region.key, region) is not region:
                raise LayoutError(f"{region} is there twice")
            first = tokens.setdefault(region.space, region)
            if first.tokens != region.tokens:
                raise LayoutError(
                    f"space {quoted(region.space)}: {first} covers {first.tokens} tokens a page and {region} covers "
                    f"{region.tokens}; one space has one page table"
                )
        self.spaces: tuple[str, ...] = tuple(tokens)

    def __repr__(self) -> str:
        return f"Layout({len(self.regions)} regions, page_size={self.page_size}, spaces: {listed(self.spaces)})"

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        mine = (self.regions, self.page_size, self.replica)
        return mine == (other.regions, other.page_size, other.replica)

    __hash__ = None  # type: ignore[assignment]

    @functools.cached_property
    def bases(self) -> array[int]:
        """Addresses at which its regions begin, as unsigned 64-bit words: ascending, none twice."""
        return array("Q", sorted({region.base for region in self.regions}))

    def memory_spans(self) -> list[tuple[Memory, int, int]]:
        """What an engine must register: sorted (memory, base, nbytes), the fewest that hold all regions.

        An allocation is one span (see `Region.allocation`), and spans that overlap are joined. Spans that only touch
        stay apart: they may be two allocations, which no engine can register as one.

        Raises:
            LayoutError: it is not known how many pages a region has.
        """
        for region in self.regions:
            if region.key in self.unsized:
                raise LayoutError(f"{region}: num_pages is not given, so it is not known where its memory ends")
        spans: list[tuple[Memory, int, int]] = []
        found = {(region.memory, *_span(region)) for region in self.regions}
        for memory, base, nbytes in sorted(found, key=lambda span: (span[0].kind, span[0].device, *span[1:])):
            if spans and spans[-1][0] == memory and base < spans[-1][1] + spans[-1][2]:
                first = spans[-1][1]
                spans[-1] = (memory, first, max(spans[-1][2], base + nbytes - first))
            else:
                spans.append((memory, base, nbytes))
        return spans

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping. `Layout.from_dict` reads it back."""
        return wire.write(self.regions, self.page_size, self.replica, self.unsized)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """The layout that `to_dict` wrote. Everything that comes from a peer is checked.

        Whatever JSON value is given, no other error than LayoutError is raised. At most 65,536 regions are read.

        Raises:
            LayoutError: a field is missing, or of the wrong type or value; or what the sender requires is not known.
        """
        regions, page_size, replica = wire.read(data)
        return cls(regions, page_size=page_size, replica=replica)

    @classmethod
    def from_columns(
        cls,
        names: Sequence[str],
        layers: Sequence[int],
        bases: Sequence[int],
        page_bytes: Sequence[int],
        num_pages: Sequence[int | None] | int | None,
        *,
        page_size: int,
        replica: tuple[int, int] = (0, 1),
        **fields: Any,
    ) -> Layout:
        """A layout from columns, one item a region, as serving stacks hold them.

        Args:
            names, layers, bases, page_bytes: lists of one length: see `Region`.
            num_pages: such a list, or what all regions have; None where a peer does not say.
            page_size, replica: see `Layout`.
            fields: further fields of `Region`: a list gives one value a region, anything else is what all have.

        Raises:
            LayoutError: lists of unequal length; or as `Region` and `Layout`.
        """
        given = {"layer": layers, "base": bases, "page_bytes": page_bytes, "num_pages": num_pages} | fields
        columns = {field: list(column) for field, column in given.items() if isinstance(column, (list, tuple))}
        alike = {field: value for field, value in given.items() if field not in columns}
        for field, column in columns.items():
            if len(column) != len(names):
                raise LayoutError(f"{field} has {len(column)} items, and there are {len(names)} names")
        rows = zip(*columns.values(), strict=True)
        regions = [Region(name, **dict(zip(columns, row, strict=True)), **alike)
                   for name, row in zip(names, rows, strict=True)]  # fmt: skip
        return cls(regions, page_size=page_size, replica=replica)

    # Constructors for known models; defined in models.py, which needs Layout.
    deepseek_v4: ClassVar[Callable[..., Layout]]
    mla: ClassVar[Callable[..., Layout]]
    mha: ClassVar[Callable[..., Layout]]


def _span(region: Region) -> tuple[int, int]:
    """(base, bytes) to register for a region: its allocation, where it says so."""
    if region.allocation is None:
        return region.base, region.span_bytes
    base, nbytes = region.allocation
    if region.base < base or region.base + region.span_bytes > base + nbytes:
        raise LayoutError(
            f"{region}: its {region.span_bytes} bytes from {region.base:#x} are not within its allocation of {nbytes} "
            f"bytes from {base:#x}"
        )
    return base, nbytes
