"""A plan under way: what has arrived, how it ended, and whether anything of it may still be moving."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

from ..errors import TransferError, TransferTimeout, clipped
from .limits import deadline_of, left, seconds
from .outcome import Op, Outcome, Times, waiter
from .pieces import Chunk, Piece

if TYPE_CHECKING:
    from ..planning import Plan
    from .owner import Owner

_log = logging.getLogger("kvplan.engines")

_SETTLED = "Nothing of this transfer is under way any more."
_HANDS_OFF = "Neither reuse nor free its pages, on either side, before settle() has returned True"


class Transfer:
    """A plan under way, made by `Engine.submit`. Every method may be called from any thread, any number of times.

    A transfer ends once: it has *arrived*, *failed*, or was *cancelled*. `wait`, `exception`, `done`, `await` and
    callbacks are about that end. Whether the engine may still read or write its pages is another matter, which
    `settled` and `settle` are about: one that arrived is settled, one that failed or was cancelled may not be.

    Attributes:
        peer: session of the other side.
        op: "write" or "read".
        label: what `submit` was told that it belongs to, or None.
        descriptors, nbytes: what it carries in all.
        times: when things happened.
        unsettled: why `settle` returned False last; None once it is settled.
    """

    def __init__(
        self,
        engine: Owner,
        plan: Plan,
        session: str,
        op: Op,
        notify: bytes | None = None,
        label: str | None = None,
        chunks: Iterable[Chunk] | None = None,
    ) -> None:
        self.peer = session
        self.op: Op = op
        self.label = label
        self.descriptors = len(plan)
        self.nbytes = plan.total_bytes
        self.times = Times(time.monotonic())
        self.unsettled: str | None = None
        self._engine = engine
        self._key = engine._key_of(session)
        self._peer_name = engine._peer_name(session)
        self._notify = notify  # still to be told to the peer
        if chunks is None or not self.descriptors:
            chunks = engine._chunks(plan) if self.descriptors else [plan] if notify else []
        self._chunks: Iterator[Chunk] = iter(chunks)
        self._next: Chunk | None = next(self._chunks, None)
        self._last: Chunk | None = None  # taken last; the one that failed, where one did
        self._jobs: list[Chunk] = []  # with a thread each: one, or two pieces of staging, in order
        self._held: list[Piece] = []  # that failed, whose slots of staging the engine may still use
        self._changed = threading.Condition(engine._lock)
        self._arrived = 0  # descriptors [0, arrived) are where they belong
        self._sent = 0  # descriptors [arrived, sent) are with the engine, or were when it failed
        self._goes_on = False  # a call has failed, and the engine may go on with it
        self._end: Literal["arrived", "failed", "cancelled"] | None = None
        self._why: str | None = None  # it was cancelled, or failed without a call
        self._failure: tuple[Any, BaseException | None] | None = None  # code, exception
        self._finished: Callable[[], bool] | None = None  # of an `Outcome`
        self._asking = False  # a thread is within it
        self._ended = 0.0  # when the call that failed did
        self._known_settled = False  # that it is settled
        self._peer_gone = False
        self._behind: set[Transfer] | None = None  # unsettled transfers that it is queued behind
        self._is_fence = False
        self._stop: str | None = None  # why nothing more of it is to be started once its call has ended
        self._callbacks: list[Callable[[Transfer], object]] = []
        if self._next is None:
            self._end = "arrived"
            self.times.last_byte = self.times.ended = self.times.settled = self.times.submitted

    @property
    def _busy(self) -> bool:
        """A call of the engine, or a copy into or out of staging, is at work on it."""
        return bool(self._jobs)

    @property
    def arrived(self) -> int:
        """Descriptors confirmed to have arrived: those of the plan before this number.

        It grows by a chunk at a time, when the engine's call for it has ended: at most `Engine.max_in_flight`
        descriptors; the whole plan where that is None. What goes through staging arrives by pieces. What is read
        through staging has arrived when it is where it belongs.
        """
        return self._arrived

    @property
    def settled(self) -> bool:
        """Whether it is known that nothing of it can read or write any more. `settle` finds out."""
        with self._changed:
            return self._is_settled

    @property
    def state(self) -> str:
        """In one word: "waiting" (behind an unsettled one), "queued", "moving", "arrived", "failed", "cancelled"."""
        with self._changed:
            if self._end is not None:
                return self._end
            if self._behind is not None:
                return "waiting"
            return "moving" if self._sent or any(not isinstance(job, Piece) for job in self._jobs) else "queued"

    def __repr__(self) -> str:
        with self._changed:
            rest = "" if self._end is None or self._is_settled else ", not settled"
            return (
                f"<Transfer{_labelled(self.label)} {self.state}: {self._arrived} of {self.descriptors} descriptors, "
                f"{self.nbytes} bytes, {'to' if self.op == 'write' else 'from'} {clipped(self._peer_name)}{rest}>"
            )

    # ---- the end

    def done(self) -> bool:
        """Whether it has ended: arrived, failed or cancelled. Then `wait` does not block."""
        return self._end is not None

    def wait(self, timeout: float | None = None) -> None:
        """Return when every byte has arrived, and the peer has been told where `notify` asks for it.

        Args:
            timeout: seconds; None or infinity waits for as long as the engine takes. When it has passed the transfer
                goes on, and may be waited for again. To stop it, call `cancel`.

        Raises:
            TransferTimeout: it has not ended in time, and goes on. A TransferError, and a TimeoutError.
            TransferError: the engine failed, or `cancel` was called. The message and `failed`, `code`, `settled` say
                what is known.
            ValueError: `timeout` is negative or NaN.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> TransferError | None:
        """The error that `wait` raises once it has ended; None where all has arrived.

        Raises:
            TransferTimeout, ValueError: as `wait`.
        """
        limit = seconds(timeout, "timeout")
        with self._changed:
            if not self._changed.wait_for(self.done, limit):
                raise TransferTimeout(
                    f"{self._named()}: not done within {limit:g} s; {self._progress()}. It goes on, and its pages stay "
                    f"in use: see cancel() and settle()",
                    peer=self.peer,
                    failed=range(self._arrived, self.descriptors),
                    settled=False,
                )
            if self._end == "arrived":
                return None
            error = self._error()
            error.__cause__ = self._failure[1] if self._failure else None
            return error

    def cancel(self) -> bool:
        """Send nothing more, and end as cancelled, unless it has ended already.

        What is with the engine cannot be called back: see `settle`.

        Returns:
            Whether it has been cancelled.
        """
        with self._changed:
            if self._end is None:
                self._close("cancelled", "it was cancelled")
        self._engine._run_callbacks()
        return self._end == "cancelled"

    def add_done_callback(self, call: Callable[[Transfer], object]) -> None:
        """Have `call(transfer)` called once, when it has ended; at once where it has.

        It is called by the thread that found the end, often one of the engine's, so it must be short, and must not call
        `register`, `unregister` or `close`, which wait for such threads. What it raises is logged, and goes no further.
        """
        with self._changed:
            if self._end is None:
                self._callbacks.append(call)
                return
        self._call(call)

    def __await__(self) -> Generator[Any, None, None]:
        """As `wait`, without blocking the event loop. If the task that waits is cancelled the transfer goes on."""
        yield from waiter(self)
        self.wait(0)

    # ---- whether it is settled

    def settle(self, timeout: float | None = 10.0) -> bool:
        """Wait until nothing of it can be read or written any more.

        A transfer that has not ended is waited for. For one that failed over Mooncake's TCP, the engine sends a word of
        its own, a *fence*, to a word of the peer's engine: when it has arrived, so has all that was queued before it.
        No page is touched by that.

        Its pages are free once no other transfer uses them either: `TransferGroup.settle` says so for a whole request.

        Args:
            timeout: seconds; None or infinity: no limit.

        Returns:
            True when it is settled. False when that could not be shown in time; `unsettled` says why. It may be
            called again.

        Raises:
            ValueError: `timeout` is negative or NaN.
        """
        deadline = deadline_of(seconds(timeout, "timeout"))
        with self._changed:
            if not self._changed.wait_for(lambda: self._end is not None and not self._busy, left(deadline)):
                self.unsettled = (
                    "a call of the engine is still at work on it" if self._busy else "it has not ended: see cancel()"
                )
                return False
            if self._is_settled:
                self.unsettled = None
                return True
        why = self._ask(deadline) if self._finished else self._engine._prove_settled(self, deadline)
        self._engine._run_callbacks()
        with self._changed:
            self.unsettled = None if self._is_settled else why
            return self.unsettled is None

    @property
    def _is_settled(self) -> bool:
        return (
            self._end is not None
            and not self._busy
            and (self._known_settled or not self._goes_on or self._engine._stops_on_failure)
        )

    def _ask(self, deadline: float) -> str | None:
        """Ask the engine about the call that was given up, until it has ended; else why it is not known to have.

        One thread asks at a time: engines may crash on two.
        """
        why = f"{clipped(self._peer_name)} has not acknowledged it; it goes on when the peer does"
        while True:
            with self._changed:
                free = self._changed.wait_for(lambda: not self._asking or self._is_settled, left(deadline))
                finished = self._finished
                if self._is_settled or finished is None:
                    return self.unsettled
                if not free:
                    return why
                self._asking = True
            reason, arrived = None, False
            try:
                arrived = finished()
            except RuntimeError as error:
                reason = str(error)
            finally:
                with self._changed:
                    self._asking = False
                    if arrived:
                        # Of a piece, more may be missing than this one call.
                        if self._last is not None and not isinstance(self._last, Piece):
                            self._count(self._sent, self._last.total_bytes)
                        self._show_settled()
                    elif reason is not None and self._peer_gone:
                        self._show_settled()
                    self._changed.notify_all()
            if arrived or reason is not None:
                return reason
            if time.monotonic() >= deadline:
                return why
            time.sleep(min(0.002, left(deadline) or 0.002))

    # ---- what errors say

    def _named(self) -> str:
        """Which transfer it is, for messages."""
        direction = "to" if self.op == "write" else "from"
        return (
            f"transfer{_labelled(self.label)} of {self.descriptors} descriptors {direction} {clipped(self._peer_name)}"
        )

    def _progress(self) -> str:
        said = f"descriptors {_numbers(0, self._arrived)} arrived"
        if self._sent > self._arrived:
            said += f", {_numbers(self._arrived, self._sent)} may have arrived, whole or in part"
        if self.descriptors > self._sent:
            said += f", {_numbers(self._sent, self.descriptors)} were never sent"
        return said

    def _error(self) -> TransferError:
        code: Any = None
        said, where = self._why or "", ""
        if self._failure is not None and self._end == "failed":
            code, cause = self._failure
            said = f"the engine failed: {cause}" if cause else f"the engine returned {code}"
            where = self._engine._where(self)
        settled = self._is_settled
        goes_on = self._failure is None or self._finished is not None  # nothing has failed but our patience
        unsettled = self._engine._going_on if goes_on else self._engine._unsettled
        advice = _SETTLED if settled else f"{unsettled} {_HANDS_OFF}."
        failed = range(self._arrived, self.descriptors) if self._last is not None else None
        message = f"{self._named()}: {said}; {self._progress()}{where}. {advice}"
        return TransferError(message, peer=self.peer, failed=failed, code=code, settled=settled)

    # ---- for the engine, with its lock held

    def _touches(self) -> list[Plan]:
        """The descriptors of which something may be under way once it has ended."""
        chunks = dict.fromkeys((*self._jobs, *self._held, *([] if self._last is None else [self._last])))
        return [chunk.plan if isinstance(chunk, Piece) else chunk for chunk in chunks]

    def _may_take(self) -> bool:
        """Whether a thread may take the next chunk now: the last one has ended, or both are pieces of staging."""
        if self._end is not None or self._next is None:
            return False
        return not self._jobs or (
            len(self._jobs) == 1 and isinstance(self._jobs[0], Piece) and isinstance(self._next, Piece)
        )

    def _take(self) -> Chunk | None:
        """The next chunk, now with a thread; None when there is none or none is wanted."""
        chunk = self._next if self._may_take() else None
        if chunk is None or (isinstance(chunk, Piece) and not chunk.claim(self)):
            return None
        self._jobs.append(chunk)
        self._last = chunk
        if not isinstance(chunk, Piece):  # `carry` says when the engine is given a piece
            self._begin(chunk)
        self._next = next(self._chunks, None)
        return chunk

    def _resume(self) -> None:
        """A slot of staging, which it has waited for, may be free."""
        if self._may_take():
            try:
                self._engine._lanes.resume(self._key, self)
            except RuntimeError as error:
                self._close("failed", str(error))

    @property
    def _wanted(self) -> bool:
        """Whether more of it is to be started."""
        return self._end is None and self._stop is None

    def _begin(self, chunk: Chunk) -> None:
        """The engine is given it now."""
        if self.times.first_call is None:
            self.times.first_call = time.monotonic()
        self._sent = chunk.reached if isinstance(chunk, Piece) else self._sent + len(chunk)

    def _call_returned(
        self, chunk: Chunk, outcome: Outcome | None, cause: BaseException | None, told: bool = False
    ) -> None:
        """The engine is through with a chunk; `told` if the peer has been sent the notice as well.

        No outcome: the engine was not given it.
        """
        self._jobs.remove(chunk)
        failed = cause is not None or (outcome is not None and outcome.code != 0)
        goes_on = outcome is not None and outcome.code != 0 and outcome.started
        if outcome is not None:
            self._ended = time.monotonic()
            if outcome.code == 0 and self._failure is None:
                self._chunk_arrived(chunk)  # behind a failure, what arrives is not the next
            elif not outcome.started:
                self._sent = chunk.before if isinstance(chunk, Piece) else self._arrived
            self._goes_on |= goes_on
        if told:
            self._notify = None
        if isinstance(chunk, Piece):
            if goes_on:
                self._held.append(chunk)
            else:
                chunk.free(self)
        if failed and self._failure is None:
            self._last = chunk
            self._failure = ((outcome.code if outcome else 0) or None, cause)
            self._finished = outcome.finished if outcome else None
        if self._peer_gone and (self.op == "write" or self._finished is None):
            self._known_settled = True
        if self._end is not None:  # cancelled meanwhile
            self._engine._update_settled(self)
        elif self._failure is not None:
            self._close("failed")
        elif self._arrived == self.descriptors and self._notify is None:
            self._close("arrived")
        elif self._stop is not None:
            self._close("failed", self._stop)
        self._changed.notify_all()

    def _chunk_arrived(self, chunk: Chunk) -> None:
        if isinstance(chunk, Piece):
            self._count(chunk.complete, chunk.nbytes)
        else:
            self._count(self._sent, chunk.total_bytes)

    def _count(self, arrived: int, nbytes: int) -> None:
        """So many descriptors have arrived now, with `nbytes` that had not before."""
        self._engine._counters.moved(self, arrived - self._arrived, nbytes)
        self._arrived = arrived
        if arrived == self.descriptors:
            self.times.last_byte = time.monotonic()

    def _free_slots(self) -> None:
        """It has settled: nothing uses its slots of staging any more."""
        for piece in self._held:
            piece.free(self)
        self._held.clear()

    def _close(self, end: Literal["arrived", "failed", "cancelled"], why: str | None = None) -> None:
        self._end, self._why = end, why
        self._next, self._chunks = None, iter(())
        self.times.ended = time.monotonic()
        self._engine._close_transfer(self)
        for call in self._callbacks:
            self._engine._events.append(functools.partial(self._call, call))
        self._callbacks.clear()
        self._engine._update_settled(self)
        self._changed.notify_all()

    def _show_settled(self) -> None:
        """It is known now that nothing is under way."""
        self._finished = None
        self._known_settled = True
        self._engine._update_settled(self)
        self._changed.notify_all()

    def _call(self, call: Callable[[Transfer], object]) -> None:
        try:
            call(self)
        except BaseException:  # SystemExit and CancelledError too: they are not about the thread that found the end
            _log.exception("a callback of %r raised", self)


def _labelled(label: str | None) -> str:
    return "" if label is None else f" {clipped(label)!r}"


def _numbers(start: int, stop: int) -> str:
    return f"{start} to {stop - 1}" if stop > start else "none"
