"""A plan in other forms: cut by layers, as numbers in prepared lists, as strided lists. Each equals the plan itself."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import Cluster, clusters, profile

import kvplan
from kvplan import Heads, Layout, Memory, PlanError, Region, pair
from kvplan.planning import forms

HIGH = (1 << 63) - 8 * 64 * 4  # regions from here cross into the upper half of addresses


def planned(cluster: Cluster, pairing: kvplan.Pairing, **how) -> kvplan.Plan:
    src = {space: np.array(pages, np.int64) for space, pages in cluster.src_pages.items()}
    dst = {space: np.array(pages, np.int64) for space, pages in cluster.dst_pages.items()}
    return pairing.plan(src if list(src) != [None] else src[None], dst, **cluster.positions, **how)


def moved(plan: kvplan.Plan) -> list[tuple[int, int]]:
    """(destination, source) of each byte, sorted."""
    return sorted((d + k, s + k) for s, d, n in zip(*plan.lists(), strict=True) for k in range(n))


# ---------------------------------------------------------------------------------------------------------- layers


def test_parts_by_layers_are_together_the_whole():
    @profile(120)
    @given(clusters(), st.sets(st.integers(0, 8), max_size=2))
    def check(cluster, cuts):
        edges = [0, *sorted(cuts), 9]
        for src, dst in cluster.pairs():
            whole = pair(src, dst, allow_unsent=cluster.unsent(src))
            parts = [whole.layers(range(a, b)) for a, b in itertools.pairwise(edges)]
            plans = [planned(cluster, part) for part in parts]
            assert sorted(sum((moved(plan) for plan in plans), [])) == moved(planned(cluster, whole))
            for part, plan in zip(parts, plans, strict=True):
                assert part.groups.equal(whole.groups) and part.spaces.equal(whole.spaces)
                assert plan.lists() == planned(cluster, part, backend="reference").lists()

    check()


def side(base, spaces=("device", "device"), **fields):
    """Four layers side by side in one pool of 8 pages; the even ones in one space, the odd ones in another."""
    regions = [Region("kv", k, base + 64 * k, 64, 8, page_stride=256, space=spaces[k % 2], **fields) for k in range(4)]
    return Layout(regions, page_size=4)


def test_layers_of_a_page_that_moved_as_one_are_cut_out_of_it():
    whole = pair(side(HIGH), side(1 << 20))
    assert len(whole.entries) == 1
    part = whole.layers([0, 2, 3])
    assert [[pair[0].layer for pair in regions] for regions in part.regions] == [[0], [2, 3]]
    signed = [HIGH, HIGH + 128]
    assert part.entries[:, 0].tolist() == signed and part.entries[:, 4].tolist() == [64, 128]
    assert moved(part.plan([5], [2])) == sorted(
        ((1 << 20) + 512 + k, HIGH + 1280 + k) for k in range(256) if not 64 <= k < 128
    )
    assert part.layers([1, 3]).regions == (part.regions[1][1:],)
    assert "not sent: region kv layer 1: another layer than this part" in part.explain()
    assert len(whole.layers(range(4)).entries) == 1


def test_a_part_without_entries_checks_all_the_same():
    whole = pair(side(1 << 16), side(1 << 20, ("host", "device")))
    part = whole.layers([0])
    assert len(part.plan([1], {"host": [2], "device": [3]}).segments) == 1
    none = whole.layers(range(7, 9))
    assert len(none.plan([1], {"host": [2], "device": [3]})) == 0
    for pairing in (whole, part, none):
        with pytest.raises(PlanError, match="device.* page id 8 at position 0 is out of range"):
            pairing.plan([1], {"host": [2], "device": [8]})
        with pytest.raises(PlanError, match="lacks space 'device'"):
            pairing.plan([1], {"host": [2]})


# --------------------------------------------------------------------------------------------------------- indices


def named_by_indices(pairing, plan):
    """Descriptors that the numbers stand for, page by page."""
    (src, dst), (here, there) = pairing.prepared(), plan.indices()
    assert here.dtype == there.dtype == torch.int32
    pages = zip(src[:, here.long()].T.tolist(), dst[:, there.long()].T.tolist(), strict=True)
    return [(s % 2**64, d % 2**64, n) for (s, n), (d, m) in pages if n == m]


def test_indices_name_the_pages_that_move():
    @profile(120)
    @given(clusters(plain=True))
    def check(cluster):
        for src, dst in cluster.pairs():
            pairing = pair(src, dst, allow_unsent=cluster.unsent(src))
            plan = planned(cluster, pairing)
            try:
                pages = named_by_indices(pairing, plan)
            except PlanError as error:
                assert "rows move" in str(error)
                assert not all(pairing.whole(entry) for entry in range(len(pairing.entries)))
                continue
            one_by_one = sorted((d + k, s + k) for s, d, n in pages for k in range(n))
            assert one_by_one == moved(plan)
            cuts = plan.entry_cuts()
            for entry, (start, stop) in enumerate(itertools.pairwise(cuts)):
                size = int(pairing.entries[entry, 4])
                assert all(n % size == 0 for n in plan.lists()[2][start:stop])

    check()


def test_an_index_is_entry_times_pages_plus_page():
    def layers(base, num_pages):
        return Layout([Region("kv", k, base + (k << 16), 64, num_pages) for k in range(3)], page_size=4)

    pairing = pair(layers(HIGH, 8), layers(1 << 30, 10))
    plan = pairing.plan([2, 3, 4, 7], [5, 6, 7, 0])
    here, there = plan.indices()
    assert here.tolist() == [2, 3, 4, 7, 10, 11, 12, 15, 18, 19, 20, 23]
    assert there.tolist() == [5, 6, 7, 0, 15, 16, 17, 10, 25, 26, 27, 20]
    src, dst = pairing.prepared()
    assert src.shape == (2, 24) and dst.shape == (2, 30)
    assert src[0].view(torch.uint64).tolist() == [HIGH + (k << 16) + 64 * page for k in range(3) for page in range(8)]
    assert set(src[1].tolist()) == {64}


def test_indices_are_refused_where_rows_move_or_numbers_do_not_fit():
    def layout(base, num_pages, **fields):
        return Layout([Region("kv", k, base + (k << 40), 64, num_pages, **fields) for k in range(2)], page_size=4)

    rows = pair(
        layout(1 << 16, 8, row_bytes=16, heads=Heads(0, 2, 4)), layout(1 << 50, 8, row_bytes=16, heads=Heads(1, 3, 4))
    )
    with pytest.raises(PlanError, match="region kv layer 0: rows move to space 'device', not whole pages"):
        rows.plan([1], [1]).indices()
    big = pair(layout(1 << 16, (1 << 30) + 1), layout(1 << 50, 8))
    for call in (big.prepared, big.plan([1], [1]).indices):
        with pytest.raises(PlanError, match="the source has 2147483650 pages over all entries"):
            call()
    most = pair(layout(1 << 16, 1 << 30), layout(1 << 50, 8))
    assert most.plan([(1 << 30) - 1], [1]).indices()[0].tolist() == [(1 << 30) - 1, (1 << 31) - 1]
    with pytest.raises(ValueError, match="cut by entries"):
        most.plan_batch([kvplan.Request([1], [1]), kvplan.Request([1], [2])]).indices()


# --------------------------------------------------------------------------------------------------------- strided


def expanded(items, cuts):
    """The descriptors of strided items, and where each segment begins."""
    found, starts = [], []
    for number, (src, dst, size, src_step, dst_step, count) in enumerate(items.T.tolist()):
        starts += [len(found)] * cuts[:-1].count(number)
        assert (count == 1 and src_step == dst_step == 0) or (count > 1 and src_step > 0 and dst_step > 0)
        found += [((src + k * src_step) % 2**64, (dst + k * dst_step) % 2**64, size) for k in range(count)]
    assert cuts[-1] == items.shape[1]
    return found, starts


def greedy(rows, starts):
    """How many items the longest prefix, again and again, gives."""
    items = at = 0
    while at < len(rows):
        end = at + 1
        step = None
        while end < len(rows) and end not in starts and rows[end][2] == rows[at][2]:
            this = rows[end][0] - rows[end - 1][0], rows[end][1] - rows[end - 1][1]
            if min(this) <= 0 or step not in (None, this):
                break
            step, end = this, end + 1
        items, at = items + 1, end
    return items


def test_strided_lists_are_the_plan():
    @profile(200)
    @given(clusters())
    def check(cluster):
        for src, dst in cluster.pairs():
            plan = planned(cluster, pair(src, dst, allow_unsent=cluster.unsent(src)))
            items, cuts = plan.strided()
            rows, starts = expanded(items, cuts)
            assert rows == list(zip(*plan.lists(), strict=True))
            assert starts == [segment.start for segment in plan.segments]
            assert items.shape[1] == greedy([(s, d, n) for s, d, n in rows], starts)

    check()


@given(
    st.lists(st.tuples(st.integers(-1, 2), st.integers(-1, 2), st.integers(1, 2)), max_size=20),
    st.sets(st.integers(1, 20)),
)
def test_strided_lists_of_any_table(rows, stops):
    """Steps of few values, so that stretches of every length meet, touch and end."""
    table = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    table[:2] = np.cumsum(table[:2], axis=1) + 1000
    stops = sorted(stop for stop in stops if stop < len(rows)) + [len(rows)] * bool(rows)
    items, cuts = forms.strided(table, stops)
    found, starts = expanded(items, cuts)
    assert found == [tuple(row) for row in table.T.tolist()]
    assert starts == [0, *stops][:-1]
    assert items.shape[1] == greedy(found, starts)


def test_rows_of_many_pages_become_one_item():
    src = Layout([Region("k", 0, HIGH, 64, 8, row_bytes=4, heads=Heads(0, 4, 4))], page_size=16)
    dst = Layout(
        [Region("k", 0, 1 << 20, 16, 8, row_bytes=1, heads=Heads(2, 3, 4), memory=Memory.VRAM(0))], page_size=16
    )
    items, cuts = pair(src, dst).plan([3, 4, 6], [1, 2, 3]).strided()
    assert cuts == [0, 2] and items[:, 0].view(torch.uint64).tolist() == [HIGH + 194, (1 << 20) + 16, 1, 4, 1, 32]
