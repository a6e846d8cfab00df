"""Token slots -> page ids, and page ids from whatever holds them."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from kvplan import Layout, PlanError, Region, Request, ops, pair
from kvplan.planning import dlpack
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


# ------------------------------------------------------------------------------------------------- what holds page ids


class Foreign:
    """An array of another library, as CuPy's or JAX's: it offers DLPack, and is neither NumPy's nor torch's."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **arguments):
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Broken(Foreign):
    def __dlpack__(self, **arguments):
        raise KeyError("no buffer")


class BrokenArray:
    def __array__(self, dtype=None, copy=None):
        raise ZeroDivisionError


class BrokenIndex:
    def __index__(self):
        raise KeyError("no number")


class Subclass(torch.Tensor):
    pass


def fake_ids():
    with FakeTensorMode():
        return torch.arange(3)


IDS = [9, 7, 5]
GOOD = {
    "a reversed DLPack array": Foreign(np.array(IDS[::-1])[::-1]),
    "a DLPack array with gaps": Foreign(np.array([9, 0, 7, 0, 5, 0], np.int32)[::2]),
    "a reversed array": np.array(IDS[::-1])[::-1],
    "a tensor with gaps": torch.tensor([9, 0, 7, 0, 5])[::2],
    "a column": torch.tensor([[0, 9], [0, 7], [0, 5]])[:, 1],
    "a negative-bit view": torch._neg_view(-torch.tensor(IDS)),
    "a subclass": torch.tensor(IDS).as_subclass(Subclass),
    "a parameter": torch.nn.Parameter(torch.tensor(IDS), requires_grad=False),
    "unsigned": torch.tensor(IDS, dtype=torch.uint64),
    "big-endian": np.array(IDS, ">i4"),
    "read-only": np.frombuffer(np.array(IDS).tobytes(), np.int64),
    "a memory view": memoryview(np.array(IDS)),
    "a tuple": tuple(IDS),
    "NumPy numbers": [np.int8(9), np.uint16(7), 5],
    "a range": range(9, 4, -2),
}
BAD = {
    "masked": (np.ma.MaskedArray(IDS, mask=[0, 1, 0]), "masked array"),
    "masked, nothing masked out": (np.ma.MaskedArray(IDS), "masked array"),
    "sparse": (torch.tensor(IDS).to_sparse(), "dense tensor"),
    "fake": (fake_ids(), "a fake tensor"),
    "meta": (torch.arange(3, device="meta"), "a meta tensor"),
    "requires grad": (torch.tensor([9.0, 7, 5], requires_grad=True), "torch.float32"),
    "complex": (torch.tensor(IDS).to(torch.complex64).conj(), "torch.complex64"),
    "bools": (torch.tensor([True]), "torch.bool"),
    "a scalar": (torch.tensor(9), "integers [P]"),
    "two dimensions": (np.array([IDS]), "[1, 3]"),
    "objects": (np.array(IDS, object), "object"),
    "a record array": (np.zeros(3, "i4,i4"), "integers [P]"),
    "dates": (np.array(["2026"] * 3, "M8[D]"), "datetime64"),
    "a DLPack array that fails": (Broken(np.array(IDS)), "KeyError"),
    "an array that fails": (BrokenArray(), "ZeroDivisionError"),
    "a NumPy bool": ([9, np.True_, 5], "at position 1"),
    "a number that fails": ([9, BrokenIndex(), 5], "integers [P], not object"),
    "a set": ({9, 7, 5}, "integers [P]"),
    "text": ("975", "integers [P]"),
    "None": (None, "integers [P]"),
    "past 64 bits": ([9, 7, 1 << 70], f"page id {1 << 70} at position 2"),
    "past 63 bits": (np.array([9, (1 << 63) + 5], np.uint64), f"page id {(1 << 63) + 5} at position 1"),
}


@pytest.fixture(scope="module")
def pairing():
    return pair(*(Layout([Region("kv", 0, base, 64, 10)], page_size=4) for base in (1 << 20, 1 << 30)))


@pytest.mark.parametrize("kind", GOOD)
def test_whatever_holds_page_ids_is_planned_as_its_ids(pairing, kind):
    want = pairing.plan(IDS, IDS).table
    assert torch.equal(pairing.plan(GOOD[kind], IDS).table, want)
    assert torch.equal(pairing.plan(IDS, {"device": GOOD[kind]}).table, want)
    planner = pairing.planner([Request(GOOD[kind], GOOD[kind])], device="cpu")
    assert torch.equal(planner.run().table, want)
    assert torch.equal(pairing.plan(GOOD[kind], IDS, backend="reference").table, want)


@pytest.mark.parametrize("kind", BAD)
def test_what_holds_no_page_ids_is_refused(pairing, kind):
    ids, reason = BAD[kind]
    for plan in (
        lambda: pairing.plan(ids, IDS),
        lambda: pairing.plan(IDS, {"device": ids}),
        lambda: pairing.plan_batch([Request(IDS, ids)]),
        lambda: pairing.planner([Request(ids, IDS)], device="cpu"),
        lambda: pairing.plan(ids, IDS, backend="reference"),
    ):
        with pytest.raises(PlanError) as error:
            plan()
        assert reason in str(error.value)


def test_a_negative_stride_does_not_reach_torch():
    # As for an array on a GPU: torch would end the process.
    with pytest.raises(BufferError, match=r"strides are \[-1\]"):
        torch.from_dlpack(dlpack._Guarded(np.arange(3)[::-1]))
    assert torch.from_dlpack(dlpack._Guarded(np.arange(6)[::2])).tolist() == [0, 2, 4]
