"""Plans gathered page lists: the one place that selects the back end for a plan."""

from __future__ import annotations

import time

import numpy as np
import torch

from .. import ops
from ..errors import PlanError
from ..ops import backend
from ..pairing import PairingTables, Room
from . import hooks, oracle
from .device import Planner
from .nulls import ShortLists
from .pages import NO_PAGES
from .plan import Plan
from .refusal import refusal
from .requests import PageLists

_SMALL = 4096  # page ids of a small request: 32 KB


def make(lists: PageLists, wanted: str | None) -> Plan:
    """The plan of all requests in `lists`.

    Args:
        lists: what `Pairing.plan` or `Pairing.plan_batch` was given.
        wanted: the back end that must plan, or None for the one in use.

    Raises:
        PlanError: a request cannot be planned whole.
        ValueError: `wanted` is not the back end in use. The oracle, "reference", can always be had.
    """
    if hooks.planned is None:
        return _made(lists, wanted)
    began = time.perf_counter()
    plan = _made(lists, wanted)
    hooks.planned(time.perf_counter() - began)
    return plan


def _made(lists: PageLists, wanted: str | None) -> Plan:
    if (wanted or backend.chosen()[0].name) == "reference":
        return oracle.plan(lists)
    if wanted is not None:
        backend.check_in_use(wanted, "cpu" if lists.device is None else lists.device.type)
    if lists.device is not None:
        return planner(lists, lists.device, pinned=False).run()
    if lists.nulls is not None:
        lists = ShortLists(lists)
    pairing = lists.pairing
    if lists.requests == 1 and lists.size <= _SMALL:
        return _small(lists, pairing)
    pages = np.concatenate((NO_PAGES, *lists.lists))
    table, info = ops.plan(pairing.tables, torch.from_numpy(pages), lists.windows)
    return _result(lists, table, info.tolist(), pages)


def _small(lists: PageLists, pairing: PairingTables) -> Plan:
    """One small request: memory that is kept from plan to plan, for to make it takes longer than to plan."""
    power = lists.size.bit_length()
    rooms = pairing.rooms[power]
    try:
        room = rooms.pop()  # one thread's, until it is put back
    except IndexError:
        room = Room(1 << power, 6 + len(pairing.segment_memories))
    pages = room.pages[: lists.size]
    if lists.lists:
        np.concatenate(lists.lists, out=pages)
    table = ops.plan_into(pairing.tables, room.pages_tensor, lists.windows, room.info_tensor)
    plan = _result(lists, table, room.info.tolist(), pages)
    rooms.append(room)
    return plan


def _result(lists: PageLists, table: torch.Tensor, facts: list[int], pages: np.ndarray) -> Plan:
    pairing = lists.pairing
    if facts[0]:
        raise refusal(pairing, *lists.as_given(facts, pages))
    plan = Plan.of_info(table, pairing.segment_memories, facts, pairing.src, pairing.dst, lists.requests)
    plan.work = pairing, lists.windows, lists.size
    return plan


def planner(lists: PageLists, device: torch.device, pinned: bool) -> Planner:
    """A planner of all requests in `lists` on a GPU. Lists that are on the CPU are copied there, without waiting."""
    if lists.nulls is not None:
        raise PlanError(
            f"null_page is given, and the plan is to be made on {device}: null pages are looked for on the CPU, and to "
            f"look for them on a device would wait for it. Plan lists on the CPU, or leave the null pages out of them"
        )
    on_device = [ids if isinstance(ids, torch.Tensor) else backend.send(_tensor(ids), device) for ids in lists.lists]
    return Planner(lists.pairing, on_device, lists.windows, lists.requests, device, pinned)


def _tensor(ids: np.ndarray) -> torch.Tensor:
    """A view where torch has one: it takes no negative stride, and warns of memory that it must not write."""
    viewable = ids.flags.writeable and ids.flags.c_contiguous
    return torch.from_numpy(ids if viewable else ids.copy())
