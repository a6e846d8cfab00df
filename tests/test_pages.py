"""Token slots -> page ids."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplan import PlanError, ops
from kvplan.planning.pages import page_ids


@given(
    pages=st.lists(st.integers(0, 1 << 40), max_size=20),
    size=st.sampled_from([1, 2, 3, 64]),
    short=st.integers(0, 63),
    wide=st.booleans(),
)
def test_slots_of_pages_give_the_pages(pages, size, short, wide):
    if not wide:
        pages = [page % 1000 for page in pages]
    slots = [page * size + k for page in pages for k in range(size)]
    slots = slots[: len(slots) - short % size] if slots else slots
    found = page_ids(np.array(slots, np.int64 if wide else np.int32), size)
    assert found.tolist() == pages


@given(size=st.sampled_from([1, 2, 16]), count=st.integers(1, 6), data=st.data())
def test_the_first_broken_slot_is_named(size, count, data):
    slots = np.concatenate([np.arange(size) + size * page for page in range(count)])
    place = data.draw(st.integers(0, len(slots) - 1))
    wrong = slots.copy()
    wrong[place] += data.draw(st.sampled_from([-1 - int(slots[place]), 1, size * 50 + 1]))
    expected = place
    if place % size == 0 and wrong[place] >= 0 and wrong[place] % size == 0:
        if size == 1:
            return  # any slot is a page of its own
        expected = place + 1
    with pytest.raises(PlanError, match=rf"at position {expected} "):
        page_ids(wrong, size)
    _, bad = ops.page_indices(torch.from_numpy(wrong), size)
    assert int(bad) == expected


def test_refusals():
    with pytest.raises(ValueError, match="page_size is 0"):
        ops.page_indices(torch.arange(4), 0)
    with pytest.raises(PlanError, match="float64"):
        page_ids([0.5], 1)


def test_a_negative_limit_is_refused():
    with pytest.raises(RuntimeError, match="must not be negative"):
        ops.check_pages(torch.tensor([5], dtype=torch.int32), -1, True)
