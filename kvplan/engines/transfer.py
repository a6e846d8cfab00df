"""A plan under way: what has arrived, what may still be moving, and when its pages may be used again."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from ..errors import TransferError, TransferTimeout

if TYPE_CHECKING:
    from ..planning import Plan
    from .base import Engine

Op = Literal["write", "read"]

_SETTLED = "Nothing of it is under way any more: its pages may be reused, and it may be submitted again."
_HANDS_OFF = "Neither reuse nor free its pages, on either side, before settle() has returned True"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one call of an engine ended. No exception, where its traceback would keep the engine's own objects alive.

    Args:
        code: 0, or what the engine said.
        started: False when the engine surely took nothing of it.
        finished: for a call that was given up while the engine goes on: says True when the engine is through with it
            and all has arrived, False while it is not, and raises RuntimeError when that can no longer be known.
    """

    code: Any = 0
    started: bool = True
    finished: Callable[[], bool] | None = None


class Transfer:
    """A plan under way, made by `Engine.submit`. Every method may be called from any thread, any number of times.

    Attributes:
        peer: session of the other side.
        op: "write" or "read".
        descriptors, nbytes: what it carries in all.
        unsettled: why bytes of it may still be read or written; None once it is known that none are.
    """

    def __init__(self, engine: Engine, plan: Plan, session: str, op: Op, notify: bytes | None = None) -> None:
        self.peer = session
        self.op: Op = op
        self.descriptors = len(plan)
        self.nbytes = plan.total_bytes
        self.unsettled: str | None = None
        self._engine = engine
        self._notify = notify  # still to be told to the peer
        self._chunks: Iterator[Plan] = engine._chunks(plan) if self.descriptors else iter([plan] if notify else [])
        self._next: Plan | None = next(self._chunks, None)
        self._last: Plan | None = None  # what the engine had last
        self._changed = threading.Condition()
        self._arrived = 0  # descriptors [0, arrived) are where they belong
        self._sent = 0  # descriptors [arrived, sent) are with the engine, or were when it failed
        self._busy = False  # the engine is at work on them now
        self._given_up: str | None = None  # why
        self._failure: tuple[Any, BaseException | None] | None = None  # code, exception
        self._finished: Callable[[], bool] | None = None  # of an `Outcome`
        self._ended = 0.0  # when the call that failed did
        self._shown = False  # that it is settled

    @property
    def arrived(self) -> int:
        """Descriptors that surely arrived: those of the plan before this number."""
        return self._arrived

    @property
    def _complete(self) -> bool:
        return self._arrived == self.descriptors and self._notify is None and self._failure is None

    def done(self) -> bool:
        """Whether the engine is through with it: all arrived, or it failed or was given up and no call is left."""
        with self._changed:
            return not self._busy and (self._next is None or bool(self._given_up or self._failure))

    def wait(self, timeout: float | None = None) -> None:
        """Return when every byte has arrived, and the peer has been told where `notify` asks for it.

        Args:
            timeout: seconds; None waits for as long as the engine takes. When it has passed the transfer is given up:
                nothing more is sent. (To look without giving up, call `done`.)

        Raises:
            TransferError: the engine failed, or `cancel` was called. The message and `failed`, `code`, `settled` say
                what is known.
            TransferTimeout: a TransferError; not all had arrived in time.
        """
        with self._changed:
            ended = self._changed.wait_for(lambda: self._complete or self._failure or self._given_up, timeout)
            if not ended:
                self._give_up(f"not done within {timeout:g} s")
            if self._complete:
                return
            error = self._error()
            cause = self._failure[1] if self._failure else None
        if not ended:
            self._engine._withdraw(self)
        raise error from cause

    def cancel(self) -> None:
        """Send nothing more. What is with the engine already cannot be called back: see `settle`.

        `wait` then raises TransferError, unless all arrived after all.
        """
        with self._changed:
            self._give_up("it was cancelled")
        self._engine._withdraw(self)

    def _give_up(self, why: str) -> None:
        if self._given_up is None and not self._complete and self._failure is None:
            self._given_up = why
        self._changed.notify_all()  # whoever else waits for it

    def settle(self, timeout: float = 10.0) -> bool:
        """Wait until no byte of it can be read or written any more: then its pages may be used again.

        A transfer that is under way is waited for, not given up. For one that failed it may have the engine write the
        last descriptor that was under way once more: to its own place, from its own pages.

        Args:
            timeout: seconds.

        Returns:
            True when it is settled. False when that could not be shown in time; `unsettled` says why. It may be
            called again.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            if not self._changed.wait_for(self.done, timeout):
                self.unsettled = "a call of the engine is still at work on it"
                return False
            if self._is_settled:
                self.unsettled = None
                return True
        why = self._outstanding(deadline) if self._finished else self._engine._prove_settled(self, deadline)
        with self._changed:
            self.unsettled = None if self._is_settled else why
            return self.unsettled is None

    @property
    def _is_settled(self) -> bool:
        return not self._busy and (self._shown or self._sent == self._arrived or self._engine._stops_on_failure)

    def _outstanding(self, deadline: float) -> str | None:
        """Ask the engine about the call that was given up, until it has ended; else why it is not known to have."""
        assert self._finished is not None
        while True:
            try:
                finished = self._finished()
            except RuntimeError as error:
                return str(error)
            if finished:
                self._show_settled(arrived=True)
                return None
            if time.monotonic() >= deadline:
                return f"{self._engine._told(self.peer)} has not acknowledged it; it goes on when the peer does"
            time.sleep(0.002)

    def _show_settled(self, *, arrived: bool) -> None:
        """It is known now that nothing is under way."""
        with self._changed:
            self._finished = None
            self._shown = True
            if arrived:
                self._arrived = self._sent
            self._changed.notify_all()

    def _error(self) -> TransferError:
        code: Any = None
        if self._failure is not None:
            code, cause = self._failure
            said = f"the engine failed: {cause}" if cause else f"the engine returned {code}"
        else:
            said = self._given_up or ""
        direction = "to" if self.op == "write" else "from"
        told = f"transfer of {self.descriptors} descriptors {direction} {self._engine._told(self.peer)}: {said}"
        told += f"; descriptors {_numbers(0, self._arrived)} arrived"
        if self._sent > self._arrived:
            told += f", {_numbers(self._arrived, self._sent)} may have arrived, whole or in part"
        if self.descriptors > self._sent:
            told += f", {_numbers(self._sent, self.descriptors)} were never sent"
        settled = self._is_settled
        goes_on = self._failure is None or self._finished is not None  # nothing has failed but our patience
        unsettled = self._engine._going_on if goes_on else self._engine._unsettled
        advice = _SETTLED if settled else f"{unsettled} {_HANDS_OFF}."
        failed = range(self._arrived, self.descriptors) if self._last is not None else None
        timed_out = self._failure is None and self._given_up is not None and self._given_up.startswith("not done")
        kind = TransferTimeout if timed_out else TransferError
        return kind(f"{told}. {advice}", peer=self.peer, failed=failed, code=code, settled=settled)

    # What follows is for the engine.

    def _take(self) -> Plan | None:
        """The next chunk, now with the engine; None when there is none or none is wanted."""
        with self._changed:
            chunk = None if self._given_up or self._failure else self._next
            if chunk is not None:
                self._sent += len(chunk)
                self._busy = True
                self._last = chunk
                self._next = next(self._chunks, None)
            return chunk

    def _give_back(self, outcome: Outcome, cause: BaseException | None, told: bool = False) -> None:
        """The engine is through with the chunk it took; `told` if the peer has been sent the notice as well."""
        with self._changed:
            self._busy = False
            self._ended = time.monotonic()
            if told:
                self._notify = None
            if outcome.code == 0:
                self._arrived = self._sent
            elif not outcome.started:
                self._sent = self._arrived
            if outcome.code != 0 or cause is not None:
                self._failure = (outcome.code or None, cause)
                self._finished = outcome.finished
            self._changed.notify_all()


def _numbers(start: int, stop: int) -> str:
    return f"{start} to {stop - 1}" if stop > start else "none"
