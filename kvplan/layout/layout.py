"""Layouts: all regions of one process (one rank), as its peers see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from ..errors import LayoutError, listed, quoted, shown
from . import wire
from .region import INT64_END, Memory, Region, integer


class Layout:
    """All regions of one process (one rank), as its peers see them.

    Args:
        regions: `Region`s with distinct (name, layer). Regions of one space share one page table, so they must cover
            the same number of tokens a page.
        page_size: tokens per page where a region does not say otherwise.
        replica: (index, count): `count` ranks hold these same bytes, this one is number `index`. On a source layout
            each region is sent by exactly one of them.

    Raises:
        LayoutError: two regions share (name, layer), or a space covers unequal numbers of tokens a page.
    """

    def __init__(self, regions: Iterable[Region], *, page_size: int, replica: tuple[int, int] = (0, 1)) -> None:
        self.page_size = integer(page_size, "page_size", 1, INT64_END)
        if not isinstance(replica, Sequence) or len(replica) != 2:
            raise LayoutError(f"replica must be (index, count), not {shown(replica)}")
        count = integer(replica[1], "replica count", 1, 1 << 31)
        self.replica = (integer(replica[0], "replica index", 0, count), count)
        self.regions: tuple[Region, ...] = tuple(region.resolved(self.page_size) for region in regions)
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

    def memory_spans(self) -> list[tuple[Memory, int, int]]:
        """What an engine must register: sorted (memory, base, nbytes), spans that overlap joined.

        Spans that only touch stay apart: they may be two allocations, which no engine can register as one.
        """
        spans: list[tuple[Memory, int, int]] = []
        order = sorted(self.regions, key=lambda r: (r.memory.kind, r.memory.device, r.base))
        for region in order:
            if spans and spans[-1][0] == region.memory and region.base < spans[-1][1] + spans[-1][2]:
                memory, base, nbytes = spans[-1]
                spans[-1] = (memory, base, max(nbytes, region.base + region.span_bytes - base))
            else:
                spans.append((region.memory, region.base, region.span_bytes))
        return spans

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able mapping. `Layout.from_dict` reads it back."""
        return wire.write(self.regions, self.page_size, self.replica)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Layout:
        """The layout that `to_dict` wrote. Everything that comes from a peer is checked.

        Whatever JSON value is given, no other error than LayoutError is raised. At most 65,536 regions are read.

        Raises:
            LayoutError: a field is missing, unknown, or of the wrong type or value.
        """
        regions, page_size, replica = wire.read(data)
        return cls(regions, page_size=page_size, replica=replica)

    # Constructors for known models; defined in models.py, which needs Layout.
    deepseek_v4: ClassVar[Callable[..., Layout]]
    mla: ClassVar[Callable[..., Layout]]
    mha: ClassVar[Callable[..., Layout]]
