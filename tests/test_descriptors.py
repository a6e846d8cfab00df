"""Runs x entries -> descriptors."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplan import ops

M = 1 << 64


def signed(values):
    return [[v - M if v >= 1 << 63 else v for v in row] for row in values]


@st.composite
def tables(draw):
    groups = draw(st.integers(1, 3))
    steps = [(draw(st.sampled_from([1, 1, 3])), draw(st.sampled_from([1, 1, 5]))) for _ in range(groups)]
    runs, indptr = [], [0]
    for _ in range(groups):
        for _ in range(draw(st.integers(0, 5))):
            runs.append((draw(st.integers(0, 1 << 34)), draw(st.integers(0, 999)), draw(st.integers(1, 9))))
        indptr.append(len(runs))
    entries = []
    for _ in range(draw(st.integers(0, 4))):
        group = draw(st.integers(0, groups - 1))
        nbytes = 15 * draw(st.integers(1, 300))
        whole = draw(st.booleans())
        strides = [nbytes // step if whole else draw(st.integers(1, 1 << 20)) for step in steps[group]]
        bases = [draw(st.sampled_from([0, 1 << 40, (1 << 63) - 8, M - (1 << 62)])) for _ in range(2)]
        entries.append((bases[0], strides[0], bases[1], strides[1], nbytes, group))
    return entries, runs, indptr, steps


def expected(entries, runs, indptr, steps):
    """By the definition: a run is one descriptor iff its pairs lie gap-free on both sides."""
    for src, src_stride, dst, dst_stride, nbytes, group in entries:
        a, b = steps[group]
        for s, d, n in runs[indptr[group] : indptr[group + 1]]:
            if src_stride * a == nbytes and dst_stride * b == nbytes:
                yield src + s * src_stride, dst + d * dst_stride, n * nbytes
            else:
                for k in range(n):
                    yield src + (s + k * a) * src_stride, dst + (d + k * b) * dst_stride, nbytes


def call(entries, runs, indptr, steps, capacity):
    return ops.expand(
        torch.tensor(signed(entries), dtype=torch.int64).reshape(-1, 6),
        torch.tensor(runs, dtype=torch.int64).reshape(-1, 3).T.contiguous(),
        torch.tensor(indptr),
        torch.tensor(steps),
        capacity,
    )


@given(tables(), st.integers(0, 3))
def test_expansion_is_the_definition(tables, spare):
    want = list(expected(*tables))
    table, count = call(*tables, len(want) + spare)
    assert int(count) == len(want)
    assert list(zip(*table.view(torch.uint64)[:, : len(want)].tolist(), strict=True)) == want
    assert not table[:, len(want) :].any()


def test_too_little_room_cuts_nothing_off():
    table, count = call([(0, 8, 0, 8, 8, 0)], [(0, 0, 1), (5, 5, 1)], [0, 2], [(1, 1)], 1)
    assert int(count) == 2 and not table.any()


@pytest.mark.parametrize(
    ("entries", "runs", "text"),
    [
        ([(M - 8, 8, 0, 8, 8, 0)], [(1, 0, 1)], "passes 64 bits"),
        ([(0, 8, 0, 1 << 62, 8, 0)], [(0, 2, 1)], "passes 64 bits"),
        ([(0, 8, 0, 8, 8, 1)], [(0, 0, 1)], "names no group"),
        ([(0, 8, 0, 8, 0, 0)], [(0, 0, 1)], "no size"),
        ([(0, 8, 0, 8, 8, 0)], [(0, 0, 0)], "is empty"),
        ([(0, 8, 0, 8, 8, 0)], [(-1, 0, 1)], "negative"),
        ([(0, 8, 0, 8, 8, 0)], [((1 << 63) - 2, 0, 5)], "too long"),
    ],
)
def test_refusals(entries, runs, text):
    with pytest.raises(RuntimeError, match=text):
        call(entries, runs, [0, len(runs)], [(1, 1)], 100)


def test_the_last_byte_of_the_address_space_may_move():
    table, _ = call([(M - 16, 8, 0, 8, 8, 0)], [(0, 0, 2)], [0, 1], [(1, 1)], 1)
    assert table.view(torch.uint64).flatten().tolist() == [M - 16, 0, 16]
