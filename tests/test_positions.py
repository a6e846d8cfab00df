"""Where lists begin: starts for each space, and a prefix that the decode side holds. All on bytes, carried out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import kvplan
from kvplan import Layout, PlanError, Region, Request
from kvplan.planning import reference

N, ROW = 16, 8  # pages of a pool, bytes of a row


class Pool:
    """A pool of pages for one component, whose rows are numbered bytes on the source and zeros on the destination."""

    def __init__(self, tokens: int, seed: int | None = None) -> None:
        self.tokens = tokens
        if seed is None:
            self.rows = np.zeros((N, tokens, ROW), np.uint8)
        else:
            self.rows = np.random.default_rng(seed).integers(1, 255, (N, tokens, ROW)).astype(np.uint8)

    def region(self, name: str, space: str) -> Region:
        size = self.tokens * ROW
        return Region(name, 0, self.rows.ctypes.data, size, N, tokens=self.tokens, row_bytes=ROW, space=space)


class Two:
    """A full cache and a window cache with page lists of their own on both sides."""

    def __init__(self, src_tokens: int, dst_tokens: int) -> None:
        self.src = {name: Pool(src_tokens, seed) for seed, name in enumerate(("full", "win"))}
        self.dst = {name: Pool(dst_tokens) for name in ("full", "win")}
        layouts = [
            Layout([pool.region(name, name) for name, pool in side.items()], page_size=1)
            for side in (self.src, self.dst)
        ]
        self.pairing = kvplan.pair(*layouts)

    def check(self, name: str, src: list[int], src_start: int, dst: list[int], dst_start: int, tokens: range) -> None:
        """Fails unless exactly these tokens of a component lie in its destination pool, at their places."""
        a, b = self.src[name], self.dst[name]
        want = np.zeros_like(b.rows)
        for t in tokens:
            from_page, from_row = divmod(t - src_start, a.tokens)
            page, row = divmod(t - dst_start, b.tokens)
            want[dst[page], row] = a.rows[src[from_page], from_row]
        assert np.array_equal(b.rows, want)
        b.rows[:] = 0


def both(pairing: kvplan.Pairing, *arguments: Any, **positions: Any) -> kvplan.Plan:
    """The plan, which the oracle gives too."""
    plan = pairing.plan(*arguments, **positions)
    assert pairing.plan(*arguments, **positions, backend="reference").lists() == plan.lists()
    src, dst, nbytes = plan.lists()
    want = reference.plan(pairing.src, pairing.dst, *arguments, **positions)
    assert reference.canonical(zip(dst, src, nbytes, strict=True)) == want
    return plan


@pytest.mark.parametrize(("src_tokens", "dst_tokens"), [(4, 8), (8, 4), (4, 4)])
def test_lists_that_begin_at_different_tokens_are_one_plan(src_tokens, dst_tokens):
    made = Two(src_tokens, dst_tokens)
    full, win = [1, 2, 3, 4, 5, 6][: -(-23 // src_tokens)], [9, 10, 11, 12][: -(-15 // src_tokens)]
    lists = {"full": [0, 1, 2, 7, 8, 9][: -(-23 // dst_tokens)], "win": [7, 5, 3, 2][: -(-15 // dst_tokens)]}
    plan = both(
        made.pairing,
        {"full": full, "win": win},
        lists,
        src_start={"win": 8},
        dst_start={"full": 0, "win": 8},
        num_tokens={"full": 23, "win": 15},
    )
    kvplan.execute(plan)
    end = 23 if src_tokens != dst_tokens else 24  # a page that moves whole takes along what is behind the last token
    made.check("full", full, 0, lists["full"], 0, range(end))
    made.check("win", win, 8, lists["win"], 8, range(8, end))


def test_a_chunk_of_two_source_spaces_goes_by_position():
    made = Two(4, 4)
    lists = {"full": [0, 1, 2, 3], "win": [7, 5, 3, 2]}
    with pytest.raises(PlanError, match="read from different source spaces"):
        made.pairing.plan([4, 9], lists, src_start=8, dst_start=0)
    positions = {"src_start": {"full": 8, "win": 8}, "dst_start": {"full": 0, "win": 0}}
    kvplan.execute(both(made.pairing, {"full": [4, 9], "win": [1, 15]}, lists, **positions))
    made.check("full", [4, 9], 8, lists["full"], 0, range(8, 16))
    made.check("win", [1, 15], 8, lists["win"], 0, range(8, 16))


@pytest.mark.parametrize("prefix", range(0, 25))
@pytest.mark.parametrize(("src_tokens", "dst_tokens"), [(8, 4), (4, 8)])
def test_a_prefix_that_the_decode_side_holds_is_not_sent(src_tokens, dst_tokens, prefix):
    made = Two(src_tokens, dst_tokens)
    src = [3, 1, 6, 2, 7, 5][: -(-23 // src_tokens)]
    dst = [0, 9, 8, 2, 11, 4][: -(-max(23 - prefix, 0) // dst_tokens)]
    positions = {"dst_start": {"full": prefix}, "num_tokens": {"full": 23}}
    plan = both(made.pairing, {"full": src, "win": []}, {"full": dst, "win": []}, **positions)
    kvplan.execute(plan)
    made.check("full", src, 0, dst, prefix, range(prefix, 23))
    assert len(plan) > 0 or prefix >= 23


def test_whole_pages_behind_a_prefix():
    made = Two(4, 4)
    nothing = {"win": []}
    kvplan.execute(both(made.pairing, {"full": [3, 1, 6]} | nothing, {"full": [5]} | nothing, dst_start={"full": 8}))
    made.check("full", [3, 1, 6], 0, [5], 8, range(8, 12))
    assert len(both(made.pairing, {"full": [3]} | nothing, {"full": []} | nothing, dst_start={"full": 4})) == 0
    with pytest.raises(PlanError, match="'full': .* src_start 0 and dst_start 2 must differ by a multiple of 4 tokens"):
        made.pairing.plan({"full": [3, 1]} | nothing, {"full": [5, 6]} | nothing, dst_start={"full": 2})
    with pytest.raises(PlanError, match="'full': .* is 1 pages, .* at least 2 pages .* from token 4"):
        made.pairing.plan({"full": [3, 1, 6]} | nothing, {"full": [5]} | nothing, dst_start={"full": 4})


def one() -> kvplan.Pairing:
    return kvplan.pair(*(Layout([Region("kv", 0, 1 << base, 32, N)], page_size=4) for base in (20, 30)))


def test_requests_with_prefixes_in_a_batch_write_no_page_twice():
    requests = [Request([1, 2, 3], [7], 0, 8), Request([4, 5], [8, 9], 4, 0)]
    with pytest.raises(PlanError, match="request 1: .* at least 3 pages"):
        one().plan_batch(requests)
    requests[1] = Request([4, 5], [7, 8, 9], 4, 0)  # it does not write page 7
    assert [len(one().plan_batch(requests).request(k)) for k in range(2)] == [1, 1]
    requests.append(Request([4, 5], [8], 0, 4))
    with pytest.raises(PlanError, match="request 2: .*page 8 is given twice, at positions 1 of request 1 and 0"):
        one().plan_batch(requests)
    requests[2] = Request([4, 5], [7], 0, 4)
    with pytest.raises(PlanError, match="request 2: .*page 7 is given twice, at positions 0 of request 0 and 0"):
        one().plan_batch(requests)
    requests[2] = Request([4, 5], [7], 0, 8)  # all of it is there, so page 7 is not written
    assert len(one().plan_batch(requests).request(2)) == 0


def test_a_planner_takes_what_plan_takes():
    made = Two(8, 4)
    request = Request({"full": [3, 1], "win": [2]}, {"full": [5, 6, 7], "win": [1]}, {"win": 8}, {"full": 4, "win": 12})
    want = made.pairing.plan(**vars(request))
    assert made.pairing.planner([request], device="cpu").run().lists() == want.lists()
    assert made.pairing.plan_batch([request, Request({"full": [], "win": []}, {"full": [], "win": []})]).lists() == (
        want.lists()
    )


LISTS = {"full": [3, 1], "win": [2]}


@pytest.mark.parametrize(
    ("positions", "text"),
    [
        ({"src_start": 8}, "src_start 8 belongs to no list: .* by name"),
        ({"dst_start": 0}, "dst_start 0 belongs to no list"),
        ({"num_tokens": 8}, "num_tokens 8 belongs to no list"),
        ({"src_start": {"full": 8}, "num_tokens": 8}, "num_tokens 8 belongs to no list"),
        ({"src_start": {"fool": 8}}, "src_start names 'fool'; the destination has the spaces 'full', 'win'"),
        ({"dst_start": {"full": -4}}, r"dst_start\['full'\] is -4; it must be 0 or more"),
        ({"num_tokens": {"win": 1.5}}, r"num_tokens\['win'\] must be an integer, not 1.5"),
        ({"num_tokens": {"win": True}}, r"num_tokens\['win'\] must be an integer, not True"),
        ({"dst_start": {"win": 1 << 62}}, r"dst_start\['win'\] is 4611686018427387904; it must"),
        ({"src_start": [8, 8]}, r"src_start must be an integer, or a dict \{destination space: integer\}, not a list"),
        ({"num_tokens": {"win": 9}}, "space 'win': the length of the source list is 1 pages, but 9 tokens take 3"),
    ],
)  # fmt: skip
def test_positions_that_have_no_meaning_are_refused(positions, text):
    made = Two(4, 4)
    with pytest.raises(PlanError, match=text):
        made.pairing.plan(LISTS, LISTS, **positions)
    nothing = Request({space: [] for space in LISTS}, {space: [] for space in LISTS})
    with pytest.raises(PlanError, match="request 1: " + text):
        made.pairing.plan_batch([nothing, Request(LISTS, LISTS, **positions)])


def test_one_list_begins_at_one_token():
    """Two destination spaces that one source list serves."""
    src = Layout([Region(name, 0, 1 << base, 32, N) for name, base in (("a", 20), ("b", 21))], page_size=4)
    dst = Layout([Region(name, 0, 1 << base, 32, N, space=name) for name, base in (("a", 30), ("b", 31))], page_size=4)
    pairing = kvplan.pair(src, dst)
    lists = {"a": [1, 2, 3], "b": [4, 5, 6]}
    for wrong in ({"a": 8}, {None: 8, "a": 4}, {"a": 0, "b": 4}):
        with pytest.raises(PlanError, match="src_start has it begin at different tokens"):
            pairing.plan([7], lists, src_start=wrong, dst_start=0)
    want = both(pairing, [7], lists, src_start=8, dst_start=0)
    for same in ({None: 8}, {"a": 8, "b": 8}, {None: 8, "b": 8}):
        assert both(pairing, [7], lists, src_start=same, dst_start=0).lists() == want.lists()
    plan = both(pairing, [7, 8], lists | {"b": [5]}, src_start=4, dst_start={None: 0, "b": 8})
    assert plan.lists() == (
        [(1 << 20) + 7 * 32, (1 << 21) + 8 * 32],
        [(1 << 30) + 2 * 32, (1 << 31) + 5 * 32],
        [64, 32],
    )
