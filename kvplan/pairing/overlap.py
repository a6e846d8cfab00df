"""Do two regions share a byte? Exact for regions of any stride, and quick for pools whose pages interleave.

Regions of two spaces may share memory where each page of one meets one page of the other: groups of layers with page
tables of their own over one buffer. `circle.py` looks at regions of one stride.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from ..errors import PairingError, quoted
from ..layout import Layout, Memory, Region
from .circle import Block, Shared, Steps, blocks_of, first_on_circle


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

    Regions of two spaces whose pages meet one to one are no such regions. They are added to `shared`: not each two of
    them, but enough that all spaces which share memory are tied to one another, directly or through others.
    n log n for regions of equal stride.
    """
    steps = Steps()
    shared = [] if shared is None else shared
    memories: defaultdict[Memory, list[Block]] = defaultdict(list)
    for region in regions:
        memories[region.memory] += blocks_of(region)
    for blocks in memories.values():
        for cluster in _clusters(blocks):
            clash = _first_in_cluster(cluster, written, steps, shared)
            if clash is not None:
                return clash
    return None


def _clusters(blocks: Iterable[Block]) -> Iterable[list[Block]]:
    """Blocks whose spans overlap, directly or through others."""
    cluster: list[Block] = []
    end = -1
    for block in sorted(blocks, key=lambda block: block.base):
        if cluster and block.base >= end:
            yield cluster
            cluster = []
        cluster.append(block)
        end = max(end, block.end)
    if cluster:
        yield cluster


def _first_in_cluster(
    cluster: list[Block], written: Collection[tuple[str, int]], steps: Steps, shared: Shared
) -> tuple[Region, Region] | None:
    """Blocks of one stride are looked at modulo the stride; those of two strides in pairs."""
    if len(cluster) == 1:
        return None
    strides: defaultdict[int, list[Block]] = defaultdict(list)
    for block in cluster:
        strides[block.stride].append(block)
    groups = list(strides.items())
    for number, (stride, members) in enumerate(groups):
        clash = first_on_circle(members, stride, written, steps, shared)
        if clash is not None:
            return clash
        rivals = itertools.chain.from_iterable(others for _, others in groups[number + 1 :])
        for one, other in itertools.product(members, rivals):
            steps.take(1, one, other)
            matters = one.region.key in written or other.region.key in written
            if matters and one.region.key != other.region.key and _share_a_byte(one, other, steps):
                return one.region, other.region
    return None


def _share_a_byte(a: Block, b: Block, steps: Steps) -> bool:
    """Whether page i of a meets page j of b for some i, j.

    Let r be (address of a page of a - b.base) modulo b's stride. The page shares a byte with b iff r < b.nbytes, or
    r + a.nbytes > b's stride: then it reaches the next page of b. From one page of a to the next, r repeats with the
    period b's stride / gcd of both strides. Over a period it takes every value that is equal modulo the gcd.
    """
    if a.end <= b.base or b.end <= a.base:
        return False
    if a.pages > b.pages:
        a, b = b, a
    # Pages of a that reach into the span of b.
    first = max(0, (b.base - a.base - a.nbytes) // a.stride + 1)
    last = min(a.pages - 1, (b.end - a.base - 1) // a.stride)
    divisor = math.gcd(a.stride, b.stride)
    offset = a.base + first * a.stride - b.base
    if last - first + 1 >= b.stride // divisor:
        rest = offset % divisor
        return rest < b.nbytes or b.stride - divisor + rest + a.nbytes > b.stride
    steps.take(max(0, last - first + 1), a, b)
    return any(
        (offset + i * a.stride) % b.stride < b.nbytes or (offset + i * a.stride) % b.stride + a.nbytes > b.stride
        for i in range(last - first + 1)
    )
