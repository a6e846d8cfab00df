"""What the tests on a GPU share: where they run, inputs moved there, and results compared with the C++ ops.

With KVPLAN_GPU_DRY=cpu the tests run on CPU tensors, to find mistakes in the tests themselves; those that make no sense
there are skipped. tests/simt has the same inputs for the same kernels.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch
from jobs import Job

import kvplan
from kvplan import ops

GPU = torch.cuda.is_available()
DRY = os.environ.get("KVPLAN_GPU_DRY") == "cpu"
DEVICE = torch.device("cpu") if DRY else torch.device("cuda", 0)

needs_device = pytest.mark.skipif(not (GPU or DRY), reason=f"torch {torch.__version__} sees no GPU")
needs_gpu = pytest.mark.skipif(not GPU or DRY, reason="needs a GPU: CPU tensors will not do")

SIZES = [0, 1, 2, 31, 33, 255, 256, 257, 1023, 1024, 1025, 2049, 5000]  # around warps, blocks and tiles
BIG_SIZES = [70_000, 400_000]  # more tiles than blocks that run at once


def there(value: Any) -> Any:
    """A tensor, or None, on the device."""
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if DRY else tensor.pin_memory()


def finish() -> None:
    """Wait for the device, which also brings up what went wrong there."""
    if not DRY:
        torch.cuda.synchronize()


def same(got: Any, want: Any) -> None:
    """Equal to the bit, tensor by tensor."""
    for number, (mine, right) in enumerate(zip(got, want, strict=True)):
        assert mine.dtype == right.dtype and mine.shape == right.shape, number
        mine, right = mine.cpu(), right.cpu()
        if not torch.equal(mine, right):
            places = (mine != right).nonzero()
            first = tuple(places[0].tolist())
            raise AssertionError(
                f"result {number}: {len(places)} differ, first at {first}: {mine[first]}, not {right[first]}"
            )


def planned(job: Job, room: int | None = None, *, pinned_table: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(table, info) of `ops.plan_` on the device; what it does not write stays rubbish."""
    table, info = job.outputs(room)
    table = pinned(table) if pinned_table else there(table)
    info = there(info)
    ops.plan_(there(job.tables), there(job.job), there(job.pages), job.sizes, table, info)
    finish()
    return table, info


def one_region(size: int = 8, pages: int = 100, layers: int = 1) -> kvplan.Pairing:
    """Regions at made-up addresses."""
    src, dst = (
        kvplan.Layout(
            [kvplan.Region("kv", k, base + k * size * pages, size, pages) for k in range(layers)], page_size=1
        )
        for base in (1 << 12, 1 << 40)
    )
    return kvplan.pair(src, dst)


def slot_table(length: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(slots [R, length] whose rows lie apart, rows, lengths) for `ops.page_indices`; sometimes one slot is wrong."""
    draw = random.Random(1000 * seed + length)
    columns, num_rows = -(-length // size), draw.randrange(1, 5)
    dtype = draw.choice([torch.int32, torch.int64])
    first = torch.tensor([[draw.randrange(1000) * size for _ in range(columns)] for _ in range(num_rows)], dtype=dtype)
    wide = first.repeat_interleave(size, dim=1) + torch.arange(columns * size, dtype=dtype) % size
    if length and draw.random() < 0.5:
        wide[draw.randrange(num_rows), draw.randrange(length)] += draw.choice([-1, 1, -100_000])
    rows = lengths = None
    if draw.random() < 0.7:
        count = draw.randrange(0, 6)
        rows = torch.tensor([draw.randrange(-1, num_rows + 1) for _ in range(count)], dtype=torch.int64)
        lengths = torch.tensor(
            [draw.choice([length, 0, length + 1, length // 2, -1]) for _ in range(count)], dtype=torch.int64
        )
    return there(wide)[:, :length], there(rows), there(lengths)


PLACES = (
    [("device", "device")] if DRY else [("device", "device"), ("device", "host"), ("host", "device"), ("host", "host")]
)


class Copies:
    """A table of ranges of given sizes, at odd places, between two buffers in device or pinned host memory ("host").

    Between the ranges lie bytes that must stay.
    """

    GUARD = 64

    def __init__(self, sizes: list[int], seed: int, where: tuple[str, str], apart: int | None = None) -> None:
        draw = random.Random(seed)
        total = sum(sizes) + (self.GUARD + 32) * (len(sizes) + 1)
        noise = torch.Generator().manual_seed(seed)
        self.before = [torch.randint(0, 256, (total,), dtype=torch.uint8, generator=noise) for _ in range(2)]
        self.src, self.dst = (
            there(bytes_) if place == "device" else pinned(bytes_)
            for bytes_, place in zip((b.clone() for b in self.before), where, strict=True)
        )
        self.moves, at = [], self.GUARD
        for size in sizes:
            src = draw.randrange(16)
            dst = draw.randrange(16) if apart is None else (src + apart) % 16
            self.moves.append((at + src, at + dst, size))
            at += size + self.GUARD
        draw.shuffle(self.moves)
        rows = [(self.src.data_ptr() + src, self.dst.data_ptr() + dst, size) for src, dst, size in self.moves]
        self.rows = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3)

    def table(self, spare: int = 0) -> torch.Tensor:
        """int64 [3, N + spare]; the spare rows must not be carried out."""
        rubbish = torch.tensor([[1, 1, 1 << 62]], dtype=torch.int64).expand(spare, 3)
        return there(torch.cat([self.rows, rubbish]).T.contiguous())

    def check(self, moved: int | None = None) -> None:
        """The first `moved` ranges were copied, and nothing else was touched."""
        finish()
        src, after = self.before[0], self.before[1].clone()
        for start, end, size in self.moves[:moved]:
            after[end : end + size] = src[start : start + size]
        same([self.src, self.dst], [src, after])
