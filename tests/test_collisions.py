"""`ops.first_collision`, against the definition: the first range that shares a byte with one of the others."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from kvplan import ops
from kvplan.ops import plain

TOP = 1 << 64


def columns(ranges: list[tuple[int, int]]) -> torch.Tensor:
    words = np.array(ranges, dtype=np.uint64).reshape(-1, 2).T
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int64))


def first(ranges: list[tuple[int, int]], others: list[tuple[int, int]]) -> int:
    for number, (base, nbytes) in enumerate(ranges):
        if nbytes and any(base <= at + size - 1 and at <= base + nbytes - 1 for at, size in others):
            return number
    return -1


@pytest.mark.parametrize("seed", range(60))
def test_the_first_that_shares_a_byte(seed):
    rng = np.random.default_rng(seed)
    extent = 10 ** int(rng.integers(3, 7))
    shift = 0 if seed % 2 else TOP - extent - 60
    count = int(rng.integers(0, 60))
    at = sorted(rng.choice(extent, count, replace=False).tolist())
    others = (
        [(a, int(rng.integers(1, b - a + 1))) for a, b in zip(at, [*at[1:], extent + 50], strict=True)] if at else []
    )
    many = int(rng.integers(0, 40)) if seed % 3 else int(rng.integers(4096, 4500))
    ranges = [(int(rng.integers(0, extent)), int(rng.integers(0, 6))) for _ in range(many)]
    ranges, others = ([(base + shift, nbytes) for base, nbytes in rows] for rows in (ranges, others))
    due = first(ranges, others)
    assert ops.first_collision(columns(ranges), columns(others)).tolist() == [due]
    assert plain.first_collision(columns(ranges), columns(others)).tolist() == [due]


@pytest.mark.parametrize("seed", range(20))
def test_pages_of_several_regions_beside_many_others(seed):
    """As in plans: stretches of pages of one size, each in an extent of its own; of one page, a neighbour or itself."""
    rng = np.random.default_rng(seed)
    page, pool, regions = int(rng.choice([64, 585, 4096])), 20_000, int(rng.integers(1, 4))
    mine, theirs = np.split(rng.permutation(pool), [int(rng.integers(3000, 6000))])
    theirs = theirs[: int(rng.choice([1, 5, 300, 2000, 9000]))]
    starts = [1 + int(start) << 30 for start in rng.permutation(7)[:regions]]
    ranges = np.concatenate([start + mine * page for start in starts])
    others = np.sort(np.concatenate([start + theirs * page for start in starts]))
    columns_of = [np.stack([base, np.full(len(base), page)]) for base in (ranges, others)]
    mine, others = (torch.from_numpy(np.ascontiguousarray(rows)) for rows in columns_of)
    assert ops.first_collision(mine, others).tolist() == [-1]
    at = int(rng.integers(len(ranges)))
    for base, nbytes in ((int(others[0, -1]), 1), (int(others[0, 0]) + page - 1, 5), (int(others[0, 0]) - 1, 2)):
        met = mine.clone()
        met[:, at] = torch.tensor([base, nbytes])
        assert ops.first_collision(met, others).tolist() == [at]
        assert plain.first_collision(met, others).tolist() == [at]


@pytest.mark.parametrize("many", [1, 5000])
@pytest.mark.parametrize(
    "one, meets",
    [
        ((100, 10), True),
        ((99, 1), False),
        ((99, 2), True),
        ((109, 1), True),
        ((110, 1), False),
        ((0, TOP - 1), True),
        ((100, 0), False),
        ((105, 0), False),
        ((TOP - 1, 1), True),
        ((TOP - 2, 1), False),
        ((1 << 63, 5), False),
    ],
)
def test_edges(one, meets, many):
    """One range among many that meet nothing; the others reach to the end of all addresses."""
    others = [(100, 10), *((1000 + 10 * k, 5) for k in range(20)), (TOP - 1, 1)]
    ranges = [(5000, 7)] * (many - 1) + [one] + [(5000, 7)]
    due = many - 1 if meets else -1
    assert ops.first_collision(columns(ranges), columns(others)).tolist() == [due]
    assert plain.first_collision(columns(ranges), columns(others)).tolist() == [due]


def test_rows_may_lie_apart_and_other_forms_are_refused():
    table = torch.tensor([[10, 20, 30], [0, 0, 0], [5, 5, 5]])
    assert ops.first_collision(table[0::2], columns([(24, 1)])).tolist() == [1]
    assert ops.first_collision(table[0::2, 1:2], columns([(24, 1)])).tolist() == [0]
    for wrong in (table, table[0], table[:2].int(), table.T[:2], table[:2, ::2]):
        with pytest.raises(RuntimeError, match=r"must be int64 \[2, N\]"):
            ops.first_collision(wrong, columns([(24, 1)]))


def test_a_table_that_another_thread_writes_or_that_passes_64_bits_does_no_harm():
    others = columns([(1000 + 10 * k, 5) for k in range(500)])
    for base, nbytes in ((-1, 2), (-1, -1), (0, -1), (1 << 62, -1)):
        wraps = columns([(5000 + 7 * k, 3) for k in range(5000)])
        wraps[:, 17] = torch.tensor([base, nbytes])
        ops.first_collision(wraps, others)
    table, ends = columns([(5000 + 7 * k, 3) for k in range(20_000)]), threading.Event()

    def write():
        while not ends.is_set():
            table[0, ::3].random_()
            table[1, ::5].random_()

    writer = threading.Thread(target=write)
    writer.start()
    for _ in range(200):
        ops.first_collision(table, others)
    ends.set()
    writer.join()


@pytest.mark.parametrize("count", [0, 3])
def test_the_op_is_what_a_compiler_expects(count):
    ranges = columns([(10 * k, 5) for k in range(count)])
    torch.library.opcheck(torch.ops.kvplan.first_collision.default, (ranges, columns([(24, 1)])))


@pytest.mark.parametrize("many", [1, 5000])
@pytest.mark.parametrize(
    "wrong", [[(20, 1), (10, 1)], [(10, 11), (20, 1)], [(10, 0)], [(TOP - 1, 2)], [(10, 1), (10, 1)]]
)
def test_others_that_are_not_sorted_are_refused(wrong, many):
    others = columns([*((k, 1) for k in range(9)), *wrong])
    for call in (ops.first_collision, plain.first_collision):
        with pytest.raises(RuntimeError, match="others must ascend, be apart and not be empty"):
            call(columns([(5000, 1)] * many), others)
