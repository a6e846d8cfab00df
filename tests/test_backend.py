"""Who runs the ops, and what runs where the extension is missing."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from stage_inputs import random_cuts, random_pairs
from strategies import clusters, profile

import kvplan
from kvplan import PlanError, ops
from kvplan.ops import backend, plain
from kvplan.ops.backend import Facts, choose
from kvplan.planning.pages import page_ids


def facts(**changes):
    known = {"extension": True, "gpu": "cuda", "fatbin": True, "cupy": True, "triton": True, "forced": None}
    return Facts(**{**known, **changes})


@pytest.mark.parametrize(
    ("changes", "cpu", "gpu", "why"),
    [
        ({}, "cpu", "cuda", "first choice"),
        ({"fatbin": False}, "cpu", "cupy", "no nvcc was there"),
        ({"fatbin": False, "cupy": False}, "cpu", "triton", "CuPy is not installed"),
        ({"fatbin": False, "cupy": False, "triton": False}, "cpu", None, "Triton is not installed"),
        ({"gpu": "hip"}, "cpu", "triton", "not NVIDIA's"),
        ({"gpu": "xpu", "triton": False}, "cpu", None, "not NVIDIA's"),
        ({"gpu": None}, "cpu", None, "sees no GPU"),
        ({"extension": False}, "reference", None, "compiled extension is missing"),
        ({"forced": "cupy"}, "cpu", "cupy", "KVPLAN_BACKEND"),
        ({"forced": "triton"}, "cpu", "triton", "KVPLAN_BACKEND"),
        ({"forced": "reference"}, "reference", "cuda", "first choice"),
        ({"forced": "cpu"}, "cpu", "cuda", "first choice"),
    ],
)
def test_choice(changes, cpu, gpu, why):
    for_cpu, for_gpu = choose(facts(**changes))
    assert (for_cpu.name, for_gpu.name) == (cpu, gpu)
    assert why in for_gpu.why


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"forced": "fpga"}, "must be one of cuda, cupy, triton, cpu, reference"),
        ({"forced": "cuda", "fatbin": False}, "'cuda', but no nvcc"),
        ({"forced": "cupy", "cupy": False}, "'cupy', but CuPy is not installed"),
        ({"forced": "cuda", "gpu": "hip"}, "'cuda', but this GPU is not NVIDIA's"),
        ({"forced": "cpu", "extension": False}, "'cpu', but the compiled extension"),
        ({"forced": "triton", "gpu": None}, "'triton', but torch .* sees no GPU"),
    ],
)
def test_what_cannot_be_forced_is_refused(changes, text):
    with pytest.raises(ValueError, match=text):
        choose(facts(**changes))


def test_an_argument_names_the_back_end_or_fails():
    layout = kvplan.Layout([kvplan.Region("kv", 0, 1 << 20, 64, 9)], page_size=4)
    pairing = kvplan.pair(layout, layout)
    want = pairing.plan([1, 2, 7], [3, 4, 5]).lists()
    for name in ("cpu", "reference"):
        assert pairing.plan([1, 2, 7], [3, 4, 5], backend=name).lists() == want
        assert pairing.plan_batch([kvplan.Request([1, 2, 7], [3, 4, 5])], backend=name).lists() == want
    for name, text in (("triton", "served by 'cpu' .* set KVPLAN_BACKEND=triton"), ("fpga", "must be one of")):
        with pytest.raises(ValueError, match=text):
            pairing.plan([1], [2], backend=name)
        with pytest.raises(ValueError, match=text):
            pairing.planner([kvplan.Request([1], [2])], device="cpu", backend=name)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (([True, 1], [1, 2]), PlanError),
        (([1], [2], 1 << 70), PlanError),
        (([1], {"nowhere": [1]}), PlanError),
        (([1.5], [2]), PlanError),
    ],
)
def test_the_oracle_refuses_what_the_others_do(arguments, error):
    layout = kvplan.Layout([kvplan.Region("kv", 0, 1 << 20, 64, 9)], page_size=4)
    for name in ("cpu", "reference"):
        with pytest.raises(error):
            kvplan.pair(layout, layout).plan_batch([kvplan.Request(*arguments)], backend=name)
        with pytest.raises(TypeError, match=r"not a kvplan\.Request"):
            kvplan.pair(layout, layout).plan_batch([arguments], backend=name)


def test_the_choice_in_use_is_told():
    cpu, gpu = backend.chosen()
    assert (cpu.name, gpu.device) == ("cpu", "gpu" if not torch.cuda.is_available() else gpu.device)


# ------------------------------------------------------------------------------------------------ without the extension


@given(clusters(), st.booleans())
@profile(60)
def test_plans_without_the_extension_are_the_same(cluster, twice):
    for src, dst in cluster.pairs():
        pairing = kvplan.pair(src, dst, allow_unsent=cluster.allow_unsent)
        request = kvplan.Request(cluster.src_pages, cluster.dst_pages, **cluster.positions)
        empty = kvplan.Request({key: [] for key in cluster.src_pages}, {space: [] for space in cluster.dst_pages})
        requests = [empty, request] if twice else [request]
        want, got = pairing.plan_batch(requests), pairing.plan_batch(requests, backend="reference")
        assert torch.equal(got.table, want.table)
        assert (got.segments, got.offsets, got.requests) == (want.segments, want.offsets, want.requests)


@pytest.mark.parametrize("seed", range(5))
def test_stages_without_the_extension_are_the_same(seed):
    pairs = random_pairs(200, seed)
    for cuts in (None, random_cuts(200, 9, seed)):
        for got, want in zip(plain.find_runs(*pairs, cuts), ops.find_runs(*pairs, cuts), strict=True):
            assert torch.equal(got, want)
    slots = torch.randint(0, 40, (5, 13), generator=torch.Generator().manual_seed(seed))
    slots[:3] = torch.arange(3)[:, None] * 16 + torch.arange(13)
    for rows, lengths in ((None, None), (torch.tensor([2, 0, 7, 4, 1]), torch.tensor([13, 4, 1, 0, 14]))):
        got, want = plain.page_indices(slots, 4, rows, lengths), ops.page_indices(slots, 4, rows, lengths)
        good = want[1] == -1
        assert torch.equal(got[1], want[1]) and torch.equal(got[0][good], want[0][good])
    assert torch.equal(plain.page_indices(slots[0], 4)[0], ops.page_indices(slots[0], 4)[0])


def test_copies_without_the_extension():
    memory = np.arange(64, dtype=np.uint8)
    table = torch.tensor([[memory.ctypes.data + 3], [memory.ctypes.data + 40], [5]])
    plain.copy_(table, torch.tensor([1]), [], [], [])
    assert memory[40:45].tolist() == [3, 4, 5, 6, 7] and memory[45] == 45


SCRIPT = """
import warnings
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    import kvplan, kvplan.ops
    layout = kvplan.Layout([kvplan.Region("kv", 0, 1 << 20, 64, 9)], page_size=4)
    pairing = kvplan.pair(layout, layout)
    for _ in range(2):
        plan = pairing.plan([1, 2, 7], [3, 4, 5])
assert len(told) == 1 and "slow oracle" in str(told[0].message), told
assert plan.lists()[2] == [128, 64], plan.lists()
try:
    pairing.plan([9], [3])
except kvplan.PlanError as error:
    print("refused:", error)
"""


def test_the_oracle_plans_where_it_must_and_says_so_once():
    env = {**os.environ, backend.VARIABLE: "reference"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "refused:" in done.stdout and "9" in done.stdout


def test_page_ids_of_another_device_are_refused_where_only_the_host_will_do():
    meta = torch.empty(3, dtype=torch.int64, device="meta")
    with pytest.raises(PlanError, match=r"slots is on meta; .* pass slots.cpu\(\)"):
        page_ids(meta, 4)
