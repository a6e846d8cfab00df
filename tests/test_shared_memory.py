"""Groups of layers with page tables of their own over one buffer, as vLLM's hybrid allocator lays them out."""

from __future__ import annotations

import ctypes
import json
from typing import Any

import numpy as np
import pytest
from jobs import job_of

import kvplan
from kvplan import Layout, Memory, PairingError, PlanError, Region, Request

N, SIZE = 16, 32  # pages, bytes of a page


def layout(base: int, shift: int = 0, page_bytes: int = SIZE, **fields: Any) -> Layout:
    """Two tensors, in each of which a layer of either group lies; the window group begins `shift` pages later."""
    regions = []
    for tensor in range(2):
        at = base + tensor * 4 * N * SIZE
        regions.append(Region("full", tensor, at, SIZE, N + shift, space="full"))
        win = {"page_stride": SIZE} | fields
        regions.append(Region("win", tensor + 2, at + shift * SIZE, page_bytes, N, space="win", **win))
    return Layout(regions, page_size=4)


def made(shift: int = 0) -> kvplan.Pairing:
    return kvplan.pair(layout(1 << 20), layout(1 << 30, shift))


def plans(pairing: kvplan.Pairing, requests: list[Request]) -> Any:
    """Each way to plan these requests: compiled, the oracle, and a prepared job."""
    yield lambda: pairing.plan_batch(requests)
    yield lambda: pairing.plan_batch(requests, backend="reference")
    yield lambda: pairing.planner(requests, device="cpu").run().wait()
    if len(requests) == 1:
        yield lambda: pairing.plan(**vars(requests[0]))


def request(full: list[int], win: list[int], **positions: Any) -> Request:
    return Request({"full": full, "win": win}, {"full": full, "win": win}, **positions)


def test_pages_of_two_groups_in_one_buffer_arrive():
    pools = [np.zeros((2, 4 * N, SIZE), np.uint8) for _ in range(2)]
    pools[0][:] = np.random.default_rng(0).integers(1, 255, pools[0].shape)
    src, dst = (layout(pool.ctypes.data) for pool in pools)
    pairing = kvplan.pair(src, dst)
    assert "share memory, of which no page may be written twice: 'full' (page 0 is page 0 of it), 'win'" in (
        pairing.explain()
    )
    lists = {"full": [3, 4, 9], "win": [5, 1]}
    kvplan.execute(pairing.plan({"full": [0, 7, 2], "win": [8, 6]}, lists))
    want = np.zeros_like(pools[0])
    want[:, [3, 4, 9, 5, 1]] = pools[0][:, [0, 7, 2, 8, 6]]
    assert np.array_equal(pools[1], want)


def test_such_memory_is_registered_once():
    buffer = ctypes.create_string_buffer(8 * N * SIZE)
    shared = layout(ctypes.addressof(buffer))
    assert shared.memory_spans() == [
        (Memory.DRAM, ctypes.addressof(buffer) + tensor * 4 * N * SIZE, N * SIZE) for tensor in range(2)
    ]
    engine = kvplan.engines.LocalEngine()
    engine.register(shared)
    engine.close()


@pytest.mark.parametrize("shift", [0, 1, 3])
def test_one_physical_page_written_through_two_spaces_is_refused(shift):
    pairing, free = made(shift), 5 - shift + 1  # page 5 of "full" is page 5 - shift of "win"
    twice = request([2, 5], [free, 5 - shift])
    text = (
        rf"space 'win': destination page {5 - shift} is given twice, at positions 1 of space 'full' "
        rf"\(page 5 there, in the same memory\) and 1; region win layer 2"
    )
    for number, plan in enumerate(plans(pairing, [twice])):
        with pytest.raises(PlanError, match="given twice" if number == 1 else text):
            plan()
    for plan in plans(pairing, [request([2, 5], [free, 7])]):
        plan()


@pytest.mark.parametrize("shift", [0, 2])
def test_across_the_requests_of_a_batch(shift):
    first, second = request([2, 5], [11]), request([8], [9, 5 - shift])
    text = r"request 1: space 'win': .* positions 1 of space 'full' \(page 5 there, .*\) of request 0 and 1"
    for number, plan in enumerate(plans(made(shift), [first, second])):
        with pytest.raises(PlanError, match="given twice" if number == 1 else text):
            plan()
    text = rf"request 1: space 'full': .* page {9 + shift} is given twice, at positions 0 of space 'win' \(page 9 there"
    with pytest.raises(PlanError, match=text):
        made(shift).plan_batch([request([2], [9]), request([9 + shift], [])])


def test_pages_that_are_not_written_now_are_no_fault():
    """The lists of two chunks may hold one page where only one of them writes it."""
    pairing = made()
    chunk = Request(
        {"full": [1], "win": [2]},
        {"full": [3, 4], "win": [4, 3]},
        src_start={"full": 4, "win": 4},
        dst_start={"full": 0, "win": 0},
    )
    assert len(pairing.plan(**vars(chunk))) == 4
    assert pairing.plan(**vars(chunk), backend="reference").lists() == pairing.plan(**vars(chunk)).lists()
    lists = {"full": [0, 0, 3], "win": [0, 5, 0]}
    assert len(pairing.plan(lists, lists, null_page=0)) == 4  # the null page is in both


def test_ids_of_both_widths():
    for narrow in (False, True):
        job = job_of(made(2), [request([2, 5], [6, 3])], narrow=narrow)
        assert job.expected()[1][:5].tolist() == [3, 0, 1, 1, 3]


@pytest.mark.parametrize(
    "wrong",
    [
        {"page_bytes": SIZE // 2, "page_stride": SIZE // 2},
        {"page_bytes": SIZE, "page_stride": 2 * SIZE},
    ],
)
def test_overlays_that_do_not_agree_are_refused(wrong):
    with pytest.raises(
        PairingError, match="destination region .* overlap in memory: regions of two spaces, .*one to one"
    ):
        kvplan.pair(layout(1 << 20), layout(1 << 30, **wrong))


def test_overlays_that_begin_inside_a_page_are_refused():
    def two(base: int, offset: int) -> Layout:
        regions = [Region(name, 0, base + k * offset, SIZE, N, space=name) for k, name in enumerate(("a", "b"))]
        return Layout(regions, page_size=4)

    for offset in (1, SIZE // 2, SIZE - 1, SIZE + 8):
        with pytest.raises(PairingError, match="overlap in memory"):
            kvplan.pair(two(1 << 20, SIZE * N), two(1 << 30, offset))
    for offset in (0, SIZE, 5 * SIZE):
        kvplan.pair(two(1 << 20, SIZE * N), two(1 << 30, offset))
    with pytest.raises(PairingError, match="destination region a layer 0 and region a layer 1 overlap in memory$"):
        kvplan.pair(
            *(Layout([Region("a", k, base + k * gap, SIZE, N) for k in range(2)], page_size=4) for base, gap in
              ((1 << 20, SIZE * N), (1 << 30, SIZE)))
        )  # fmt: skip


def test_overlays_of_unequal_shifts_are_refused():
    """Two tensors in which the same spaces lie differently: no one shift says which ids meet."""
    regions = [Region("full", k, (k + 1) << 30, SIZE, N, space="full") for k in range(2)]
    regions += [Region("win", k, ((k + 1) << 30) + k * SIZE, SIZE, N, space="win") for k in range(2)]
    src = Layout([Region(r.name, r.layer, k << 20, SIZE, N, space=r.space) for k, r in enumerate(regions)], page_size=4)
    with pytest.raises(PairingError, match="region (full|win) layer . and .* overlap in memory: regions of two spaces"):
        kvplan.pair(src, Layout(regions, page_size=4))


def test_a_state_page_over_pages_of_k_and_v():
    """A group whose page is K and V of another's, side by side."""

    def pool(base: int, apart: int) -> Layout:
        regions = [Region(name, 0, base + k * SIZE // 2, SIZE // 2, N, page_stride=SIZE) for k, name in enumerate("kv")]
        return Layout([*regions, Region("state", 0, base + apart, SIZE, N, space="state")], page_size=4)

    pairing = kvplan.pair(pool(1 << 20, N * SIZE), pool(1 << 30, 0))
    lists = {"device": [1, 2], "state": [1, 2]}
    for backend in (None, "reference"):
        with pytest.raises(PlanError, match="twice"):
            pairing.plan(lists, {"device": [3, 4], "state": [5, 4]}, backend=backend)
    pairing.plan(lists, {"device": [3, 4], "state": [5, 6]})


def test_a_layout_that_shares_memory_travels():
    there = Layout.from_dict(json.loads(json.dumps(layout(1 << 30, 1).to_dict())))
    assert kvplan.pair(layout(1 << 20), there).spaces[:, 6:].tolist() == [[0, 0], [0, 1]]
