"""page_indices, find_runs and expand: the results of the C++ ops, to the bit."""

from __future__ import annotations

import pytest
import stage_inputs
import torch
from hypothesis import given
from hypothesis import strategies as st
from stage_inputs import random_cuts, random_pairs, same, words

from kvplan import ops, triton_kernels

TILE_ENDS = [0, 1, 1023, 1024, 1025, 2500]
TOP = 1 << 64  # the end of the address space


def same_as_cpu(op, *args):
    """The results of an op of this back end, which must be those of the C++ op."""
    found = getattr(triton_kernels, op)(*args)
    same(found, getattr(ops, op)(*args))
    return found


# ------------------------------------------------------------------------------------------------------ page_indices


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", TILE_ENDS)
def test_slots_of_one_request(n, dtype):
    slots = torch.arange(n, dtype=dtype) + 64 * 3
    for page_size in (1, 3, 64, 5000):
        same_as_cpu("page_indices", slots, page_size)
    for broken in stage_inputs.broken_slots(slots):
        assert same_as_cpu("page_indices", broken, 64)[1] >= 0


@pytest.mark.parametrize(("slots", "size", "wrong"), stage_inputs.FAR_SLOTS)
def test_slots_at_the_ends_of_64_bits_do_not_follow(slots, size, wrong):
    assert same_as_cpu("page_indices", torch.tensor(slots), size)[1] == wrong


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
    same_as_cpu("page_indices", slots, page_size, numbers, lengths)
    same_as_cpu("page_indices", slots, page_size, numbers)
    same_as_cpu("page_indices", slots, page_size)


def test_large_slots():
    slots = torch.arange(3000) + (1 << 40) * 64
    assert same_as_cpu("page_indices", slots, 64)[1] == -1
    assert same_as_cpu("page_indices", torch.tensor([(1 << 63) - 2, (1 << 63) - 1]), (1 << 63) - 2)[1] == -1


# --------------------------------------------------------------------------------------------------------- find_runs


@pytest.mark.parametrize("n", TILE_ENDS)
def test_runs(n):
    src, dst = random_pairs(n, n)
    same_as_cpu("find_runs", src, dst)
    for lists in (1, 3, 1100):
        same_as_cpu("find_runs", src, dst, random_cuts(n, lists, n + lists))


def test_runs_at_the_ends():
    big = (1 << 63) - 1
    values = torch.tensor([big - 1, big, -big - 1, -big, 0, 1])
    same_as_cpu("find_runs", values, torch.arange(6))
    same_as_cpu("find_runs", torch.arange(1030), torch.arange(1030))
    same_as_cpu("find_runs", torch.arange(1030), torch.arange(1030), torch.tensor([0, 0, 1024, 1024, 1030, 1030]))
    same_as_cpu("find_runs", torch.arange(0), torch.arange(0), torch.tensor([0]))


@pytest.mark.parametrize("indptr", stage_inputs.MALFORMED_INDPTRS)
def test_a_malformed_indptr_is_refused(indptr):
    runs, run_indptr = triton_kernels.find_runs(torch.arange(9), torch.arange(9), torch.tensor(indptr))
    assert run_indptr[-1] == -1 and not runs.any()


# ------------------------------------------------------------------------------------------------------------ expand


def check_expand(entries, runs, indptr, steps, capacity):
    """The count of an expansion, which must be as the C++ op makes it; -1 where that raises an error."""
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
    return int(same_as_cpu("expand", *args)[1])


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


@pytest.mark.parametrize("many", [1, 1025])
@pytest.mark.parametrize("change", stage_inputs.MALFORMED_EXPANSIONS)
def test_malformed_expansions_are_refused(change, many):
    args = stage_inputs.malformed_expansion(change, many)
    with pytest.raises(RuntimeError):
        ops.expand(*args, 100)
    table, count = triton_kernels.expand(*args, 100)
    assert count == -1 and not table.any()


def test_runs_without_a_group_are_refused():
    assert check_expand([], [(0, 0, 1)], [5], [], 10) == -1


def test_the_last_byte_of_the_address_space():
    assert check_expand([(TOP - 16, 8, 0, 8, 8, 0)], [(0, 0, 2)], [0, 1], [(1, 1)], 1) == 1
    assert check_expand([(TOP - 16, 8, 0, 8, 8, 0)], [(0, 0, 3)], [0, 1], [(1, 1)], 1) == -1
