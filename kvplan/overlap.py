"""Do two regions share a byte? Exact for regions of any stride, and quick for pools whose pages interleave."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence

from .layout import Region


def first_overlap(regions: Sequence[Region]) -> tuple[Region, Region] | None:
    """Two regions of one memory whose pages share a byte, or None. n log n for regions of equal stride."""
    spaces = defaultdict(list)
    for region in regions:
        spaces[region.memory].append(region)
    for members in spaces.values():
        for cluster in _clusters(members):
            clash = _first_in_cluster(cluster)
            if clash is not None:
                return clash
    return None


def _clusters(regions: Iterable[Region]) -> Iterable[list[Region]]:
    """Regions whose spans overlap, directly or through others."""
    cluster: list[Region] = []
    end = -1
    for region in sorted(regions, key=lambda region: region.base):
        if cluster and region.base >= end:
            yield cluster
            cluster = []
        cluster.append(region)
        end = max(end, region.base + region.span_bytes)
    if cluster:
        yield cluster


def _first_in_cluster(cluster: list[Region]) -> tuple[Region, Region] | None:
    """Regions of one stride are disjoint if they are so modulo the stride; only the others are compared in pairs."""
    if len(cluster) == 1:
        return None
    strides = defaultdict(list)
    for region in cluster:
        strides[region.page_stride or 0].append(region)
    for stride, members in strides.items():
        if not _apart_on_circle(members, stride):
            clash = _first_pair(members, members)
            if clash is not None:
                return clash
    groups = list(strides.values())
    for number, members in enumerate(groups):
        for others in groups[number + 1 :]:
            clash = _first_pair(members, others)
            if clash is not None:
                return clash
    return None


def _apart_on_circle(members: list[Region], stride: int) -> bool:
    arcs = sorted((region.base % stride, region.page_bytes) for region in members)
    arcs.append((arcs[0][0] + stride, 0))
    return all(here + size <= there for (here, size), (there, _) in itertools.pairwise(arcs))


def _first_pair(ones: list[Region], others: list[Region]) -> tuple[Region, Region] | None:
    for one in ones:
        for other in others:
            if one is not other and _share_a_byte(one, other):
                return one, other
    return None


def _share_a_byte(a: Region, b: Region) -> bool:
    """Whether page i of a meets page j of b for some i, j: walks over the pages of the region that has fewer."""
    if a.base + a.span_bytes <= b.base or b.base + b.span_bytes <= a.base:
        return False
    if a.num_pages > b.num_pages:
        a, b = b, a
    for i in range(a.num_pages):
        start = a.base + i * a.page_stride  # type: ignore[operator]
        # The first page of b that ends behind `start`: the only candidate that begins before a's page ends, or none.
        j = max(0, (start - b.base - b.page_bytes) // b.page_stride + 1)  # type: ignore[operator]
        if j < b.num_pages and b.base + j * b.page_stride < start + a.page_bytes:  # type: ignore[operator]
            return True
    return False
