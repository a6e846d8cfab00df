"""Index pairs -> runs."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvplan import ops

steps = st.lists(st.tuples(st.sampled_from([1, 1, 1, 0, 2, -1, 50]), st.sampled_from([1, 1, 1, 0, 3])), max_size=60)


@given(start=st.tuples(st.integers(0, 1 << 60), st.integers(0, 9)), steps=steps)
def test_runs_are_maximal_and_lose_nothing(start, steps):
    pairs = [start]
    for a, b in steps:
        pairs.append((pairs[-1][0] + a, pairs[-1][1] + b))
    runs, cuts = ops.find_runs(*torch.tensor(pairs).T.contiguous())
    found = runs[:, : int(cuts[-1])].T.tolist()
    assert [(s + k, d + k) for s, d, n in found for k in range(n)] == pairs
    for (s, d, n), (next_s, next_d, _) in itertools.pairwise(found):
        assert (s + n, d + n) != (next_s, next_d)
    assert not runs[:, int(cuts[-1]) :].any()


def test_no_pairs_give_no_runs():
    empty = torch.empty(0, dtype=torch.int64)
    runs, cuts = ops.find_runs(empty, empty)
    assert runs.shape == (3, 0) and int(cuts[-1]) == 0


def test_refusals():
    with pytest.raises(ValueError, match="of one length"):
        ops.find_runs(torch.arange(3), torch.arange(4))
    with pytest.raises(RuntimeError, match="int64"):
        ops.find_runs(torch.arange(3, dtype=torch.int32), torch.arange(3, dtype=torch.int32))
