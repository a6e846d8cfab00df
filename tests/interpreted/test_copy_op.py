"""copy_: every byte that is due, and no other."""

from __future__ import annotations

import random

import pytest
import torch
from moved import moved_copy

from kvplan import triton_kernels

GUARD = 40  # bytes between two places


class Places:
    """Descriptors of given sizes from one buffer to another, at odd addresses, with bytes between them that must not
    change."""

    def __init__(self, sizes: list[int], seed: int, apart: int | None = None) -> None:
        draw = random.Random(seed)
        total = sum(sizes) + (2 * GUARD) * (len(sizes) + 1)
        self.src = torch.frombuffer(bytearray(draw.randbytes(total)), dtype=torch.uint8)
        self.dst = torch.frombuffer(bytearray(draw.randbytes(total)), dtype=torch.uint8)
        self.rows, at = [], GUARD
        for nbytes in sizes:
            src = draw.randrange(16)
            dst = (
                draw.randrange(16) if apart is None else (src + apart + self.src.data_ptr() - self.dst.data_ptr()) % 16
            )
            self.rows.append((self.src.data_ptr() + at + src, self.dst.data_ptr() + at + dst, nbytes))
            at += nbytes + GUARD
        draw.shuffle(self.rows)

    def check(self, room: int | None = None, count: int | None = None, moved: int | None = None) -> None:
        """Runs the first `count` rows of a table with that much room; the first `moved` must have been carried out."""
        expected = self.dst.clone()
        for src, dst, nbytes in self.rows[:moved]:
            first, start = dst - self.dst.data_ptr(), src - self.src.data_ptr()
            expected[first : first + nbytes] = self.src[start : start + nbytes]
        spare = (room or len(self.rows)) - len(self.rows)
        table = torch.tensor([*self.rows, *[(1, 1, 1 << 62)] * spare], dtype=torch.int64).reshape(-1, 3).T.contiguous()
        triton_kernels.copy_(table, None if count is None else torch.tensor([count]), [], [], [])
        assert torch.equal(self.dst, expected)


@pytest.mark.parametrize("seed", range(6))
def test_odd_sizes_and_alignments(seed):
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 3, 15, 16, 17, 100, 4096, 16383, 16384, 16385, 40001]) for _ in range(9)]
    Places(sizes, seed).check()


@pytest.mark.parametrize("apart", [0, 8, 4, 2, 1, 12, 6, 15])
def test_every_width(apart):
    Places([1, 7, 16, 33, 16385, 5000], apart, apart).check()


def test_one_large_among_small_ones():
    Places([*range(20), 300_000, *range(20)], 1).check()


def test_more_descriptors_than_a_tile():
    Places([k % 8 if k % 11 == 0 else 0 for k in range(1100)], 2).check()


def test_count():
    rows = [5, 17, 0, 30]
    for count, moved in ((4, 4), (2, 2), (0, 0), (-1, 0), (8, 0)):
        Places(rows, 3).check(room=7, count=count, moved=moved)
    Places([], 0).check()
    Places([0, 0], 0).check()


def test_tensors_that_have_been_moved():
    table, read, written, homes, after = moved_copy()
    triton_kernels.copy_(table, None, read, written, homes)
    for tensor, wanted in zip([*read, *written], after, strict=True):
        assert torch.equal(tensor, wanted)
