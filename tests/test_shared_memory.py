"""Groups of layers with page tables of their own over one buffer, as vLLM's hybrid allocator lays them out."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import random
from typing import Any

import numpy as np
import pytest
from jobs import job_of

import kvplan
from kvplan import Layout, Memory, PairingError, PlanError, Region, Request
from kvplan.pairing.overlap import shared_spaces

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


def where(region: Region) -> dict[int, int]:
    """The page that each byte of a region belongs to."""
    starts = [0] if not region.scattered else [i * region.row_pitch for i in range(region.rows)]
    nbytes = region.page_bytes if not region.scattered else region.row_bytes
    pages = itertools.product(range(region.num_pages), starts, range(nbytes))
    return {region.base + page * region.page_stride + start + byte: page for page, start, byte in pages}


def sharing(layout: Layout, written: set[tuple[str, int]]) -> dict[str, tuple[str, int]] | None:
    """What `shared_spaces` must say, byte by byte; None where it must refuse."""
    ties: dict[str, list[tuple[str, int]]] = {}
    held = {region.key: where(region) for region in layout.regions}
    for a, b in itertools.combinations(layout.regions, 2):
        both = held[a.key].keys() & held[b.key].keys() if {a.key, b.key} & written else set()
        shifts = {held[b.key][byte] - held[a.key][byte] for byte in both}
        if shifts and (len(shifts) > 1 or a.space == b.space or a.page_stride != b.page_stride):
            return None
        for shift in shifts:
            ties.setdefault(a.space, []).append((b.space, shift))
            ties.setdefault(b.space, []).append((a.space, -shift))
    found: dict[str, tuple[str, int]] = {}
    for first in layout.spaces:
        if first not in ties or first in found:
            continue
        place, new = {first: 0}, [first]
        while new:
            space = new.pop()
            for other, shift in ties[space]:
                if other not in place:
                    new.append(other)
                if place.setdefault(other, place[space] - shift) != place[space] - shift:
                    return None
        found |= {space: (first, at - min(place.values())) for space, at in place.items()}
    return found


def test_which_spaces_share_memory_is_what_the_bytes_say():
    """Blocks of one stride, rarely of two, at the same and at other places of a page; rows side by side and apart."""
    draw, outcomes = random.Random(3), {"refused": 0, "apart": 0, "shared": 0, "three spaces": 0}
    for _ in range(500):
        regions: list[Region] = []
        stride, step = draw.choice([8, 12, 16]), draw.choice([1, 2, 4])
        for number in range(draw.randint(2, 7)):
            rows, row, apart = draw.choice([1, 1, 2]), draw.choice([1, 2, 4]), draw.choice([0, 0, 2])
            fields = {"row_stride": row + apart} if apart else {}
            base = 64 + stride * draw.randint(0, 3) + draw.randrange(0, stride, step)
            nbytes = rows * row if apart else min(rows * row + draw.randint(0, 2), stride)
            if apart and rows * (row + apart) > stride:
                continue
            regions.append(
                Region(
                    f"r{number}",
                    0,
                    base,
                    nbytes,
                    draw.randint(1, 4),
                    rows=rows,
                    tokens=rows,
                    row_bytes=row,
                    page_stride=stride + 4 * (draw.random() < 0.05),
                    space=f"{draw.choice('abcd')}{rows}",
                    **fields,
                )
            )
        layout = Layout(regions, page_size=4)
        written = {region.key for region in regions if draw.random() < 0.7}
        want = sharing(layout, written)
        if want is None:
            outcomes["refused"] += 1
            with pytest.raises(PairingError, match="overlap in memory"):
                shared_spaces(layout, written)
            continue
        assert shared_spaces(layout, written) == want
        outcomes["shared" if want else "apart"] += 1
        outcomes["three spaces"] += len(want) > 2
    assert min(outcomes.values()) > 20, outcomes


@pytest.mark.parametrize(("spaces", "layers"), [(3000, 1), (2, 1100), (12, 200)])
def test_thousands_of_regions_over_one_page_major_buffer(spaces, layers):
    """All that lies at one place of a page overlays all else there: more than two regions each with each."""

    def many(base: int, shifts: int) -> Layout:
        regions = [
            Region(f"g{space}", layer, base + (space % shifts * layers + layer) * 8, 8, 9, page_stride=layers * 8,
                   space=f"s{space}")
            for space in range(spaces)
            for layer in range(layers)
        ]  # fmt: skip
        return Layout(regions, page_size=4)

    written = {(f"g{space}", layer) for space in range(spaces) for layer in range(layers)}
    layout = many(1 << 30, min(spaces, 3))
    assert shared_spaces(layout, written) == {f"s{space}": ("s0", space % 3) for space in range(spaces)}
    *others, last = layout.regions
    moved = dataclasses.replace(last, base=last.base - 4)
    with pytest.raises(PairingError, match="overlap in memory"):
        shared_spaces(Layout([*others, moved], page_size=4), written)
