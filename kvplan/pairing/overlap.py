"""Do two regions share a byte? Exact for regions of any stride, and quick for pools whose pages interleave."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..errors import PairingError
from ..layout import Memory, Region

_MOST_STEPS = 1 << 22  # of all comparisons together, a few seconds; only strides that no allocator makes need more


def first_overlap(regions: Sequence[Region], written: Collection[tuple[str, int]]) -> tuple[Region, Region] | None:
    """Two regions of one memory whose pages share a byte, at least one of them `written` (by key), or None.

    n log n for regions of equal stride.
    """
    left = [_MOST_STEPS]
    spaces: defaultdict[Memory, list[Region]] = defaultdict(list)
    for region in regions:
        spaces[region.memory] += _blocks(region)
    for members in spaces.values():
        for cluster in _clusters(members):
            clash = _first_in_cluster(cluster, written, left)
            if clash is not None:
                return clash
    return None


def _blocks(region: Region) -> list[Region]:
    """The region, or where its rows lie apart, a region for each block of bytes that a page has."""
    if not region.scattered:
        return [region]
    block, starts = region.head_bytes, [0]
    for count, stride in region.axes():
        if stride == block and len(starts) == 1:
            block *= count
        else:
            starts = [start + number * stride for number in range(count) for start in starts]
    plain: dict[str, Any] = {"page_bytes": block, "row_bytes": 0, "row_stride": None, "head_stride": None}
    return [dataclasses.replace(region, base=region.base + start, **plain) for start in starts]


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


def _first_in_cluster(
    cluster: list[Region], written: Collection[tuple[str, int]], left: list[int]
) -> tuple[Region, Region] | None:
    """Regions of one stride are disjoint if they are so modulo the stride; only the others are compared in pairs.

    `left[0]`: the steps that may still be made. PairingError when they are used up: a peer says what the regions are.
    """
    if len(cluster) == 1:
        return None
    strides = defaultdict(list)
    for region in cluster:
        strides[region.page_stride or 0].append(region)
    groups = list(strides.items())
    for number, (stride, members) in enumerate(groups):
        rivals = [region for _, others in groups[number + 1 :] for region in others]
        if not _apart_on_circle(members, stride):
            rivals += members
        for one, other in itertools.product(members, rivals):
            matters = one.key in written or other.key in written
            _step(left, 1, one, other)
            if matters and one.key != other.key and _share_a_byte(one, other, left):
                return one, other
    return None


def _apart_on_circle(members: list[Region], stride: int) -> bool:
    arcs = sorted((region.base % stride, region.page_bytes) for region in members)
    arcs.append((arcs[0][0] + stride, 0))
    return all(here + size <= there for (here, size), (there, _) in itertools.pairwise(arcs))


def _share_a_byte(a: Region, b: Region, left: list[int]) -> bool:
    """Whether page i of a meets page j of b for some i, j.

    Let r be (address of a page of a - b.base) modulo b's stride. The page shares a byte with b iff r < b.page_bytes, or
    r + a.page_bytes > b's stride: then it reaches the next page of b. From one page of a to the next, r repeats with
    the period b's stride / gcd of both strides. Over a period it takes every value that is equal modulo the gcd.
    """
    if a.base + a.span_bytes <= b.base or b.base + b.span_bytes <= a.base:
        return False
    if a.num_pages > b.num_pages:
        a, b = b, a
    a_stride, b_stride = a.page_stride or 0, b.page_stride or 0
    # Pages of a that reach into the span of b.
    first = max(0, (b.base - a.base - a.page_bytes) // a_stride + 1)
    last = min(a.num_pages - 1, (b.base + b.span_bytes - a.base - 1) // a_stride)
    divisor = math.gcd(a_stride, b_stride)
    offset = a.base + first * a_stride - b.base
    if last - first + 1 >= b_stride // divisor:
        rest = offset % divisor
        return rest < b.page_bytes or b_stride - divisor + rest + a.page_bytes > b_stride
    _step(left, max(0, last - first + 1), a, b)
    return any(
        (offset + i * a_stride) % b_stride < b.page_bytes
        or (offset + i * a_stride) % b_stride + a.page_bytes > b_stride
        for i in range(last - first + 1)
    )


def _step(left: list[int], steps: int, a: Region, b: Region) -> None:
    left[0] -= steps
    if left[0] < 0:
        raise PairingError(
            f"cannot decide whether {a} and {b} overlap: their strides {a.page_stride} and {b.page_stride} need too "
            f"many comparisons; give them equal strides"
        )
