"""`Cluster.check` says what the bytes say, of drawn clusters, right ones and such with a fault put in.

Drawn: pipeline stages n to m, uneven cuts of heads, copies, replicas of regions, interleaves in runs, orders, strides.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from strategies import profile

from kvplan import Cluster, Heads, Interleave, Layout, PairingError, Region

ROW = 12  # bytes of a row of all heads: any head count drawn here divides it
PAGES = 20  # of a region; lists are shorter


# ------------------------------------------------------------------------------------------------- what bytes say


def rows_of(region: Region, tokens: int, total: int) -> tuple[np.ndarray, np.ndarray]:
    """(offset from base, name) of all bytes of rows in the pages that cover the first `tokens` tokens.

    Page 3 * i modulo PAGES is number i. The same byte has the same name on every rank. `total`: heads in all.
    """
    share = region.interleave or Interleave(1, 0)
    first, held = (region.heads.start, region.heads.stop - region.heads.start) if region.heads else (0, total)
    nbytes = region.row_bytes // held
    row_stride = region.row_stride or (region.row_bytes if region.order == "NHD" else nbytes)
    head_stride = region.head_stride or (nbytes if region.order == "NHD" else region.rows * row_stride)
    axes = np.ogrid[: tokens // region.tokens, : region.rows, :held, :nbytes]
    page, row, head, byte = axes
    offsets = page * 3 % PAGES * region.page_stride + row * row_stride + head * head_stride + byte
    local = page * region.rows + row
    token = (local // share.run * share.size + share.rank) * share.run + local % share.run
    names = (token * total + first + head) * ROW + byte
    return offsets, np.broadcast_to(names, offsets.shape)


def named_bytes(layout: Layout, cluster: Cluster) -> tuple[int, np.ndarray]:
    """(least address, for each byte from there on what it is; -1 where it is no byte of a row that is due)."""
    every = [region for each in (*cluster.prefill, *cluster.decode) for region in each.regions]
    tokens = math.lcm(*(region.tokens for region in every))
    keys = sorted({region.key for region in every})
    base = min((region.base for region in layout.regions), default=0)
    found = np.full(max((region.base + region.span_bytes for region in layout.regions), default=0) - base, -1)
    for region in layout.regions:
        total = max((other.heads.total for other in every if other.key == region.key and other.heads), default=1)
        offsets, names = rows_of(region, tokens, total)
        offsets += region.base - base
        assert (found[offsets] == -1).all()
        found[offsets] = (keys.index(region.key) << 32) + names
    return base, found


def bytes_are_right(cluster: Cluster) -> bool:
    """Whether each byte of a row of a decode rank is written once, and each of a prefill rank has a place to go to.

    All lists cover the same tokens. That what is written comes from the right place is asserted: no fault excuses it.
    """
    regions = [region for layout in (*cluster.prefill, *cluster.decode) for region in layout.regions]
    tokens = math.lcm(*(region.tokens for region in regions))
    pages = {count: [page * 3 % PAGES for page in range(tokens // count)] for count in {r.tokens for r in regions}}
    sources, targets = ([named_bytes(one, cluster) for one in side] for side in (cluster.prefill, cluster.decode))
    kept = np.unique(np.concatenate([names for _, names in targets]))
    right = all(np.isin(names[names >= 0], kept).all() for _, names in sources)
    for j, (dst, (to, wanted)) in enumerate(zip(cluster.decode, targets, strict=True)):
        written = np.zeros(len(wanted), np.int64)
        lists = {region.space: pages[region.tokens] for region in dst.regions}
        for i, (at, held) in enumerate(sources):
            try:
                pairing = cluster.pairing(i, j)
            except PairingError:
                return False
            ours = {space: pages[count] for space, count in pairing.src_tokens.items()}
            plan = pairing.plan(ours, lists) if ours else pairing.plan([], lists, dst_start=0)
            for source, target, nbytes in zip(*plan.lists(), strict=True):
                moved, place = held[source - at :][:nbytes], slice(target - to, target - to + nbytes)
                assert (moved == wanted[place]).all()
                written[place] += 1
        right &= bool((written[wanted >= 0] == 1).all())
    return right


def is_right(cluster: Cluster) -> bool:
    try:
        cluster.check()
    except PairingError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------- drawn clusters


def cuts(draw: Any, total: int, ranks: int) -> list[tuple[int, int]]:
    """`total` heads over ranks, cut anywhere, each rank with one at least; or every `ranks // total` ranks alike."""
    if ranks > total:
        return [(rank * total // ranks, rank * total // ranks + 1) for rank in range(ranks)]
    numbers = st.integers(1, max(total - 1, 1))
    inner = draw(st.lists(numbers, unique=True, min_size=ranks - 1, max_size=ranks - 1)) if ranks > 1 else []
    return list(itertools.pairwise([0, *sorted(inner), total]))


def stages(draw: Any, layers: int) -> list[range]:
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else set()
    return [range(a, b) for a, b in itertools.pairwise([0, *sorted(inner), layers])]


def strided(draw: Any, rows: int, heads: int, nbytes: int) -> tuple[dict[str, Any], int]:
    """(fields of a region that say where rows and heads of its pages lie, bytes from page 0 to the end)."""
    axes = [("row_stride", rows), ("head_stride", heads)]
    how = draw(st.sampled_from(["NHD", "HND", "NHD", "HND", "any", "pages inside"]))
    page = rows * heads * nbytes
    if how == "NHD" or how == "HND":
        gap = draw(st.sampled_from([0, 0, 1]))
        return {"order": how, "page_stride": page + gap}, PAGES * (page + gap)
    axes = draw(st.permutations(axes))
    axes.insert(draw(st.integers(0, 1)) if how == "pages inside" else 2, ("page_stride", PAGES))
    fields, extent = {}, nbytes
    for name, count in axes:  # the smallest stride first
        fields[name] = extent + draw(st.sampled_from([0, 0, 1]))
        extent = count * fields[name]
    return fields | {"order": draw(st.sampled_from(["NHD", "HND"]))}, extent


@st.composite
def side(draw: Any, prefill: bool, total: int, layers: int, names: list[str], base: int) -> list[Layout]:
    """All ranks of one side: pipeline stages, then uneven heads or replicated ones, then ranks that interleave rows.

    "latent" is not split by heads: every rank holds it.
    """
    rows = draw(st.sampled_from([1, 2, 3, 4]))
    divisors = [n for n in range(1, 2 * total + 1) if n <= total or n % total == 0] if total else [1, 2, 3]
    tensor = draw(st.sampled_from(divisors))
    copies = max(tensor // total, 1) if total else tensor
    size = draw(st.sampled_from([1, 1, 2, 3, 5])) if tensor < 4 else 1
    run = draw(st.sampled_from([n for n in (1, 1, 2, 3, 4) if rows % n == 0]))
    heads = cuts(draw, total, tensor) if total else [None] * tensor
    by_region = "latent" in names or draw(st.booleans())  # who says how many ranks hold a region: it, or the layout
    ranks = []
    for part, t, r in itertools.product(stages(draw, layers), range(tensor), range(size)):
        where, regions = base + len(ranks) * (1 << 30), []
        for name, layer in itertools.product(names, part):
            held = Heads(*heads[t], total) if total and name != "latent" else None
            count = held.stop - held.start if held else 1
            row = ROW // total * count if held else ROW
            fields, extent = strided(draw, rows, count, row // count)
            if held is None:
                fields.pop("head_stride", None)
                fields["order"] = "NHD"
            replica = (t, tensor) if name == "latent" else (t % copies, copies)
            regions.append(
                Region(
                    name,
                    layer,
                    where,
                    rows * row,
                    PAGES,
                    tokens=rows * size,
                    rows=rows,
                    row_bytes=row,
                    heads=held,
                    interleave=Interleave(size, r, run) if size > 1 else None,
                    replica=replica if prefill and by_region else None,
                    **fields,
                )
            )
            where += extent
        replica = (t % copies, copies) if prefill and not by_region else (0, 1)
        ranks.append(Layout(regions, page_size=rows, replica=replica))
    return ranks


@st.composite
def clusters(draw: Any) -> Cluster:
    total = draw(st.sampled_from([0, 1, 2, 3, 4]))
    layers = draw(st.integers(1, 3))
    names = draw(st.sampled_from([["kv"], ["k", "v"], ["k", "latent"]]))
    prefill = draw(side(True, total, layers, names, 1 << 40))
    decode = draw(side(False, total, layers, names, 1 << 50))
    return Cluster(prefill, decode)


def with_regions(layout: Layout, regions: Any, replica: tuple[int, int] | None = None) -> Layout:
    return Layout(regions, page_size=layout.page_size, replica=replica or layout.replica)


WAYS = [
    "region gone", "prefill rank gone", "prefill rank twice", "replica", "replica of a region", "heads", "share",
    "decode region gone", "decode rank gone", "nobody sends", "nobody receives",
]  # fmt: skip


@st.composite
def faulty(draw: Any) -> Cluster:
    """A cluster with one thing changed; it may turn out to be right all the same."""
    cluster = draw(clusters())
    prefill, decode = list(cluster.prefill), list(cluster.decode)
    rank, place = draw(st.integers(0, len(prefill) - 1)), draw(st.integers(0, len(decode) - 1))
    layout = prefill[rank]
    region = draw(st.sampled_from(layout.regions))
    rest = [other for other in layout.regions if other is not region]
    way = draw(st.sampled_from(WAYS))
    count = draw(st.integers(1, 3))
    replica = draw(st.integers(0, count - 1)), count
    if way == "region gone":
        prefill[rank] = with_regions(layout, rest)
    elif way == "prefill rank gone" and len(prefill) > 1:
        del prefill[rank]
    elif way == "prefill rank twice":
        prefill.append(prefill[rank])
    elif way == "replica":
        prefill[rank] = with_regions(layout, layout.regions, replica)
    elif way == "replica of a region":
        prefill[rank] = with_regions(layout, [*rest, dataclasses.replace(region, replica=replica)])
    elif way == "heads" and region.heads:
        total, held = region.heads.total, region.heads.stop - region.heads.start
        start = draw(st.integers(0, total - held))
        moved = dataclasses.replace(region, heads=Heads(start, start + held, total))
        prefill[rank] = with_regions(layout, [*rest, moved])
    elif way == "share" and region.interleave:
        runs = [run for run in (1, 2, 3, 4) if region.rows % run == 0]
        size = region.interleave.size
        share = Interleave(size, draw(st.integers(0, size - 1)), draw(st.sampled_from(runs)))
        prefill[rank] = with_regions(layout, [*rest, dataclasses.replace(region, interleave=share)])
    elif way == "decode region gone":
        decode[place] = with_regions(decode[place], decode[place].regions[1:])
    elif way == "decode rank gone" and len(decode) > 1:
        del decode[place]
    elif way == "nobody sends":
        prefill = [with_regions(one, [r for r in one.regions if r.key != region.key]) for one in prefill]
    elif way == "nobody receives":
        decode = [with_regions(one, [r for r in one.regions if r.key != region.key]) for one in decode]
    if not any(layout.regions for layout in decode) or not any(layout.regions for layout in prefill):
        return cluster
    return Cluster(prefill, decode)


def test_drawn_clusters_are_right_and_the_check_says_so() -> None:
    @profile(300)
    @given(clusters())
    def check(cluster: Cluster) -> None:
        cluster.check()
        assert bytes_are_right(cluster)

    check()


def test_the_check_agrees_with_the_bytes() -> None:
    outcomes = {True: 0, False: 0}

    @profile(400)
    @given(faulty())
    def check(cluster: Cluster) -> None:
        right = is_right(cluster)
        outcomes[right] += 1
        assert right == bytes_are_right(cluster)

    check()
    assert min(outcomes.values()) > 10
