"""The check that stands before every engine: each descriptor lies inside memory that is registered, on both sides."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch

from ..errors import LayoutError, PlanError, clipped

if TYPE_CHECKING:
    from ..layout import Layout, Memory, Region
    from ..planning import Plan

Span: TypeAlias = "tuple[Memory, int, int]"  # memory, base, bytes

_MAX_SESSION = 1024  # characters
_ROW = 64  # neighbouring descriptors that are tried as one
_ROWS = 256  # rows whose descriptors are looked at one by one in one go: few enough to stay in the cache


class Spans:
    """The memory that may be touched on one side, sorted, so that many addresses are checked at once."""

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.layouts = tuple(layouts)
        self.all: set[Span] = {span for layout in self.layouts for span in layout.memory_spans()}
        by_memory: dict[Memory, list[tuple[int, int]]] = {}
        for memory, base, nbytes in self.all:
            by_memory.setdefault(memory, []).append((base, nbytes))
        # memory -> uint64 [2, S]: bases, ascending, and sizes in bytes. A peer may declare all 2**64 bytes there are,
        # one more than such a size can say: then the last one is left out.
        most = (1 << 64) - 1
        self._tables = {
            memory: np.array([(base, min(nbytes, most)) for base, nbytes in sorted(spans)], dtype=np.uint64).T.copy()
            for memory, spans in by_memory.items()
        }

    def first_outside(self, memory: Memory, addresses: np.ndarray, nbytes: np.ndarray) -> int:
        """Number of the first of N ranges (uint64 [N] each) that is empty or in no single span of `memory`; else -1.

        Neighbours in a plan mostly lie in one span, so the least and the greatest address settle most rows of _ROW;
        only the others are looked at one by one.
        """
        if memory not in self._tables:
            return 0 if len(addresses) else -1
        whole = len(addresses) // _ROW * _ROW
        rows, sizes = addresses[:whole].reshape(-1, _ROW), nbytes[:whole].reshape(-1, _ROW)
        least = rows.min(axis=1)
        bases, room = self._span_of(memory, least)
        unsettled = (least - bases >= room) | (sizes.min(axis=1) == 0)
        unsettled |= _beyond(rows.max(axis=1) - bases, sizes.max(axis=1), room)
        numbers = np.flatnonzero(unsettled)
        for start in range(0, len(numbers), _ROWS):
            part = numbers[start : start + _ROWS]
            bad = self._outside(memory, rows[part], sizes[part])
            if bad.any():
                row, column = divmod(int(bad.argmax()), _ROW)
                return int(part[row]) * _ROW + column
        bad = self._outside(memory, addresses[whole:], nbytes[whole:])
        return whole + int(bad.argmax()) if bad.any() else -1

    def _outside(self, memory: Memory, addresses: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        bases, room = self._span_of(memory, addresses)
        return _beyond(addresses - bases, nbytes, room)

    def bases(self, memory: Memory) -> np.ndarray:
        """Where the spans of one memory begin: uint64, ascending."""
        return self._tables[memory][0] if memory in self._tables else np.empty(0, np.uint64)

    def _span_of(self, memory: Memory, addresses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(base, size) of the last span that begins at or before each address.

        An address below the first span gets the last one: there the offset wraps to more than any size.
        """
        bases, sizes = self._tables[memory]
        number = bases.searchsorted(addresses, side="right") - 1
        return bases[number], sizes[number]


def nearest(layouts: Iterable[Layout], address: int, memory: Memory | None = None) -> Region | None:
    """The region that holds `address`, else the nearest; of that memory, where there is one."""
    regions = [region for layout in layouts for region in layout.regions]
    regions = [region for region in regions if region.memory == memory] or regions
    return min(regions, key=lambda r: max(r.base - address, address - (r.base + r.span_bytes - 1), 0), default=None)


def _beyond(offset: np.ndarray, nbytes: np.ndarray, room: np.ndarray) -> np.ndarray:
    """Where [offset, offset + nbytes) is empty or not within [0, room); nothing here can overflow unseen."""
    return (offset >= room) | (nbytes - np.uint64(1) >= room - offset)


def check_form(table: Any) -> None:
    """Refuse, by PlanError, a plan whose table is none: torch int64 [3, N] on the CPU."""
    if not isinstance(table, torch.Tensor) or table.dtype != torch.int64 or table.dim() != 2 or table.shape[0] != 3:
        found = f"{table.dtype} {list(table.shape)}" if isinstance(table, torch.Tensor) else type(table).__name__
        raise PlanError(f"a plan's table is torch int64 [3, N], not {found}")
    if table.device.type != "cpu":
        raise PlanError(f"a plan's table must be on the CPU for an engine, not on {table.device}")


def check(
    plan: Plan, source: Spans, destination: Spans, op: str = "write", declared: str = "declared by the peer"
) -> None:
    """Refuse a plan that has an empty descriptor, or one that is not within one span of the right memory on both sides.

    `op` says which side is the peer's: the destination of a "write", the source of a "read". `declared` is how messages
    say what is known of that side.

    Raises:
        PlanError: names the first such descriptor, its address and length, and the nearest region.
    """
    table = plan.table.numpy().view(np.uint64)
    covered = 0
    for segment in plan.segments:
        if segment.start != covered:
            raise PlanError(f"segments leave out descriptors {covered} to {segment.start - 1}")
        if segment.stop < segment.start:
            raise PlanError(f"a segment ends at descriptor {segment.stop}, before it begins at {segment.start}")
        covered = segment.stop
        nbytes = table[2, segment.start : segment.stop]
        for row, what, spans, memory in (
            (0, "source", source, segment.src_memory),
            (1, "destination", destination, segment.dst_memory),
        ):
            bad = spans.first_outside(memory, table[row, segment.start : segment.stop], nbytes)
            if bad >= 0:
                number = segment.start + bad
                address, size = int(table[row, number]), int(table[2, number])
                known = "registered with this engine" if (what == "source") is (op == "write") else declared
                raise _refusal(number, what, memory, address, size, spans, known)
    if covered != len(plan):
        raise PlanError(f"segments end at descriptor {covered} of {len(plan)}")


def _refusal(number: int, what: str, memory: Memory, address: int, nbytes: int, spans: Spans, known: str) -> PlanError:
    if nbytes == 0:
        return PlanError(f"descriptor {number}: length 0 ({what} {address:#x}); engines crash on it or ignore it")
    near = nearest(spans.layouts, address)
    if near is None:
        rest = f"nothing is {known}"
    else:
        end = near.base + near.span_bytes
        rest = f"the nearest is {clipped(str(near), 120)}, {near.memory} {near.base:#x} to {end:#x}"
    return PlanError(
        f"descriptor {number}: {what} {address:#x}, {nbytes} bytes of {memory}, does not lie within one region "
        f"{known}: {rest}"
    )


def check_text(session: str) -> None:
    """Refuse, by ValueError, what no engine can be given as a session: it comes from a peer, and goes into messages."""
    if not 0 < len(session) <= _MAX_SESSION:
        raise ValueError(f"a session of {len(session)} characters is none; it has 1 to {_MAX_SESSION}")
    if not (session.isascii() and session.isprintable()):
        raise ValueError(f"session {session[:80]!a} must be printable ASCII")


def check_registrable(spans: Spans) -> None:
    """Refuse what no engine can take: spans that share memory without being equal, and lengths of 2**63 and more.

    Raises:
        LayoutError: names the span.
    """
    ordered = sorted(spans.all, key=lambda s: (s[0].kind, s[0].device, s[1]))
    for memory, base, nbytes in ordered:
        if nbytes >> 63:
            raise LayoutError(f"{memory} {base:#x}: {nbytes} bytes are 2**63 or more; engines count in signed integers")
    for (memory, base, nbytes), (other, next_base, _) in itertools.pairwise(ordered):
        if memory == other and next_base < base + nbytes:
            raise LayoutError(
                f"{memory} {next_base:#x} overlaps a part of {base:#x} to {base + nbytes:#x}, registered before; "
                f"register one layout that holds both"
            )
