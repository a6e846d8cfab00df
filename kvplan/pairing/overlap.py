"""Do two regions share a byte? Exact for regions of any stride, and quick for pools whose pages interleave.

Regions of two spaces may share memory where each page of one meets one page of the other: groups of layers with page
tables of their own over one buffer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..errors import PairingError, quoted
from ..layout import Layout, Memory, Region

_MOST_STEPS = 1 << 22  # of all comparisons together, a few seconds; only strides that no allocator makes need more


Shared = list[tuple[Region, Region, int]]  # page i of the first and page i + shift of the second meet


def shared_spaces(dst: Layout, written: Collection[tuple[str, int]]) -> dict[str, tuple[str, int]]:
    """Which destination spaces share memory, where at least one of two regions is `written` (by key).

    Returns:
        for each such space, the first space of those that share with it, directly or through others, and a shift in
        pages, 0 or more: ids of two of them name one physical page where id + shift is equal.

    Raises:
        PairingError: two regions overlap otherwise. Then a byte could be written twice, or unasked.
    """
    shared: Shared = []
    clash = first_overlap(dst.regions, written, shared)
    if clash is not None:
        raise _overlap(*clash)
    ties: dict[str, list[tuple[str, int, Region, Region]]] = defaultdict(list)
    for a, b, shift in shared:
        ties[a.space].append((b.space, shift, a, b))
        ties[b.space].append((a.space, -shift, b, a))
    found: dict[str, tuple[str, int]] = {}
    for first in (space for space in dst.spaces if space in ties):
        if first in found:
            continue
        shifts, new = {first: 0}, [first]
        while new:
            space = new.pop()
            for other, shift, a, b in ties[space]:
                if shifts.setdefault(other, shifts[space] - shift) != shifts[space] - shift:
                    raise _overlap(a, b)
                if other not in found:
                    found[other] = (first, 0)
                    new.append(other)
        least = min(shifts.values())
        found |= {space: (first, shift - least) for space, shift in shifts.items()}
    return found


def _overlap(a: Region, b: Region) -> PairingError:
    text = f"destination {a} and {b} overlap in memory"
    if a.space != b.space:
        text += (
            f": regions of two spaces, {quoted(a.space)} and {quoted(b.space)}, may share memory only where all pages "
            f"of one meet the pages of the other one to one, at equal strides"
        )
    return PairingError(text)


def first_overlap(
    regions: Sequence[Region], written: Collection[tuple[str, int]], shared: Shared | None = None
) -> tuple[Region, Region] | None:
    """Two regions of one memory whose pages share a byte, at least one of them `written` (by key), or None.

    Regions of two spaces whose pages meet one to one are no such regions: they are added to `shared`.
    n log n for regions of equal stride.
    """
    left = [_MOST_STEPS]
    shared = [] if shared is None else shared
    spaces: defaultdict[Memory, list[Region]] = defaultdict(list)
    for region in regions:
        spaces[region.memory] += _blocks(region)
    for members in spaces.values():
        for cluster in _clusters(members):
            clash = _first_in_cluster(cluster, written, left, shared)
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
    cluster: list[Region], written: Collection[tuple[str, int]], left: list[int], shared: Shared
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
                shift = _page_shift(one, other)
                if shift is None:
                    return one, other
                shared.append((one, other, shift))
    return None


def _page_shift(a: Region, b: Region) -> int | None:
    """The one number for which page i of a meets page i + number of b; None where there are several, or none."""
    stride: int = a.page_stride  # type: ignore[assignment]
    if a.space == b.space or stride != b.page_stride:
        return None
    offset = a.base - b.base
    least = (offset - b.page_bytes) // stride + 1
    return least if least * stride < offset + a.page_bytes <= (least + 1) * stride else None


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
