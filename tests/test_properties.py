"""Laws that hold for any cluster: equal to the oracle, every due byte once, everything else refused.

Each holds twice: for plain clusters, and for all of them. KVPLAN_EXAMPLES sets how many are drawn per test.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import PROFILE, Cluster, Start, clusters, profile

import kvplan
from kvplan.planning import reference
from kvplan.planning.reference import Triple

KINDS = pytest.mark.parametrize("plain", [True, False], ids=["plain", "any"])
REFUSED = (kvplan.PlanError, kvplan.PairingError)
ARRAYS: list[Callable[[list[int]], Any]] = [
    lambda pages: torch.tensor(pages, dtype=torch.int64),
    lambda pages: torch.tensor(pages, dtype=torch.int32),
    lambda pages: np.array(pages, dtype=np.int64),
    lambda pages: np.array(pages, dtype=np.int32),
    lambda pages: torch.tensor([[page, -1] for page in pages], dtype=torch.int64).reshape(-1, 2)[:, 0],  # a stride
]


def oracle(cluster: Cluster, src: kvplan.Layout, dst: kvplan.Layout) -> list[Triple]:
    lists = cluster.src_pages, cluster.dst_pages
    return reference.plan(src, dst, *lists, **cluster.positions, allow_unsent=cluster.unsent(src))


def paired(cluster: Cluster, src: kvplan.Layout, dst: kvplan.Layout) -> kvplan.Pairing:
    return kvplan.pair(src, dst, allow_unsent=cluster.unsent(src))


def planned(cluster: Cluster, pairing: kvplan.Pairing, array: Callable[[list[int]], Any] = ARRAYS[0]) -> kvplan.Plan:
    src_pages: Any = {space: array(pages) for space, pages in cluster.src_pages.items()}
    if list(src_pages) == [None]:
        src_pages = src_pages[None]
    dst_pages = {space: array(pages) for space, pages in cluster.dst_pages.items()}
    return pairing.plan(src_pages, dst_pages, **cluster.positions)


def package(cluster: Cluster, src: kvplan.Layout, dst: kvplan.Layout) -> list[Triple]:
    src_addrs, dst_addrs, nbytes = planned(cluster, paired(cluster, src, dst)).lists()
    return list(zip(dst_addrs, src_addrs, nbytes, strict=True))


# ----------------------------------------------------------------------------------------------- equal to the oracle


@KINDS
def test_plan_equals_oracle(plain: bool) -> None:
    @profile(200 if plain else 700)
    @given(clusters(plain), st.sampled_from(ARRAYS))
    def check(cluster: Cluster, array: Callable[[list[int]], Any]) -> None:
        for src, dst in cluster.pairs():
            pairing = paired(cluster, src, dst)
            plan = planned(cluster, pairing, array)
            found = list(zip(*plan.lists(), strict=True))
            assert reference.canonical((d, s, n) for s, d, n in found) == oracle(cluster, src, dst)
            check_order(cluster, pairing, found)
            check_segments(plan, src, dst)

    check()


def check_order(cluster: Cluster, pairing: kvplan.Pairing, found: list[Triple]) -> None:
    """The same descriptors in the same order, to the bit."""
    expected = reference.descriptors(
        pairing.src,
        pairing.dst,
        cluster.src_pages,
        cluster.dst_pages,
        **cluster.positions,
        allow_unsent=cluster.unsent(pairing.src),
        entries=[[(src.name, src.layer) for src, _ in regions] for regions in pairing.regions],
    )
    assert found == expected


def check_segments(plan: kvplan.Plan, src: kvplan.Layout, dst: kvplan.Layout) -> None:
    """Segments cut the plan without a gap, and no descriptor leaves the memory that its segment names."""
    src_addrs, dst_addrs, nbytes = plan.lists()
    stops = [0, *(segment.stop for segment in plan.segments)]
    assert [segment.start for segment in plan.segments] == stops[:-1]
    assert stops[-1] == len(plan)
    for segment in plan.segments:
        for i in range(segment.start, segment.stop):
            assert nbytes[i] > 0
            for layout, memory, addr in (
                (src, segment.src_memory, src_addrs[i]),
                (dst, segment.dst_memory, dst_addrs[i]),
            ):
                assert any(
                    span_memory == memory and base <= addr and addr + nbytes[i] <= base + size
                    for span_memory, base, size in layout.memory_spans()
                )


# ------------------------------------------------------------------------------------------ every due byte, once

# What a byte of a page is: ("row", name, layer, first token, head, number of the byte) or, for what belongs to no row,
# ("page", name, layer, first token, number of the byte). The same byte has the same name on every rank that holds it.
Name = tuple[Any, ...]


def bytes_of(
    region: kvplan.Region, pages: list[int], start: int, heads: int, null: int | None
) -> Iterator[tuple[int, Name, int]]:
    """(address, name, tokens that it covers) of each byte in the pages of a list that starts at token `start`."""
    share = region.interleave or kvplan.Interleave(1, 0)
    first, stop = (region.heads.start, region.heads.stop) if region.heads else (0, max(heads, 1))
    per_head = region.row_bytes // (stop - first)
    compression = region.tokens // (region.rows * share.size)
    run = max(share.run // compression, 1)
    by_head = region.order == "HND"
    row_stride = region.row_stride or (per_head if by_head else region.row_bytes)
    head_stride = region.head_stride or (region.rows * row_stride if by_head else per_head)
    for k, page in enumerate(pages):
        if page == null:
            continue
        base = region.base + page * region.page_stride
        for row, head, byte in itertools.product(range(region.rows), range(stop - first), range(per_head)):
            local = k * region.rows + row
            token = start + ((local // run * share.size + share.rank) * run + local % run) * compression
            addr = base + row * row_stride + head * head_stride + byte
            yield addr, ("row", region.name, region.layer, token, first + head, byte), compression
        for offset in range(region.rows * region.row_bytes, region.page_bytes):
            yield base + offset, ("page", region.name, region.layer, start + k * region.tokens, offset), region.tokens


def check_union(cluster: Cluster, plan: Callable[[Cluster, kvplan.Layout, kvplan.Layout], list[Triple]]) -> None:
    sent = {(r.name, r.layer) for layout in cluster.src for r in layout.regions} & {
        (r.name, r.layer) for r in cluster.dst[0].regions
    }
    space_of = {(r.name, r.layer): r.space for r in cluster.dst[0].regions}
    held: list[dict[int, set[Name]]] = []  # per source rank, what lies at an address
    shapes: dict[tuple[str, int], set[Any]] = {}
    for layout in cluster.src:
        held.append({})
        for region in layout.regions:
            key = (region.name, region.layer)
            if key in sent:
                start, _, _ = cluster.window(space_of[key])
                for addr, name, _ in bytes_of(
                    region,
                    cluster.source_list(space_of[key]),
                    start,
                    cluster.heads[region.name],
                    cluster.null(space_of[key]),
                ):
                    held[-1].setdefault(addr, set()).add(name)
                shapes.setdefault(key, set()).add((region.tokens, region.rows, region.interleave))

    for dst in cluster.dst:
        expected: dict[int, tuple[Name, bool]] = {}
        for region in dst.regions:
            key = (region.name, region.layer)
            if key in sent:
                first, start, end = cluster.window(region.space)
                by_run = [share for _, _, share in [(0, 0, region.interleave), *shapes[key]] if share and share.run > 1]
                whole = (region.tokens, region.rows, region.interleave) in shapes[key] or by_run
                for addr, name, covers in bytes_of(
                    region,
                    cluster.dst_pages[region.space],
                    start,
                    cluster.heads[region.name],
                    cluster.null(region.space),
                ):
                    due = name[3] < end and name[3] + covers > max(first, start)
                    due = due and (name[0] == "row" or not region.row_bytes)  # padding is owed to nobody
                    if due or whole:  # pages, or the rows of a run, that move as one may be due in part
                        expected[addr] = (name, due)

        written: set[int] = set()
        for number, src in enumerate(cluster.src):
            for dst_addr, src_addr, nbytes in plan(cluster, src, dst):
                for i in range(nbytes):
                    assert dst_addr + i not in written, "a destination byte is written twice"
                    written.add(dst_addr + i)
                    assert dst_addr + i in expected, "a byte that nobody asked for is written"
                    assert expected[dst_addr + i][0] in held[number][src_addr + i], "a byte comes from the wrong place"
        assert {addr for addr, (_, due) in expected.items() if due} <= written, "a byte that is due is not written"


@pytest.mark.parametrize("plan", [oracle, package])
@KINDS
def test_union_of_all_sources_writes_each_due_byte_once(
    plain: bool, plan: Callable[[Cluster, kvplan.Layout, kvplan.Layout], list[Triple]]
) -> None:
    @profile(100 if plain or plan is oracle else 500)
    @given(clusters(plain))
    def check(cluster: Cluster) -> None:
        check_union(cluster, plan)
        sent = {region.name for layout in cluster.src for region in layout.regions}
        alone = {region.name for layout in cluster.dst for region in layout.regions} - sent
        kvplan.Cluster(cluster.src, cluster.dst, allow_unsent=cluster.allow_unsent, allow_unwritten=alone).check()

    check()


# ----------------------------------------------------------------------------------------------------------- refused


def one_thing_wrong(
    cluster: Cluster, src: kvplan.Layout, dst: kvplan.Layout, draw: Callable[[st.SearchStrategy[Any]], Any]
) -> tuple[Cluster, str]:
    """The same request with one thing wrong in a list that this rank needs, and what its refusal must say."""
    region = draw(st.sampled_from(written(cluster, src, dst)))
    space = region.space
    bad = copy.copy(cluster)
    bad.src_pages = {key: list(pages) for key, pages in cluster.src_pages.items()}
    bad.dst_pages = {key: list(pages) for key, pages in cluster.dst_pages.items()}
    source, target = bad.source_list(space), bad.dst_pages[space]
    given = cluster.starts.get(space, Start())
    counted, exact = given.sent is not None, given.dst is None
    partner = next(r for r in src.regions if (r.name, r.layer) == (region.name, region.layer))
    position = draw(st.integers(0, max(len(source), len(target))))

    def wrong_id(region: kvplan.Region) -> int:
        end = region.num_pages  # the least of all regions in the list decides, so any region may
        return draw(st.sampled_from([end, end, -1, -2, end + 1, 1 << 30, (1 << 31) - 1, (1 << 32) + 1, -(1 << 63)]))

    def without_space() -> str:
        del bad.dst_pages[space]
        return space

    def wrong_source_id() -> str:
        source[position % len(source)] = wrong_id(partner)
        return "out of range"

    def wrong_destination_id() -> str:
        target[position % len(target)] = wrong_id(region)
        return "out of range"

    def same_destination_twice() -> str:
        target[position % len(target)] = target[position % len(target) - 1]
        return "twice"

    def longer_source() -> str:
        # Where tokens are not counted a longer list sends more, so it must want more than a spare page or two.
        source.extend([0] if counted else [0] * 3 * region.tokens)
        return "length"

    def shorter_source() -> str:
        source.pop(position % len(source))
        return "length"

    def longer_destination() -> str:
        target.append(next(page for page in range(len(target) + 1) if page not in target))
        return "length"

    def shorter_destination() -> str:
        target.pop(position % len(target))
        return "length"

    def empty_destination() -> str:
        target.clear()
        return "length"

    def null_on_one_side() -> str:
        first, start, end = cluster.window(space)
        token = draw(st.integers(max(first, start), end - 1))
        pages, at = draw(
            st.sampled_from([(source, (token - first) // partner.tokens), (target, (token - start) // region.tokens)])
        )
        given = cluster.null(space)
        pages[at] = (
            given if pages[at] != given else next(page for page in range(len(pages) + 2) if page not in {*pages, given})
        )
        return "null page|out of range"

    if cluster.null(space) is not None:
        return bad, draw(st.sampled_from([without_space, null_on_one_side]))()
    ways = [without_space, wrong_source_id, wrong_destination_id, longer_source, empty_destination]
    ways += [same_destination_twice] if len(target) > 1 else []
    ways += [shorter_source] if counted else []
    ways += [longer_destination, shorter_destination] if exact else []
    return bad, draw(st.sampled_from(ways))()


def written(cluster: Cluster, src: kvplan.Layout, dst: kvplan.Layout) -> list[kvplan.Region]:
    """The destination regions into which something moves: not told by addresses, since regions may share memory."""
    lists = cluster.src_pages, cluster.dst_pages
    found = reference.moves(src, dst, *lists, **cluster.positions, allow_unsent=cluster.unsent(src))
    keys = {(pair.dst.name, pair.dst.layer) for pair, moved in found if moved}
    return [region for region in dst.regions if region.key in keys]


@KINDS
def test_one_thing_wrong_is_refused(plain: bool) -> None:
    @PROFILE
    @given(clusters(plain), st.data())
    def check(cluster: Cluster, data: st.DataObject) -> None:
        busy = [(src, dst) for src, dst in cluster.pairs() if oracle(cluster, src, dst)]
        if not busy:
            return
        src, dst = data.draw(st.sampled_from(busy))
        bad, words = one_thing_wrong(cluster, src, dst, data.draw)
        with pytest.raises(REFUSED, match=words):
            oracle(bad, src, dst)
        with pytest.raises(REFUSED, match=words):
            planned(bad, paired(bad, src, dst))

    check()


@KINDS
def test_any_positions_give_the_same_plan_or_are_refused(plain: bool) -> None:
    """Positions and lengths that nobody made to fit: whatever the oracle says, refused or not, is said."""

    @PROFILE
    @given(clusters(plain), st.data())
    def check(cluster: Cluster, data: st.DataObject) -> None:
        odd = copy.copy(cluster)
        places = {"src_start": st.integers(0, 40), "dst_start": st.integers(0, 40), "num_tokens": st.integers(0, 80)}
        odd.positions = dict(cluster.positions)
        for name in data.draw(st.sets(st.sampled_from(sorted(places)), min_size=1)):
            spaces = st.sampled_from([None, *cluster.dst_pages])
            by_space = st.dictionaries(spaces, places[name] | st.none(), max_size=3)
            odd.positions[name] = data.draw(places[name] | by_space)
        for src, dst in cluster.pairs():
            try:
                expected = oracle(odd, src, dst)
            except REFUSED:
                with pytest.raises(REFUSED):
                    planned(odd, paired(odd, src, dst))
            else:
                assert reference.canonical(package(odd, src, dst)) == expected

    check()


@KINDS
def test_a_region_without_a_partner_is_refused(plain: bool) -> None:
    @PROFILE
    @given(clusters(plain))
    def check(cluster: Cluster) -> None:
        for src, dst in cluster.pairs():
            if not cluster.unsent(src):
                continue
            with pytest.raises(kvplan.PairingError, match="no destination"):
                reference.plan(src, dst, cluster.src_pages, cluster.dst_pages, **cluster.positions)
            with pytest.raises(kvplan.PairingError, match="no destination"):
                kvplan.pair(src, dst)

    check()


def test_heads_that_overlap_in_part() -> None:
    """No even split gives these: as many heads and bytes on both sides, and not the same heads."""
    src, dst = (
        kvplan.Layout([kvplan.Region("k", 0, base, 16, 4, row_bytes=8, heads=heads)], page_size=2)
        for base, heads in ((1 << 12, kvplan.Heads(0, 2, 4)), (1 << 20, kvplan.Heads(1, 3, 4)))
    )
    expected = [((1 << 20) + 16 * 3 + 8 * row, (1 << 12) + 16 * 2 + 8 * row + 4, 4) for row in range(2)]
    assert reference.plan(src, dst, [2], [3]) == expected
    src_addrs, dst_addrs, nbytes = kvplan.pair(src, dst).plan(ARRAYS[0]([2]), ARRAYS[0]([3])).lists()
    assert list(zip(dst_addrs, src_addrs, nbytes, strict=True)) == expected
