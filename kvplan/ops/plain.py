"""The stages in plain Python: what runs them on the CPU where the compiled extension is missing."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

import numpy as np
import torch


def page_indices(
    slots: torch.Tensor, page_size: int, rows: torch.Tensor | None = None, lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.page_indices`."""
    table = slots.reshape(1, -1) if slots.dim() == 1 else slots
    picked = range(len(table)) if rows is None else rows.tolist()
    sizes = [table.shape[1]] * len(picked) if lengths is None else lengths.tolist()
    pages = torch.full((len(picked), -(-table.shape[1] // page_size)), -1, dtype=torch.int64)
    bad = torch.full((len(picked),), -1, dtype=torch.int64)
    for number, (row, size) in enumerate(zip(picked, sizes, strict=True)):
        if not (0 <= row < len(table) and 0 <= size <= table.shape[1]):
            bad[number] = -2
            continue
        for at, slot in enumerate(table[row, :size].tolist()):
            page, offset = divmod(at, page_size)
            if offset == 0:
                first = slot
                pages[number, page] = slot // page_size if slot >= 0 else -1
            good = slot == first + offset and first >= 0 and first % page_size == 0
            if not good and bad[number] == -1:
                bad[number] = at
    return pages.reshape(-1) if slots.dim() == 1 else pages, bad


def find_runs(
    src: torch.Tensor, dst: torch.Tensor, indptr: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`ops.find_runs`."""
    cuts = [0, len(src)] if indptr is None else indptr.tolist()
    if cuts[0] != 0 or cuts[-1] != len(src) or cuts != sorted(cuts):
        raise RuntimeError("indptr must rise from 0 to the length of src")
    pairs = list(zip(src.tolist(), dst.tolist(), strict=True))
    runs: list[list[int]] = []
    run_indptr = [0]
    for start, stop in itertools.pairwise(cuts):
        for at in range(start, stop):
            before = pairs[at - 1]
            if at > start and pairs[at] == (before[0] + 1, before[1] + 1):
                runs[-1][2] += 1
            else:
                runs.append([*pairs[at], 1])
        run_indptr.append(len(runs))
    out = torch.zeros((3, len(src)), dtype=torch.int64)
    out[:, : len(runs)] = torch.tensor(runs, dtype=torch.int64).reshape(-1, 3).T
    return out, torch.tensor(run_indptr)


def first_collision(ranges: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """`ops.first_collision`."""
    (start, nbytes), (base, size) = ranges.numpy().view(np.uint64), others.numpy().view(np.uint64)
    if not len(base):
        return torch.tensor([-1])
    one = np.uint64(1)
    if not (size.all() and (size - one <= ~base).all() and (base[1:] > base[:-1] + (size[:-1] - one)).all()):
        raise RuntimeError("others must ascend, be apart and not be empty")
    last = start + (nbytes - one)
    at = base.searchsorted(last, side="right") - 1  # the last that begins by then; -1: none does
    met = (nbytes > 0) & (at >= 0) & (base[at] + (size[at] - one) >= start)
    return torch.tensor([int(met.argmax()) if met.any() else -1])


def copy_(
    table: torch.Tensor,
    count: torch.Tensor | None,
    read: Sequence[torch.Tensor],
    written: Sequence[torch.Tensor],
    homes: Sequence[int],
) -> None:
    """`ops.copy_`, for tensors that have not been moved."""
    if any(tensor.data_ptr() != home % (1 << 64) for tensor, home in zip([*read, *written], homes, strict=True)):
        missing()
    number = table.shape[1] if count is None else int(count)
    if not 0 <= number <= table.shape[1]:
        raise RuntimeError(f"count must be one number, from 0 to the table's {table.shape[1]}")
    for src, dst, nbytes in table.numpy().view(np.uint64)[:, :number].T.tolist():
        ctypes.memmove(dst, src, nbytes)


def missing(*args: object) -> None:
    """Any other op."""
    raise ImportError("this op needs kvplan's compiled extension; `python -m kvplan doctor` says how to build it")
