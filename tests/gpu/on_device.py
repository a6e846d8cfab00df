"""What the tests on a GPU share: where they run, and what moves their inputs there.

With KVPLAN_GPU_DRY=cpu the tests run on CPU tensors, to find mistakes in the tests themselves. Tests that need a GPU
are then skipped.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import stage_inputs
import torch
from jobs import Job

from kvplan import ops

GPU = torch.cuda.is_available()
DRY = os.environ.get("KVPLAN_GPU_DRY") == "cpu"
DEVICE = torch.device("cpu") if DRY else torch.device("cuda", 0)

needs_device = pytest.mark.skipif(not (GPU or DRY), reason=f"torch {torch.__version__} sees no GPU")
needs_gpu = pytest.mark.skipif(not GPU or DRY, reason="needs a GPU; does not run on CPU tensors")

BIG_SIZES = [70_000, 400_000]  # more tiles than blocks that run at once


def there(value: Any) -> Any:
    """A tensor on the device; anything else, such as None, as it is."""
    return value.to(DEVICE) if isinstance(value, torch.Tensor) else value


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in pinned host memory."""
    return tensor if DRY else tensor.pin_memory()


def finish() -> None:
    """Wait for the device; raises what a kernel before failed with."""
    if not DRY:
        torch.cuda.synchronize()


def planned(job: Job, room: int | None = None, *, pinned_table: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(table, info) of `ops.plan_` on the device; words that it does not write stay rubbish."""
    table, info = job.outputs(room)
    table = pinned(table) if pinned_table else there(table)
    info = there(info)
    ops.plan_(there(job.tables), there(job.job), there(job.pages), job.sizes, table, info)
    finish()
    return table, info


PLACES = (
    [("device", "device")] if DRY else [("device", "device"), ("device", "host"), ("host", "device"), ("host", "host")]
)


class Copies(stage_inputs.Copies):
    """Copies between two buffers, each in device memory ("device") or in pinned host memory ("host")."""

    def __init__(self, sizes: list[int], seed: int, where: tuple[str, str], apart: int | None = None) -> None:
        super().__init__(sizes, seed, apart, [there if place == "device" else pinned for place in where])

    def table(self, spare: int = 0) -> torch.Tensor:
        return there(super().table(spare))

    def check(self, moved: int | None = None) -> None:
        finish()
        super().check(moved)
