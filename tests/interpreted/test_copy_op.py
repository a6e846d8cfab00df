"""copy_: copies every byte of the ranges, and touches no other."""

from __future__ import annotations

import random

import pytest
import torch
from moved import moved_copy
from stage_inputs import Copies, same

from kvplan import triton_kernels


def carry_out(copies: Copies, *, count: int | None = None, moved: int | None = None, spare: int = 0) -> None:
    """Copies the first `count` ranges of a table with spare rows. Fails unless the first `moved` were copied."""
    triton_kernels.copy_(copies.table(spare), None if count is None else torch.tensor([count]), [], [], [])
    copies.check(moved)


@pytest.mark.parametrize("seed", range(6))
def test_odd_sizes_and_alignments(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 3, 15, 16, 17, 100, 4096, 16383, 16384, 16385, 40001]) for _ in range(9)]
    carry_out(Copies(sizes, seed))


@pytest.mark.parametrize("apart", [0, 8, 4, 2, 1, 12, 6, 15])
def test_every_width(apart):
    carry_out(Copies([1, 7, 16, 33, 16385, 5000], apart, apart))


def test_one_large_among_small_ones():
    carry_out(Copies([*range(20), 300_000, *range(20)], 1))


def test_more_descriptors_than_a_tile():
    carry_out(Copies([k % 8 if k % 11 == 0 else 0 for k in range(1100)], 2))


@pytest.mark.parametrize(("count", "moved"), [(4, 4), (2, 2), (0, 0), (-1, 0), (8, 0)])
def test_only_what_is_counted_is_copied(count, moved):
    carry_out(Copies([5, 17, 0, 30], 3), count=count, moved=moved, spare=3)


@pytest.mark.parametrize("sizes", [[], [0, 0]])
def test_nothing_to_copy(sizes):
    carry_out(Copies(sizes, 0))


def test_tensors_that_have_been_moved():
    table, read, written, homes, after = moved_copy()
    triton_kernels.copy_(table, None, read, written, homes)
    same([*read, *written], after)
