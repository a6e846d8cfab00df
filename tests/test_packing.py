"""Regions side by side in a page become one entry: page-major DeepSeek-V4 pools, whole and partly packed."""

import dataclasses

import numpy as np
import pytest

from kvplan import Layout, Memory, execute, pair
from kvplan.planning import reference

PAGES = 40


def packed(base: int, layout: Layout, together) -> Layout:
    """`layout` with the regions of each group (by `together(region)`) interleaved page by page in one pool."""
    pools: dict[object, list] = {}
    for region in layout.regions:
        pools.setdefault(together(region), []).append(region)
    regions = {}
    for members in pools.values():
        stride = sum(region.page_bytes for region in members)
        offset = 0
        for region in members:
            regions[region.key] = dataclasses.replace(region, base=base + offset, page_stride=stride)
            offset += region.page_bytes
        base += stride * members[0].num_pages
    return Layout([regions[region.key] for region in layout.regions], page_size=layout.page_size)


def flash(base: int, **host) -> Layout:
    return Layout.deepseek_v4(base, num_pages=PAGES, memory=Memory.VRAM(0), **host)


HOST = {"num_host_pages": PAGES + 5}
SPACE = lambda region: (region.space, region.num_pages)  # noqa: E731
LISTS = {"host": [8, 9, 10, 3], "device": [1, 2, 30, 31]}


def test_a_page_of_a_page_major_pool_is_one_descriptor():
    src = packed(1 << 40, flash(4096), SPACE)
    dst = packed(1 << 44, flash(4096), SPACE)
    pairing = pair(src, dst)
    assert pairing.entries[:, 4].tolist() == [998_208] and len(pairing.regions[0]) == 62
    plan = pairing.plan([5, 6, 7, 20], [8, 9, 10, 3])
    assert plan.nbytes.tolist() == [3 * 998_208, 998_208]


def test_two_spaces_packed_each_for_itself():
    """The source packs as the destination does: C4 KV apart, the rest together. Two descriptors a page, not 62."""
    apart = lambda region: region.name == "c4_kv"  # noqa: E731
    src, dst = packed(1 << 40, flash(4096), apart), packed(1 << 44, flash(4096, **HOST), SPACE)
    pairing = pair(src, dst)
    assert sorted(map(len, pairing.regions)) == [21, 41]
    plan = pairing.plan([5, 6, 20, 21], LISTS)
    # Runs break where either list does: host 8 9 | 10 | 3, device 1 2 | 30 31.
    assert plan.nbytes.tolist() == [2 * 786_240, 786_240, 786_240, 2 * 211_968, 2 * 211_968]
    check(src, dst, pairing, plan)


@pytest.mark.parametrize("side", ["source", "destination"])
def test_a_partly_packed_pool_joins_what_touches_on_both_sides(side):
    """One side packs all of a space together, the other only the indexers: these alone can move as one."""
    whole, indexers = SPACE, lambda region: "c4_indexer" if region.name == "c4_indexer" else region.key
    src_rule, dst_rule = (whole, indexers) if side == "source" else (indexers, whole)
    src, dst = packed(1 << 40, flash(4096), src_rule), packed(1 << 44, flash(4096, **HOST), dst_rule)
    pairing = pair(src, dst)
    assert sorted(map(len, pairing.regions)) == [1] * 41 + [21]
    plan = pairing.plan([5, 6, 20, 21], LISTS)
    check(src, dst, pairing, plan)
    joined = next(k for k, regions in enumerate(pairing.regions) if len(regions) == 21)
    assert pairing.entries[joined, 4] == 21 * 8_448
    # One side's pages do not follow one another gap-free, so each page is a descriptor of its own.
    assert plan.nbytes.tolist().count(21 * 8_448) == 4


def check(src, dst, pairing, plan):
    found = reference.canonical((d, s, n) for s, d, n in zip(*plan.lists(), strict=True))
    assert found == reference.plan(src, dst, [5, 6, 20, 21], LISTS)


def test_bytes_of_a_packed_pool_arrive():
    rng = np.random.default_rng(0)
    sizes = Layout.deepseek_v4(4096, num_pages=6)
    pools = [np.zeros(6 * 998_208, np.uint8) for _ in range(2)]
    pools[0][:] = rng.integers(1, 255, pools[0].size, np.uint8)
    src, dst = (packed(pool.ctypes.data, sizes, SPACE) for pool in pools)
    execute(pair(src, dst).plan([0, 1, 4], [2, 3, 0]))
    before, after = (pool.reshape(6, -1) for pool in pools)
    assert (after[[2, 3, 0]] == before[[0, 1, 4]]).all() and not after[[1, 4, 5]].any()
