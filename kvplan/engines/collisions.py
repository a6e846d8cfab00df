"""Which plans must wait: those that meet, byte by byte, a transfer that has ended and may still be moving.

Such a transfer may read and write what it had with the engine when it ended. A plan that writes there, or reads what it
may write, would mix its bytes with the plan's. Two that only read do not disturb each other. Only ended transfers
count: what runs at the same time is the caller's to order.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from .. import ops
from ..errors import clipped

if TYPE_CHECKING:
    from ..layout import Memory
    from ..planning import Plan
    from .transfer import Op, Transfer

# Where bytes lie, and whether they are written: the peer's key, or None for this process; its memory; written.
Place: TypeAlias = "tuple[str | None, Memory, bool]"


def ranges(plan: Plan, key: str, op: Op) -> Iterator[tuple[Place, int, torch.Tensor]]:
    """What a plan touches: place, first descriptor, int64 [2, n] of addresses and bytes."""
    src, dst = (None, key) if op == "write" else (key, None)
    for segment in plan.segments:
        if not len(segment):
            continue
        part = plan.table[:, segment.start : segment.stop]
        yield (src, segment.src_memory, False), segment.start, part[0::2]
        yield (dst, segment.dst_memory, True), segment.start, part[1:]


class Unsettled:
    """The transfers of one engine that have ended and may still be moving. Guarded by the engine's lock."""

    def __init__(self) -> None:
        self._touched: dict[Place, dict[Transfer, list[torch.Tensor]]] = {}
        self._by_key: dict[str, dict[Transfer, set[Place]]] = {}  # in the order in which they ended

    def __iter__(self) -> Iterator[Transfer]:
        return (transfer for one in list(self._by_key.values()) for transfer in list(one))

    def of(self, key: str) -> list[Transfer]:
        """Those to or from one peer."""
        return list(self._by_key.get(key, ()))

    def add(self, transfer: Transfer) -> None:
        """Take a transfer in, with what it last had with the engine, or with a thread."""
        plans = transfer._touches()
        if transfer in self._by_key.get(transfer._key, ()) or not plans:
            return
        places = self._by_key.setdefault(transfer._key, {})[transfer] = set()
        for plan in plans:
            for place, _, part in ranges(plan, transfer._key, transfer.op):
                places.add(place)
                self._touched.setdefault(place, {}).setdefault(transfer, []).append(_sorted(part))

    def discard(self, transfer: Transfer) -> None:
        """It is settled."""
        for place in self._by_key.get(transfer._key, {}).get(transfer, ()):
            _remove(self._touched, place, transfer)
        _remove(self._by_key, transfer._key, transfer)

    def collisions(self, plan: Plan, key: str, op: Op) -> dict[Transfer, str]:
        """Those that `plan`, for the peer of this key, would meet: each with the first range, in words."""
        found: dict[Transfer, str] = {}
        if not self._by_key:
            return found
        for place, first, part in ranges(plan, key, op):
            where, memory, written = place
            for also_written in (True, False) if written else (True,):
                for transfer, spans in self._touched.get((where, memory, also_written), {}).items():
                    for theirs in spans if transfer not in found else ():
                        mine = int(ops.first_collision(part, theirs))
                        if mine >= 0:
                            found[transfer] = _words(first + mine, part[:, mine], place, also_written)
                            break
        return found


def _remove(groups: dict[Any, dict[Transfer, Any]], group: Any, transfer: Transfer) -> None:
    groups.get(group, {}).pop(transfer, None)
    if not groups.get(group, True):
        del groups[group]


def _words(number: int, span: torch.Tensor, place: Place, also_written: bool) -> str:
    where, memory, written = place
    start, nbytes = (int(word) for word in span.numpy().view(np.uint64))
    whose = "here" if where is None else f"at {clipped(where)}"
    does, did = ("writes" if written else "reads"), ("write" if also_written else "read")
    last = start + nbytes - 1
    return f"descriptor {number} {does} {start:#x} to {last:#x}, {memory} {whose}, which it may still {did}"


def _sorted(part: torch.Tensor) -> torch.Tensor:
    """int64 [2, m], ranges by address, with those that touch or overlap joined."""
    base, nbytes = part.numpy().view(np.uint64)
    order = np.argsort(base, kind="stable")
    base, last = base[order], base[order] + (nbytes[order] - np.uint64(1))  # the last byte: an end may be 2**64
    reach = np.maximum.accumulate(last)
    new = np.ones(len(base), bool)
    new[1:] = base[1:] > reach[:-1]
    starts = np.flatnonzero(new)
    ends = np.append(starts[1:], len(base)) - 1
    joined = np.stack([base[starts], reach[ends] - base[starts] + np.uint64(1)])
    return torch.from_numpy(joined.view(np.int64))
