"""Plans by the slow oracle: for `backend="reference"`, and where the compiled extension is missing."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from ..errors import PlanError
from ..layout import Layout
from ..pairing import PairingTables
from . import reference
from .pages import NO_PAGES
from .plan import Plan, Request, Segment
from .requests import PageLists, request_at


def plan(lists: PageLists) -> Plan:
    """The plan of all requests in `lists`: the same as the other back ends', hundreds of thousands of times slower.

    Raises:
        PlanError: a request cannot be planned whole.
    """
    pairing = lists.pairing
    if lists.device is not None:
        raise PlanError(f"a page list is on {lists.device}; the oracle plans on the CPU: pass page_ids.cpu()")
    ids = np.concatenate((NO_PAGES, *lists.lists))
    requests = [request_at(pairing, ids, lists.windows, number, lists.nulls) for number in range(lists.requests)]
    if len(requests) > 1 or len(pairing.space_names) > 1:
        reference.check_batch(pairing.src, pairing.dst, [vars(request) for request in requests])
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


def _descriptors(pairing: PairingTables, segment: int, request: Request) -> list[tuple[int, int, int]]:
    start, stop = pairing.bounds[segment : segment + 2].tolist()
    entries = [[source for source, _ in regions] for regions in pairing.regions[start:stop]]
    # All of them are sent: whose turn it is among replicas is settled.
    found = {region.key: dataclasses.replace(region, replica=None) for regions in entries for region in regions}
    sent = Layout(found.values(), page_size=pairing.src.page_size)
    together = [[region.key for region in regions] for regions in entries]
    return reference.descriptors(sent, pairing.dst, **vars(request), entries=together)
