"""Regions -> entries: who is paired with whom, and what is refused."""

import pytest
import torch

from kvplan import Heads, Interleave, Layout, Memory, PairingError, PlanError, Region, Request, pair
from kvplan.pairing.overlap import first_overlap

PAGE = 64


def region(name="kv", layer=0, base=1 << 20, page_bytes=PAGE, num_pages=8, **fields):
    return Region(name, layer, base, page_bytes, num_pages, **fields)


def layout(*regions, page_size=16, **fields):
    return Layout(regions, page_size=page_size, **fields)


def test_pairs_by_name_and_layer_never_by_position():
    src = layout(region("v", 1, 100_000), region("k", 1, 200_000), region("k", 0, 300_000))
    dst = layout(*(region(n, i, 10_000_000 + 100_000 * k) for k, (n, i) in enumerate([("k", 0), ("v", 1), ("k", 1)])))
    pairing = pair(src, dst)
    assert pairing.entries[:, [0, 2]].tolist() == [[100_000, 10_100_000], [200_000, 10_200_000], [300_000, 10_000_000]]
    assert len(pairing.groups) == 1 and pairing.entries[:, 5].tolist() == [0, 0, 0]


def test_entry_columns_and_high_addresses():
    high = (1 << 63) + (1 << 40)
    pairing = pair(layout(region(base=high)), layout(region(page_stride=100)))
    assert pairing.entries.tolist() == [[high - (1 << 64), PAGE, 1 << 20, 100, PAGE, 0]]
    assert pairing.entries.dtype == torch.int64


def test_two_spaces_are_two_groups_and_memories_are_segments():
    src = layout(region("a", 0, 1 << 21, memory=Memory.VRAM(0)), region("b", 0, 1 << 22, memory=Memory.VRAM(0)))
    dst = layout(region("a", 0, 1 << 23, space="host"), region("b", 0, 1 << 24, memory=Memory.VRAM(1)))
    pairing = pair(src, dst)
    assert pairing.space_names == ("host", "device") and len(pairing.groups) == 2
    assert pairing.segment_memories == ((Memory.VRAM(0), Memory.DRAM), (Memory.VRAM(0), Memory.VRAM(1)))
    assert pairing.bounds.tolist() == [0, 1, 2]


def test_a_source_without_a_destination_is_named():
    src, dst = layout(region("draft", 3), region("kv", 0, 1 << 21)), layout(region("kv", 0))
    with pytest.raises(PairingError, match="region draft layer 3 has no destination"):
        pair(src, dst)
    assert len(pair(src, dst, allow_unsent=["draft"]).entries) == 1
    assert len(pair(src, dst, allow_unsent=["draft", "of another stage"]).entries) == 1
    with pytest.raises(TypeError, match=r"\('draft',\)"):
        pair(src, dst, allow_unsent="draft")


def test_destinations_without_a_source_are_left_alone():
    assert len(pair(layout(region()), layout(region(), region("draft", 0, 1 << 22))).entries) == 1


@pytest.mark.parametrize(
    ("src", "dst", "text"),
    [
        ({"page_bytes": 64, "row_bytes": 4}, {"page_bytes": 128, "row_bytes": 8}, "4 bytes a row .* 8 for"),
        ({"rows": 4}, {"rows": 8}, "stands for 4 tokens, a destination row for 2"),
        (
            {"row_bytes": 0, "page_bytes": 65},
            {"page_bytes": 130, "tokens": 32, "row_bytes": 0},
            "row of the source is unknown",
        ),
        ({"heads": Heads(0, 1, 2)}, {"heads": Heads(0, 1, 4)}, "counts 2 heads in all, destination 4"),
        (
            {"heads": Heads(0, 1, 2), "row_bytes": 4},
            {"heads": Heads(0, 2, 2), "row_bytes": 4},
            "bytes a row for 1 heads",
        ),
        ({"interleave": Interleave(2, 0), "rows": 4}, {"rows": 16}, "stands for"),
    ],
)
def test_geometries_that_differ_are_refused(src, dst, text):
    with pytest.raises(PairingError, match=text) as caught:
        pair(layout(region(**src)), layout(region(**dst)))
    assert "region kv layer 0" in str(caught.value)


def test_equal_pages_move_whole_where_rows_are_not_known():
    pairing = pair(layout(region(row_bytes=3)), layout(region(row_bytes=0)))
    assert pairing.entries[0, 4] == PAGE
    # Where only the padding differs, the rows move.
    pairing = pair(layout(region(page_bytes=70, row_bytes=4)), layout(region(row_bytes=4)))
    assert pairing.entries[0].tolist()[1:] == [70, 1 << 20, 64, 64, 0]


@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ({"heads": Heads(0, 1, 2)}, {"heads": Heads(1, 2, 2)}),
        ({"tokens": 32, "interleave": Interleave(2, 0)}, {"tokens": 32, "interleave": Interleave(2, 1)}),
    ],
)
def test_who_holds_nothing_of_it_owes_nothing(src, dst):
    pairing = pair(layout(region(row_bytes=4, **src)), layout(region(row_bytes=4, **dst)))
    assert len(pairing.plan([1], {"device": [1]})) == 0
    batch = pairing.plan_batch([Request([1], [1]), Request([2], [2])])
    assert len(batch) == 0 and len(batch.request(1)) == 0
    with pytest.raises(IndexError, match="request 2 is not one of the 2"):
        batch.request(2)


def test_a_share_of_one_is_the_whole():
    one = layout(region(page_bytes=65, interleave=Interleave(1, 0)))
    assert pair(layout(region(page_bytes=65)), one).plan([1], [2], num_tokens=3).total_bytes == 65


def test_replicas_share_the_regions_evenly():
    regions = [region("kv", k, (k + 1) << 20) for k in range(10)]
    dst = layout(*regions)
    shares = [pair(layout(*regions[::-1], replica=(k, 3)), dst).entries[:, 0].tolist() for k in range(3)]
    assert sorted(sum(shares, [])) == [(k + 1) << 20 for k in range(10)]
    assert sorted(map(len, shares)) == [3, 3, 4]


def test_neighbours_in_one_pool_become_one_entry():
    """A page-major pool: 61 layers side by side in each page, so a page is one descriptor and a run of pages too."""

    def pool(base):
        return layout(*(region("kv", k, base + k * PAGE, page_stride=61 * PAGE) for k in range(61)))

    pairing = pair(pool(1 << 30), pool(1 << 40))
    assert pairing.entries.tolist() == [[1 << 30, 61 * PAGE, 1 << 40, 61 * PAGE, 61 * PAGE, 0]]
    assert len(pairing.regions[0]) == 61
    plan = pairing.plan([1, 2, 5], {"device": [3, 4, 5]})
    assert plan.nbytes.tolist() == [2 * 61 * PAGE, 61 * PAGE]


def test_neighbours_on_one_side_only_stay_apart():
    src = layout(*(region("kv", k, (1 << 30) + k * PAGE, page_stride=2 * PAGE) for k in range(2)))
    dst = layout(*(region("kv", k, (1 << 40) + k * 4096) for k in range(2)))
    assert len(pair(src, dst).entries) == 2
    # Buffers of one page that happen to touch may be two registrations.
    one_page = layout(*(region("kv", k, (1 << 30) + k * PAGE, num_pages=1) for k in range(2)))
    assert len(pair(one_page, one_page).entries) == 2


def test_overlapping_destinations_are_refused():
    src = layout(region("a", 0, 1 << 30), region("b", 0, 1 << 31))
    dst = layout(region("a", 0, 1 << 20), region("b", 0, (1 << 20) + 8 * PAGE - 1))
    with pytest.raises(PairingError, match="destination region a layer 0 and region b layer 0 overlap"):
        pair(src, dst)
    unpaired = layout(region("a", 0, 1 << 20), region("b", 0, 1 << 21), region("draft", 0, (1 << 21) + 1))
    with pytest.raises(PairingError, match="overlap"):
        pair(src, unpaired)
    pair(dst, src)  # reading the same bytes twice is no fault


def bytes_of(region):
    pages = (region.base + i * region.page_stride for i in range(region.num_pages))
    return {byte for page in pages for byte in range(page, page + region.page_bytes)}


def brute(a, b):
    return bool(bytes_of(a) & bytes_of(b))


def test_overlap_is_exact_for_strided_regions():
    import random

    draw = random.Random(5)
    seen = set()
    for _ in range(4000):
        a, b = (
            region(
                "r",
                k,
                draw.randrange(40),
                draw.randrange(1, 6),
                draw.randrange(1, 6),
                page_stride=draw.choice([6, 7, 9, 12]),
            )
            for k in range(2)
        )
        assert (first_overlap([a, b], {a.key}) is not None) == brute(a, b), (a, b)
        seen.add(brute(a, b))
    assert seen == {True, False}


def test_one_space_takes_one_source_list():
    dst = layout(region("a", 0, 1 << 20), region("b", 0, 1 << 21))
    src = layout(region("a", 0, 1 << 30, space="x"), region("b", 0, 1 << 31, space="y"))
    with pytest.raises(PairingError, match="a layer 0 is numbered by space 'x', region b layer 0 by 'y'"):
        pair(src, dst)


def test_one_source_list_serves_one_numbering_only():
    """Page 7 of one space is not page 7 of another, on the source as on the destination."""
    src = layout(region("a", 0, 1 << 30, space="host"), region("b", 0, 1 << 31))
    dst = layout(region("a", 0, 1 << 20, space="host"), region("b", 0, 1 << 21))
    pairing = pair(src, dst)
    lists = {"host": [2, 3], "device": [0, 1]}
    with pytest.raises(PlanError, match="read from different source spaces"):
        pairing.plan([0, 1], lists)
    assert len(pairing.plan({"host": [0, 1], "device": [4, 5]}, lists)) == 2
    assert len(pairing.plan({"host": [0, 1], None: [4, 5]}, lists)) == 2


def test_an_overlap_behind_another_one_is_found():
    """Aliases that nobody writes are allowed, and hide nothing."""
    src = layout(region("kv", 0, 1 << 30), region("kv", 1, 1 << 31))
    alias = [region("draft", 0, 0), region("draft", 1, 0)]
    apart = [region("kv", 0, 1 << 20), region("kv", 1, 1 << 21)]
    assert len(pair(src, layout(*alias, *apart)).entries) == 2
    with pytest.raises(PairingError, match="region kv layer 0 and region kv layer 1 overlap"):
        pair(src, layout(*alias, region("kv", 0, 1 << 20), region("kv", 1, (1 << 20) + PAGE)))


def test_overlap_of_huge_pools_is_decided_at_once():
    def pages(base, stride):
        return Region("r", base, base, 1, 1 << 50, page_stride=stride)

    assert first_overlap([pages(0, 4), pages(1, 6)], {("r", 0)}) is None
    assert first_overlap([pages(0, 4), pages(2, 6)], {("r", 0)}) is not None


def test_rows_of_unequal_size_in_pages_of_equal_size_are_refused():
    with pytest.raises(PairingError, match="4 bytes a row for 1 heads on the source, 2 for 1 "):
        pair(layout(region(row_bytes=4)), layout(region(row_bytes=2)))
