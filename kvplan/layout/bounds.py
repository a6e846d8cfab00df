"""How many pages a region can have at most, where its owner does not say."""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence

from .region import ADDRESS_END, Memory, Region

_MOST_PAGES = 1 << 31


def bounded(regions: Sequence[Region]) -> list[Region]:
    """The regions, with a bound for each `num_pages` that is None; see `Layout`."""
    bases: dict[Memory, list[int]] = defaultdict(list)
    for region in regions:
        bases[region.memory].append(region.base)
    for column in bases.values():
        column.sort()
    return [region if region.num_pages else _bounded(region, bases[region.memory]) for region in regions]


def _bounded(region: Region, bases: Sequence[int]) -> Region:
    stride: int = region.page_stride  # type: ignore[assignment]
    at = bisect_left(bases, region.base + stride)
    end = bases[at] if at < len(bases) else ADDRESS_END
    pages = (end - region.base - region.page_bytes) // stride + 1
    return dataclasses.replace(region, num_pages=min(pages, _MOST_PAGES))
