"""From gathered page lists to a plan: the one place that chooses who plans."""

from __future__ import annotations

import numpy as np
import torch

from .. import ops
from ..ops import backend
from . import oracle
from .device import Planner
from .pages import NO_PAGES
from .plan import Plan
from .refusal import refusal, segments_of
from .requests import PageLists


def make(lists: PageLists, wanted: str | None) -> Plan:
    """The plan of all requests in `lists`.

    Args:
        lists: what `Pairing.plan` or `Pairing.plan_batch` was given.
        wanted: the back end that must plan, or None for the one in use.

    Raises:
        PlanError: a request cannot be planned whole.
        ValueError: `wanted` is not the back end in use. The oracle, "reference", can always be had.
    """
    if (wanted or backend.chosen()[0].name) == "reference":
        return oracle.plan(lists)
    if wanted is not None:
        backend.check_in_use(wanted, "cpu" if lists.device is None else lists.device.type)
    if lists.device is not None:
        return planner(lists, lists.device, pinned=False).run()
    pairing = lists.pairing
    pages = np.concatenate(lists.lists) if lists.lists else NO_PAGES
    table, info = ops.plan(pairing.tables, torch.from_numpy(pages), lists.windows)
    facts = info.tolist()
    if facts[0]:
        raise refusal(pairing, facts, pages, lists.windows)
    segments, offsets = segments_of(pairing, facts, lists.requests if lists.windows else 0)
    return Plan(table, segments, pairing.src, pairing.dst, offsets, lists.requests)


def planner(lists: PageLists, device: torch.device, pinned: bool) -> Planner:
    """A planner of all requests in `lists` on a GPU. Lists that are on the CPU are copied there, without waiting."""
    on_device = [
        ids if isinstance(ids, torch.Tensor) else backend.send(torch.from_numpy(np.ascontiguousarray(ids)), device)
        for ids in lists.lists
    ]
    return Planner(lists.pairing, on_device, lists.windows, lists.requests, device, pinned)
