"""Pieces: parts of a plan that go by way of staging, one slot each, and how one is carried.

A transfer has at most two pieces with a thread: while the engine moves one, the next one's bytes are gathered; or, when
reading, those of the one before are scattered. Each waits for its turn, so that the engine has one of them at a time,
in plan order, and they end in plan order.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ..planning import Plan, Segment, execute
from .outcome import Op, Outcome

if TYPE_CHECKING:
    from .staging import Staging


class Piece:
    """A part of a plan that goes by way of one slot of staging.

    Args:
        staging: where the slot is.
        op: "write": gathered, then written into the peer. "read": read from the peer, then scattered.
        segment: whose memories source and destination are.
        copies: int64 [3, C]: local copies. On the side of staging, an address is an offset into the slot.
        moves: int64 [3, M]: what the engine moves, the same.
        plan: the descriptors of the caller's plan that it moves, whole or in part.
        nbytes: bytes it moves.
        reached: the caller's descriptors [0, reached) have been begun once it is with the engine,
        complete: and [0, complete) have arrived once it has.
        most: descriptors that a call of the engine may take; None: no limit.
    """

    def __init__(
        self,
        staging: Staging,
        op: Op,
        segment: Segment,
        copies: torch.Tensor,
        moves: torch.Tensor,
        plan: Plan,
        *,
        nbytes: int,
        reached: int,
        complete: int,
        most: int | None,
    ) -> None:
        self.staging, self.op, self.plan = staging, op, plan
        self.nbytes, self.reached, self.complete = nbytes, reached, complete
        self.before = 0  # descriptors that had been begun before it
        self.moved = False  # the engine has moved it
        self._segment, self._copies, self._moves = segment, copies, moves
        self._most = moves.shape[1] if most is None else min(most, moves.shape[1])
        self._slot: int | None = None  # number of the slot, once it has one

    def __len__(self) -> int:
        """Descriptors that it has with the engine at once."""
        return self._most

    def claim(self, transfer: Any) -> bool:
        """Take a slot; False where none is free. With the engine's lock held."""
        return self.staging._claim(self, transfer)

    def free(self, transfer: Any) -> None:
        """Nothing uses its slot any more. With the engine's lock held."""
        if self._slot is not None:
            self.staging._free(self._slot, transfer._engine)
            self._slot = None

    def copy(self) -> None:
        """Gather into its slot, or scatter out of it; done on return."""
        memory, part = self.staging.memory, self._segment
        gathers = self.op == "write"
        ends = (part.src_memory, memory) if gathers else (memory, part.dst_memory)
        table = self._placed(self._copies, 1 if gathers else 0)
        execute(Plan(table, [Segment(*ends, 0, table.shape[1])]))
        for end in ends:
            if end.kind != "DRAM":
                torch.cuda.current_stream(end.device).synchronize()

    def calls(self) -> list[Plan]:
        """What the engine is given, call by call."""
        memory, part = self.staging.memory, self._segment
        ends = (memory, part.dst_memory) if self.op == "write" else (part.src_memory, memory)
        table = self._placed(self._moves, 0 if self.op == "write" else 1)
        layouts = (self.staging.layout, self.plan.dst_layout)
        if self.op == "read":
            layouts = (self.plan.src_layout, self.staging.layout)  # type: ignore[assignment]
        return list(Plan(table, [Segment(*ends, 0, table.shape[1])], *layouts).chunks(self._most))

    def _placed(self, table: torch.Tensor, row: int) -> torch.Tensor:
        assert self._slot is not None
        table = table.clone()
        table[row] += self.staging._address(self._slot)
        return table


Chunk: TypeAlias = "Plan | Piece"  # what a thread carries in one go


@dataclasses.dataclass(frozen=True)
class Call:
    """What came of a chunk. `begun`: when the engine was given it. `outcome` is None where it was not, or not whole."""

    outcome: Outcome | None = None
    cause: BaseException | None = None
    begun: float | None = None


def carry(transfer: Any, piece: Piece, move: Callable[[str, Plan, Op], Outcome]) -> Call:
    """Carry a piece that has a slot: gather, move, scatter. Returns behind those before it; with an error, at once."""
    reads = piece.op == "read"
    try:
        if not reads:
            piece.copy()
        calls = piece.calls()
    except Exception as error:
        return Call(cause=error.with_traceback(None))
    with transfer._changed:
        transfer._changed.wait_for(lambda: not transfer._wanted or _has_turn(transfer, piece))
        if not transfer._wanted:
            return Call()
        piece.before = transfer._sent
        transfer._begin(piece)
    begun = time.monotonic()
    for number, call in enumerate(calls):
        if number and not transfer._wanted:  # nothing is under way; some of it has arrived
            return Call(begun=None)
        try:
            outcome = move(transfer.peer, call, piece.op)
        except Exception as error:
            return Call(Outcome(None), error.with_traceback(None), begun)
        if outcome.code != 0:
            if number and not outcome.started:
                piece.before = piece.reached  # the calls before it have arrived
            return Call(outcome, None, begun)
    with transfer._changed:
        piece.moved = True
        transfer._changed.notify_all()
    if reads:
        try:
            piece.copy()
        except Exception as error:
            return Call(cause=error.with_traceback(None), begun=begun)
    with transfer._changed:
        transfer._changed.wait_for(lambda: transfer._jobs[0] is piece)
    return Call(Outcome(), None, begun)


def _has_turn(transfer: Any, piece: Piece) -> bool:
    before = transfer._jobs[: transfer._jobs.index(piece)]
    return all(job.moved for job in before)
