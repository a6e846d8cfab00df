"""Plans by the slow oracle: for `backend="reference"`, and where the compiled extension is missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..errors import PlanError
from ..layout import Layout
from ..pairing import PairingTables
from . import reference
from .plan import Plan, Segment
from .requests import PageLists

_FREE = (0, -1, -1)  # window of a list that is free of token positions


def plan(lists: PageLists) -> Plan:
    """The plan of all requests in `lists`: hundreds of thousands of times slower than the other back ends, same words.

    Raises:
        PlanError: a request cannot be planned whole. Two requests that write one page are not found out.
    """
    pairing = lists.pairing
    if lists.device is not None:
        raise PlanError(f"a page list is on {lists.device}; the oracle plans on the CPU: pass page_ids.cpu()")
    requests = [_arguments(lists, number) for number in range(lists.requests)]
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
    return Plan(table, segments, pairing.src, pairing.dst, offsets, lists.requests)


def _arguments(lists: PageLists, number: int) -> dict[str, Any]:
    """The arguments of request `number` in the oracle's own form."""
    starts = np.cumsum([0, *map(len, lists.lists)]).tolist()
    by_offset = dict(zip(starts, lists.lists, strict=False))  # of empty lists at one offset, any
    src_pages: dict[str | None, Any] = {}
    dst_pages: dict[str, Any] = {}
    shared = _FREE
    names = lists.pairing.space_names
    for k, space in enumerate(names, start=number * len(names)):
        src_offset, src_count, dst_offset, dst_count, start, dst_start, tokens = lists.windows[7 * k : 7 * k + 7]
        window = (start, dst_start, tokens)
        if window == _FREE:
            src_pages[space] = by_offset[src_offset] if src_count else ()
        else:
            src_pages[None] = by_offset[src_offset] if src_count else ()
            shared = window
        dst_pages[space] = by_offset[dst_offset] if dst_count else ()
    src_start, dst_start, num_tokens = shared
    return {
        "src_pages": src_pages,
        "dst_pages": dst_pages,
        "src_start": src_start,
        "dst_start": dst_start if dst_start >= 0 else None,
        "num_tokens": num_tokens if num_tokens >= 0 else None,
    }


def _descriptors(pairing: PairingTables, segment: int, request: dict[str, Any]) -> list[tuple[int, int, int]]:
    start, stop = pairing.bounds[segment : segment + 2].tolist()
    entries = [[source for source, _ in regions] for regions in pairing.regions[start:stop]]
    sent = Layout([region for regions in entries for region in regions], page_size=pairing.src.page_size)
    together = [[region.key for region in regions] for regions in entries if len(regions) > 1]
    return reference.descriptors(sent, pairing.dst, **request, entries=together)
