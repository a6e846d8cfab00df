"""What runs where the compiled extension is missing: plans of the slow oracle, and the stages in plain Python."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import reference
from .layout import Layout
from .pages import as_pages
from .plan import Plan, Request, Segment, gathered

if TYPE_CHECKING:
    from .pairing import Pairing


def plan(pairing: Pairing, requests: Sequence[Request]) -> Plan:
    """`Pairing.plan_batch` by the oracle: hundreds of thousands of times slower, to the bit the same.

    Raises:
        PlanError: a request cannot be planned whole. Two requests that write one page are not found out.
    """
    gathered(pairing, requests)  # the form of all arguments
    found: list[list[tuple[int, int, int]]] = []
    segments, offsets = [], []
    at = 0
    for number, (src, dst) in enumerate(pairing.segment_memories):
        cuts = [at]
        for request in requests:
            found.append(_descriptors(pairing, number, request))
            at += len(found[-1])
            cuts.append(at)
        if cuts[-1] > cuts[0]:
            segments.append(Segment(src, dst, cuts[0], cuts[-1]))
            offsets.append(cuts)
    rows = np.array([row for part in found for row in part], np.uint64).reshape(-1, 3)
    table = torch.from_numpy(np.ascontiguousarray(rows.T).view(np.int64))
    return Plan(table, segments, pairing.src, pairing.dst, offsets, len(requests))


def _descriptors(pairing: Pairing, segment: int, request: Request) -> list[tuple[int, int, int]]:
    start, stop = pairing.bounds[segment : segment + 2].tolist()
    entries = [[source for source, _ in regions] for regions in pairing.regions[start:stop]]
    sent = Layout([region for regions in entries for region in regions], page_size=pairing.src.page_size)
    return reference.descriptors(
        sent,
        pairing.dst,
        _lists(request.src_pages, "src_pages"),
        _lists(request.dst_pages, "dst_pages"),
        src_start=request.src_start,
        dst_start=request.dst_start,
        num_tokens=request.num_tokens,
        entries=[[region.key for region in regions] for regions in entries if len(regions) > 1],
    )


def _lists(pages: Any, what: str) -> Any:
    if isinstance(pages, Mapping):
        return {space: as_pages(ids, f"{what}[{space!r}]") for space, ids in pages.items()}
    return as_pages(pages, what)


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
