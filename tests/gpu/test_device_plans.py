"""Plans of page ids that are on a GPU: whole clusters against the CPU's plans and the oracle, refusals, planners."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import one_region, request_of
from on_device import DEVICE, DRY, finish, needs_device, needs_gpu, there
from stage_inputs import same
from strategies import clusters, profile

import kvplan
from kvplan import Layout, Memory, PlanError, Region, Request, pair

pytestmark = [pytest.mark.gpu, needs_device]


def _cupy(ids, dtype):
    import cupy

    return cupy.asarray(np.asarray(ids, dtype))


FORMS = {
    "int64": lambda ids: torch.tensor(ids, dtype=torch.int64, device=DEVICE),
    "int32": lambda ids: torch.tensor(ids, dtype=torch.int32, device=DEVICE),
    "apart": lambda ids: torch.tensor(ids, dtype=torch.int64, device=DEVICE).repeat_interleave(2)[::2],
    "on the CPU": lambda ids: np.array(ids, np.int32),
}
CUPY = {"CuPy int64": lambda ids: _cupy(ids, np.int64), "CuPy int32": lambda ids: _cupy(ids, np.int32)}
if importlib.util.find_spec("cupy") is not None and not DRY:
    FORMS |= CUPY


def equal(got: kvplan.Plan, want: kvplan.Plan) -> None:
    """Fails unless two plans are equal: tables, segments, offsets and sizes."""
    same([got.table], [want.table])
    assert got.segments == want.segments
    assert [list(cuts) for cuts in got.offsets] == [list(cuts) for cuts in want.offsets]
    assert (len(got), got.total_bytes, got.requests) == (len(want), want.total_bytes, want.requests)


def in_form(lists, form):
    """A page list, or a dict of page lists, with each list made into a `form` of FORMS."""
    if not isinstance(lists, dict):
        return form(lists)
    return {space: form(ids) for space, ids in lists.items()}


def plan_there(pairing: kvplan.Pairing, request: Request) -> kvplan.Plan:
    """A plan made on the device, even where the lists are on the CPU."""
    return pairing.planner([request], device=DEVICE).run()


@given(cluster=clusters(nulls=False), form=st.sampled_from(sorted(set(FORMS) - {"on the CPU"})))
@profile(80)
def test_clusters_of_any_kind(cluster, form):
    for src, dst in cluster.pairs():
        pairing = pair(src, dst, allow_unsent=cluster.unsent(src))
        want = pairing.plan(cluster.src_pages, cluster.dst_pages, **cluster.positions)
        make = FORMS[form]
        got = pairing.plan(in_form(cluster.src_pages, make), in_form(cluster.dst_pages, make), **cluster.positions)
        equal(got, want)
        if len(pairing.space_names):
            equal(plan_there(pairing, request_of(cluster)), want)


@given(cluster=clusters(nulls=False))
@profile(20)
def test_clusters_against_the_oracle(cluster):
    src, dst = next(cluster.pairs())
    pairing = pair(src, dst, allow_unsent=cluster.unsent(src))
    request = request_of(cluster)
    want = pairing.plan_batch([request], backend="reference")
    make = FORMS["int64"]
    got = pairing.plan(in_form(cluster.src_pages, make), in_form(cluster.dst_pages, make), **cluster.positions)
    same([got.table], [want.table])
    assert got.segments == want.segments


TWO_SPACES = pair(
    Layout([Region("c4", 0, 1 << 20, 100, 16), Region("idx", 0, 1 << 24, 10, 16, memory=Memory.VRAM(0))], page_size=4),
    Layout(
        [Region("c4", 0, 1 << 30, 100, 12, space="host"), Region("idx", 0, 1 << 34, 10, 9, memory=Memory.VRAM(0))],
        page_size=4,
    ),
)


@pytest.mark.parametrize("device", sorted(FORMS))
@pytest.mark.parametrize("host", sorted(FORMS))
@pytest.mark.parametrize("src", sorted(FORMS))
def test_lists_may_be_mixed(src, host, device):
    ids = [3, 4, 7], [0, 1, 11], [8, 2, 3]
    want = TWO_SPACES.plan(ids[0], {"host": ids[1], "device": ids[2]})
    got = TWO_SPACES.plan(FORMS[src](ids[0]), {"host": FORMS[host](ids[1]), "device": FORMS[device](ids[2])})
    equal(got, want)


def test_what_a_plan_on_a_gpu_can_do():
    make = FORMS["int64"]
    lists = [3, 4, 7], {"host": [0, 1, 11], "device": [8, 2, 3]}
    got, want = TWO_SPACES.plan(make(lists[0]), in_form(lists[1], make)), TWO_SPACES.plan(*lists)
    assert repr(got) == repr(want) and got.lists() == want.lists() and got.explain() == want.explain()
    assert [part.lists() for part in got.chunks(2)] == [part.lists() for part in want.chunks(2)]
    assert got.request(0).lists() == want.request(0).lists()
    assert torch.equal(got.src, want.src) and torch.equal(got.dst, want.dst) and torch.equal(got.nbytes, want.nbytes)
    if not DRY:
        assert int(got.count) == len(want) and got.device_table.is_cuda
        same([got.device_table[:, : len(want)]], [want.table])


def test_batches():
    make = FORMS["int32"]
    lists = [([1, 2], [5, 6]), ([], []), ([3, 4, 9], [7, 8, 50])]
    pairing = one_region(layers=3)
    got = pairing.plan_batch(Request(make(src), make(dst)) for src, dst in lists)
    want = pairing.plan_batch(Request(src, dst) for src, dst in lists)
    equal(got, want)
    for number in range(3):
        assert got.request(number).lists() == want.request(number).lists()


def test_no_requests_and_empty_ones():
    pairing = one_region(layers=2)
    equal(pairing.planner([], device=DEVICE).run(), pairing.plan_batch([]))
    empty = Request(FORMS["int64"]([]), FORMS["int64"]([]))
    equal(pairing.plan_batch([empty] * 3), pairing.plan_batch([Request([], [])] * 3))


BAD = [
    ([3, -1, 7], [0, 1, 11], [8, 2, 3]),
    ([3, 4, 16], [0, 1, 11], [8, 2, 3]),
    ([3, 4, 7], [0, 12, 11], [8, 2, 3]),
    ([3, 4, 7], [0, 1, 11], [8, -5, 3]),
    ([3, 4, 7], [0, 1, 0], [8, 2, 3]),
    ([3, 4, 7], [0, 1, 11], [2, 2, 2]),
    ([99, 4, 7], [99, 99, 11], [2, 2, 99]),
]


@pytest.mark.parametrize(("src", "host", "device"), BAD)
def test_bad_page_ids_raise_the_same_error_when_the_plan_is_read(src, host, device):
    with pytest.raises(PlanError) as want:
        TWO_SPACES.plan(src, {"host": host, "device": device})
    for form in sorted(set(FORMS) - {"on the CPU"}):
        make = FORMS[form]
        if DRY:
            continue
        plan = TWO_SPACES.plan(make(src), {"host": make(host), "device": make(device)})  # says nothing yet
        assert int(plan.count) == 0
        for read in (plan.wait, plan.lists, lambda plan=plan: len(plan), lambda plan=plan: plan.segments):
            with pytest.raises(PlanError) as got:
                read()
            assert str(got.value) == str(want.value)


def test_a_bad_batch_names_its_request():
    pairing, make = one_region(), FORMS["int64"]
    for lists in ([([1], [5]), ([2, 3], [6, 5])], [([1], [5]), ([2], [100])], [([1], [5]), ([2, -7], [8, 9])]):
        with pytest.raises(PlanError) as want:
            pairing.plan_batch(Request(src, dst) for src, dst in lists)
        assert str(want.value).startswith("request 1: ")
        with pytest.raises(PlanError) as got:
            len(pairing.plan_batch(Request(make(src), make(dst)) for src, dst in lists))
        assert str(got.value) == str(want.value)


def test_lengths_and_positions_are_refused_at_once():
    make = FORMS["int64"]
    for src, dst, positions in (
        ([1, 2], [5], {}),
        ([1, 2], [5, 6], {"num_tokens": 1}),
        ([1], [5], {"src_start": 3, "dst_start": 1}),
        ([1], [5], {"src_start": -1}),
    ):
        with pytest.raises(PlanError) as want:
            one_region().plan(src, dst, **positions)
        with pytest.raises(PlanError) as got:
            one_region().plan(make(src), make(dst), **positions)
        assert str(got.value) == str(want.value)


@needs_gpu
def test_arrays_of_another_kind_are_refused():
    for wrong in (torch.ones(3, device=DEVICE), torch.ones(1, 3, dtype=torch.int64, device=DEVICE),
                  torch.ones(3, dtype=torch.int16, device=DEVICE)):  # fmt: skip
        with pytest.raises(PlanError, match="int32 or int64"):
            one_region().plan(wrong, [1, 2, 3])


# ----------------------------------------------------------------------------------------------------------- planner


@pytest.mark.parametrize("in_host_memory", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_each_run_of_a_planner_reads_its_lists_again(dtype, in_host_memory):
    """A table in pinned memory is written by the kernels themselves."""
    pages, pairing = 500, one_region(pages=2000, layers=5)
    src, dst = (torch.arange(pages, dtype=dtype, device=DEVICE) for _ in range(2))
    planner = pairing.planner([Request(src, dst)], pinned=in_host_memory, device=DEVICE)
    assert in_host_memory == (planner.table.device.type == "cpu") or DRY
    draw = random.Random(7)
    for run in range(8):
        ids = [draw.sample(range(2000), pages) if run % 2 else list(range(run, run + pages)) for _ in range(2)]
        for tensor, new in zip((src, dst), ids, strict=True):
            tensor.copy_(torch.tensor(new, dtype=dtype))
        equal(planner.run(), pairing.plan(*ids))
    dst[3] = dst[2]
    if DRY:
        return
    plan = planner.run()
    with pytest.raises(PlanError, match="given twice, at positions 2 and 3"):
        plan.wait()
    dst.copy_(there(torch.arange(pages, dtype=dtype)))
    equal(planner.run(), pairing.plan(ids[0], list(range(pages))))
    finish()


def test_a_planner_of_several_requests():
    pairing, make = one_region(layers=3), FORMS["int64"]
    lists = [([1, 2, 3], [5, 6, 7]), ([9], [50])]
    planner = (
        pairing.planner([Request(make(src), make(dst)) for src, dst in lists])
        if not DRY
        else pairing.planner([Request(src, dst) for src, dst in lists], device=DEVICE)
    )
    equal(planner.run(), pairing.plan_batch(Request(src, dst) for src, dst in lists))


@needs_gpu
def test_a_device_may_be_given_as_text():
    pairing = one_region()
    equal(pairing.planner([Request([1, 2], [3, 4])], device="cuda").run(), pairing.plan([1, 2], [3, 4]))
    with pytest.raises(PlanError, match="say on which device"):
        pairing.planner([Request([1, 2], [3, 4])])
