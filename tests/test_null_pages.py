"""Null pages: ids in a table that stand for no page, as vLLM's block 0 in tables of sliding windows."""

from __future__ import annotations

import numpy as np
import pytest
from test_positions import Two

import kvplan
from kvplan import Layout, PlanError, Region, Request

N = 16


def one(src_tokens: int = 4, dst_tokens: int = 4) -> kvplan.Pairing:
    src = Layout([Region("kv", 0, 1 << 20, 8 * src_tokens, N, tokens=src_tokens, row_bytes=8)], page_size=4)
    dst = Layout([Region("kv", 0, 1 << 30, 8 * dst_tokens, N, tokens=dst_tokens, row_bytes=8)], page_size=4)
    return kvplan.pair(src, dst)


@pytest.mark.parametrize("src_tokens", [4, 8])
@pytest.mark.parametrize("null_page", [0, {"win": 0}, {"win": np.int64(0)}])
def test_a_window_cache_beside_a_full_cache(src_tokens, null_page):
    """Both groups have lists of all tokens; of the window group, block 0 stands for those behind the window."""
    made = Two(src_tokens, 4)
    dst = {"full": [1, 2, 3, 7, 8, 9], "win": [0, 0, 0, 0, 5, 6]}
    src = {"full": [1, 2, 3, 4, 5, 6], "win": [0, 0, 0, 0, 9, 10]}
    if src_tokens == 8:
        src = {"full": [1, 2, 3], "win": [0, 0, 9]}
    plan = made.pairing.plan(src, dst, null_page=null_page)
    assert made.pairing.plan(src, dst, null_page=null_page, backend="reference").lists() == plan.lists()
    kvplan.execute(plan)
    made.check("full", src["full"], 0, dst["full"], 0, range(24))
    made.check("win", src["win"], 0, dst["win"], 0, range(16, 24))


def test_what_is_not_sent_may_be_null_on_one_side():
    prefix = one(8, 4).plan([0, 0, 6], [3, 4], dst_start=16, null_page=0)
    assert prefix.lists() == ([(1 << 20) + 6 * 64], [(1 << 30) + 3 * 32], [64])
    chunk = one().plan([6], [0, 0, 3, 0], src_start=8, dst_start=0, null_page=0)
    assert chunk.lists() == ([(1 << 20) + 6 * 32], [(1 << 30) + 3 * 32], [32])
    assert len(one().plan([0, 0], [0, 0], null_page=0)) == 0
    assert len(one().plan([5, 0], [], dst_start=8, null_page=0)) == 0


def test_stretches_that_touch_once_null_pages_are_out_are_one_run():
    plan = one().plan([3, 0, 4, 0, 0, 9], [5, 0, 6, 0, 0, 2], null_page=0)
    assert plan.nbytes.tolist() == [64, 32]


REFUSED = [
    ([0, 5], [3, 4], {}, "source page at position 0 is the null page 0, .* at position 0, .* 0 lies too, is page 3"),
    ([7, 5], [3, 0], {}, "destination page at position 1 is the null page 0, .* at position 1, .* 4 lies.* page 5"),
    ([0, 5], [9, 9, 0, 4], {"src_start": 8, "dst_start": 0}, "page 9 is given twice, at positions 0 and 1"),
    ([0, 0, 7, 7], [0, 0, 5, 5], {}, "page 5 is given twice, at positions 2 and 3"),
    ([0, 0, 7, 99], [0, 0, 5, 6], {}, "source page id 99 at position 3 is out of range"),
    ([0, 0, 7, 9], [0, 0, 5, -1], {}, "destination page id -1 at position 3 is out of range"),
    ([0, 0, 7, 9], [0, 0, 5], {}, "the length of the destination list is 3 pages, .* exactly 4"),
    ([0, 0, 7], [0, 0, 5], {"num_tokens": 4}, "the length of the source list is 3 pages, but 4 tokens take 1"),
    ([0, 7], [0, 5], {"src_start": 2, "dst_start": 0, "num_tokens": 6}, "must differ by a multiple of 4"),
]  # fmt: skip


@pytest.mark.parametrize(("src", "dst", "positions", "text"), REFUSED)
def test_refusals_name_places_in_the_lists_that_were_given(src, dst, positions, text):
    for first in ([], [Request([0, 1], [0, 15], null_page=0)]):
        prefix = "request 1: " if first else ""
        with pytest.raises(PlanError, match=f"^{prefix}space 'device': .*{text}"):
            one().plan_batch([*first, Request(src, dst, **positions, null_page=0)])
    with pytest.raises(PlanError, match=text) as error:
        one().plan(src, dst, **positions, null_page=0)
    assert error.value.case()["requests"] == [
        {"src_pages": src, "dst_pages": dst, "src_start": 0, "null_page": 0} | positions
    ]


def test_pages_of_unequal_sizes_are_null_for_the_same_tokens():
    text = "source page at position 1 is the null page 0, .* destination page at position 0, where token 4 lies too"
    with pytest.raises(PlanError, match=text):
        one(4, 8).plan([6, 0], [5], null_page=0)
    assert len(one(4, 8).plan([0, 0, 6, 8], [0, 5], null_page=0)) == 2
    # A chunk that begins inside a page.
    chunk = one(4, 8).plan([0, 6], [9, 0, 5], src_start=12, dst_start=0, null_page=0)
    assert chunk.dst.tolist() == [(1 << 30) + 5 * 64]


def test_two_requests_write_one_page_beside_null_pages():
    requests = [Request([0, 7], [0, 5], null_page=0), Request([0, 8, 9], [0, 6, 5], null_page=0)]
    with pytest.raises(PlanError, match="request 1: .* page 5 is given twice, at positions 1 of request 0 and 2"):
        one().plan_batch(requests)


@pytest.mark.parametrize(
    ("null_page", "text"),
    [
        (True, r"null_page\['device'\] must be a page id, an integer, not True"),
        ("0", r"null_page\['device'\] must be a page id, an integer, not '0'"),
        ({"device": None}, r"null_page\['device'\] must be a page id, an integer, not None"),
        ({"host": 0}, "null_page names 'host'; the destination has the spaces 'device'"),
        (1 << 63, r"null_page\['device'\] is 9223372036854775808; it must be a page id"),
    ],
)
def test_a_null_page_is_a_page_id(null_page, text):
    with pytest.raises(PlanError, match=text):
        one().plan([0, 1], [0, 2], null_page=null_page)


def test_null_pages_are_not_looked_for_on_a_device():
    with pytest.raises(PlanError, match="null_page is given, and the plan is to be made on cpu: .* would wait"):
        one().planner([Request([0, 1], [0, 2], null_page=0)], device="cpu")
