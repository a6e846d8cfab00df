"""page_indices, find_runs and expand: as the C++ ops give them, to the bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import random_cuts, random_pairs

from kvplan import ops, triton_kernels

TILE_ENDS = [0, 1, 1023, 1024, 1025, 2500]
TOP = 1 << 64


def same(op, *args):
    found, expected = getattr(triton_kernels, op)(*args), getattr(ops, op)(*args)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert torch.equal(a, b)
    return found


# ------------------------------------------------------------------------------------------------------ page_indices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", TILE_ENDS)
def test_slots_of_one_request(n, dtype):
    slots = torch.arange(n, dtype=dtype) + 64 * 3
    for page_size in (1, 3, 64, 5000):
        same("page_indices", slots, page_size)
    for wrong, value in ((n - 1, -1), (n // 2, 7), (0, 6)):
        if n > 1:
            broken = slots.clone()
            broken[wrong] = value
            assert same("page_indices", broken, 64)[1] >= 0


@given(st.data(), st.sampled_from([torch.int32, torch.int64]), st.sampled_from([1, 2, 7, 16]))
def test_slots_of_a_table(data, dtype, page_size):
    rows, length = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 40))
    slots = torch.arange(5 * 50, dtype=dtype).reshape(5, 50)[:rows, :length]
    for _ in range(data.draw(st.integers(0, 2)) if length else 0):
        slots[data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, length - 1))] -= 60
    count = data.draw(st.integers(0, 4))
    numbers, lengths = (
        torch.tensor(data.draw(st.lists(st.integers(-1, most), min_size=count, max_size=count)), dtype=torch.int64)
        for most in (rows, length + 1)
    )
    same("page_indices", slots, page_size, numbers, lengths)
    same("page_indices", slots, page_size, numbers)
    same("page_indices", slots, page_size)


def test_large_slots():
    slots = torch.arange(3000) + (1 << 40) * 64
    assert same("page_indices", slots, 64)[1] == -1
    assert same("page_indices", torch.tensor([(1 << 63) - 2, (1 << 63) - 1]), (1 << 63) - 2)[1] == -1


# --------------------------------------------------------------------------------------------------------- find_runs


@pytest.mark.parametrize("n", TILE_ENDS)
def test_runs(n):
    src, dst = random_pairs(n, n)
    same("find_runs", src, dst)
    for lists in (1, 3, 1100):
        same("find_runs", src, dst, random_cuts(n, lists, n + lists))


def test_runs_at_the_ends():
    big = (1 << 63) - 1
    values = torch.tensor([big - 1, big, -big - 1, -big, 0, 1])
    same("find_runs", values, torch.arange(6))
    same("find_runs", torch.arange(1030), torch.arange(1030))
    same("find_runs", torch.arange(1030), torch.arange(1030), torch.tensor([0, 0, 1024, 1024, 1030, 1030]))
    same("find_runs", torch.arange(0), torch.arange(0), torch.tensor([0]))


@pytest.mark.parametrize("cuts", [[0, 5], [1, 6], [0, 4, 3, 6], [0, 9, 6], [0, -1, 6]])
def test_cuts_that_do_not_rise(cuts):
    runs, run_indptr = triton_kernels.find_runs(torch.arange(6), torch.arange(6), torch.tensor(cuts))
    assert run_indptr[-1] == -1 and not runs.any()


# ------------------------------------------------------------------------------------------------------------ expand


def words(rows, columns):
    return torch.tensor([[v - TOP if v >= TOP // 2 else v for v in row] for row in rows], dtype=torch.int64).reshape(
        -1, columns
    )


def check_expand(entries, runs, indptr, steps, capacity):
    """As the C++ op, or -1 where that refuses."""
    args = (
        words(entries, 6),
        words(runs, 3).T.contiguous(),
        torch.tensor(indptr),
        torch.tensor(steps, dtype=torch.int64).reshape(-1, 2),
        capacity,
    )
    try:
        ops.expand(*args)
    except RuntimeError:
        table, count = triton_kernels.expand(*args)
        assert count == -1 and not table.any()
        return -1
    return int(same("expand", *args)[1])


@st.composite
def expansions(draw):
    groups = draw(st.integers(1, 3))
    steps = [(draw(st.sampled_from([1, 1, 3])), draw(st.sampled_from([1, 1, 5]))) for _ in range(groups)]
    runs, indptr = [], [0]
    for _ in range(groups):
        for _ in range(draw(st.integers(0, 4))):
            runs.append((draw(st.integers(0, 1 << 34)), draw(st.integers(0, 999)), draw(st.integers(1, 9))))
        indptr.append(len(runs))
    entries = []
    for _ in range(draw(st.integers(0, 4))):
        group, nbytes = draw(st.integers(0, groups - 1)), 15 * draw(st.integers(1, 300))
        whole = draw(st.booleans())
        strides = [nbytes // step if whole else draw(st.integers(1, 1 << 20)) for step in steps[group]]
        bases = [draw(st.sampled_from([0, 1 << 40, (1 << 63) - 8, TOP - (1 << 62)])) for _ in range(2)]
        entries.append((bases[0], strides[0], bases[1], strides[1], nbytes, group))
    return entries, runs, indptr, steps


@given(expansions(), st.sampled_from([0, 1, 2, 40, 400]))
def test_expansion(given_, capacity):
    check_expand(*given_, capacity)


def test_expansion_of_more_than_a_tile():
    runs = [(3 * k, 5 * k, 1 + k % 3) for k in range(1030)]
    entries = [(0, 8, TOP - (1 << 40), 8, 8, 0), (1 << 30, 16, 0, 8, 8, 1), (7, 8, 0, 8, 8, 0)]
    assert check_expand(entries, runs, [0, 1000, 1030], [(1, 1), (1, 1)], 2100) == 2060
    assert check_expand(entries[:1] * 1030, runs[:2], [0, 2], [(1, 1)], 2060) == 2060
    assert check_expand([], [], [0], [], 1025) == 0


@pytest.mark.parametrize(
    ("entries", "runs"),
    [
        ([(TOP - 8, 8, 0, 8, 8, 0)], [(1, 0, 1)]),
        ([(0, 8, 0, 1 << 62, 8, 0)], [(0, 2, 1)]),
        ([(0, 8, 0, 8, 8, 1)], [(0, 0, 1)]),
        ([(0, 8, 0, 8, 8, -1)], [(0, 0, 1)]),
        ([(0, 8, 0, 8, 0, 0)], [(0, 0, 1)]),
        ([(0, 0, 0, 8, 8, 0)], [(0, 0, 1)]),
        ([(0, 8, 0, 8, 8, 0)], [(0, 0, 0)]),
        ([(0, 8, 0, 8, 8, 0)], [(-1, 0, 1)]),
        ([(0, 8, 0, 8, 8, 0)], [((1 << 63) - 2, 0, 5)]),
    ],
)
def test_malformed_expansions(entries, runs):
    good = [(0, 8, 0, 8, 8, 0)]
    for many in (entries, good + entries, good * 1024 + entries):
        assert check_expand(many, runs, [0, 1], [(1, 1)], 100) == -1


@pytest.mark.parametrize(("indptr", "steps"), [([0, 2], [(1, 1)]), ([1, 1], [(1, 1)]), ([0, 1], [(0, 1)]), ([5], [])])
def test_malformed_groups(indptr, steps):
    assert check_expand([(0, 8, 0, 8, 8, 0)] if steps else [], [(0, 0, 1)], indptr, steps, 10) == -1


def test_the_last_byte_of_the_address_space():
    assert check_expand([(TOP - 16, 8, 0, 8, 8, 0)], [(0, 0, 2)], [0, 1], [(1, 1)], 1) == 1
    assert check_expand([(TOP - 16, 8, 0, 8, 8, 0)], [(0, 0, 3)], [0, 1], [(1, 1)], 1) == -1
