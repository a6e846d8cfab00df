"""What every engine has in common: registration, the check of every address, and transfers that end in a known state.

An engine adds only how memory is registered and how one call writes one chunk; it never sees an address that was not
checked here first, because engines crash, or crash their peer, on a bad one.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, TransferError, TransferTimeout
from .check import Spans, check, check_no_partial_overlap

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..layout import Layout, Memory
    from ..plan import Plan

_MAX_THREADS = 64  # started as needed
_CALLS_PER_PEER = 2  # so that a peer that hangs cannot take all threads from the others
_SETTLED = "Nothing of it is under way any more: its pages may be reused, and it may be submitted again."


@dataclasses.dataclass(frozen=True)
class Peer:
    """Where plans can go: what a decode process declares to its prefill peers.

    Args:
        session: `Engine.session` of the peer.
        layout: what the peer has registered with its engine.
    """

    session: str
    layout: Layout

    @functools.cached_property
    def _spans(self) -> Spans:
        return Spans([self.layout])


class Transfer:
    """A plan under way, made by `Engine.submit`. Every method may be called from any thread, any number of times.

    Attributes:
        peer: session it goes to.
        descriptors, nbytes: what it carries in all.
    """

    def __init__(self, engine: Engine, plan: Plan, session: str) -> None:
        self.peer = session
        self.descriptors = len(plan)
        self.nbytes = plan.total_bytes
        self._engine = engine
        self._chunks: Iterator[Plan] = engine._chunks(plan)
        self._next: Plan | None = next(self._chunks, None) if self.descriptors else None
        self._changed = threading.Condition()
        self._arrived = 0  # descriptors [0, arrived) are at the peer
        self._sent = 0  # descriptors [arrived, sent) are with the engine, or were when it failed
        self._busy = False  # the engine is at work on them now
        self._cancelled = False
        self._failure: tuple[Any, BaseException | None] | None = None  # code, exception

    @property
    def arrived(self) -> int:
        """Descriptors that surely arrived: those of the plan before this number."""
        return self._arrived

    def done(self) -> bool:
        """Whether the engine is through with it: all arrived, or it failed or was given up and no call is left."""
        with self._changed:
            return not self._busy and (self._next is None or self._cancelled or self._failure is not None)

    def wait(self, timeout: float | None = None) -> None:
        """Return when every byte has arrived.

        Args:
            timeout: seconds; None waits for as long as the engine takes. When it has passed the transfer is given up:
                nothing more is sent. (To look without giving up, call `done`.)

        Raises:
            TransferError: the engine failed. The message and `failed`, `code`, `settled` say what is known.
            TransferTimeout: a TransferError; not all had arrived in time.
        """
        with self._changed:
            ended = self._changed.wait_for(
                lambda: self._arrived == self.descriptors or self._failure is not None or self._cancelled, timeout
            )
            if not ended:
                self._cancelled = True
                self._changed.notify_all()  # whoever else waits for it
            if self._arrived == self.descriptors:
                return
            error = self._error(timeout)
            cause = self._failure[1] if self._failure else None
        if not ended:
            self._engine._withdraw(self)
        raise error from cause

    def _error(self, timeout: float | None) -> TransferError:
        code: Any = None
        if self._failure is not None:
            code, cause = self._failure
            said = f"the engine failed: {cause}" if cause else f"the engine returned {code}"
        else:
            said = "not done in time" if timeout is None else f"not done within {timeout:g} s"
        told = f"transfer of {self.descriptors} descriptors to {self.peer}: {said}; descriptors"
        told += f" {_numbers(0, self._arrived)} arrived"
        if self._sent > self._arrived:
            told += f", {_numbers(self._arrived, self._sent)} may have arrived, whole or in part"
        if self.descriptors > self._sent:
            told += f", {_numbers(self._sent, self.descriptors)} were never sent"
        settled = self._sent == self._arrived or (self._engine._stops_on_failure and not self._busy)
        advice = _SETTLED if settled else self._engine._unsettled
        failed = range(self._arrived, self.descriptors) if self._sent else None
        kind = TransferTimeout if self._failure is None else TransferError
        return kind(f"{told}. {advice}", peer=self.peer, failed=failed, code=code, settled=settled)

    # What follows is for the engine.

    def _take(self) -> Plan | None:
        """The next chunk, now with the engine; None when there is none or none is wanted."""
        with self._changed:
            chunk = None if self._cancelled or self._failure else self._next
            if chunk is not None:
                self._sent += len(chunk)
                self._busy = True
                self._next = next(self._chunks, None)
            return chunk

    def _give_back(self, failure: tuple[Any, BaseException | None] | None) -> None:
        """The engine is through with the chunk it took."""
        with self._changed:
            self._busy = False
            self._failure = failure
            if failure is None:
                self._arrived = self._sent
            self._changed.notify_all()


def _numbers(start: int, stop: int) -> str:
    return f"{start} to {stop - 1}" if stop > start else "none"


class _Lane:
    """What is queued for and under way to one peer."""

    def __init__(self) -> None:
        self.queue: collections.deque[Transfer] = collections.deque()
        self.calls = 0
        self.in_flight = 0  # descriptors


class Engine(abc.ABC):
    """Carries plans into the memory of peers. All methods may be called from any thread.

    Args:
        max_in_flight: descriptors that may be with the engine at once for one peer, over all transfers; a longer plan
            goes in chunks, in turn with the other transfers to that peer. None: no limit, a plan goes whole.
    """

    session: str  #: name under which peers reach this engine

    # What is true of a kind of engine: nothing is read or written any more once a call has failed ...
    _stops_on_failure = False
    # ... or for how many seconds the descriptors of a failed call are counted as still in flight ...
    _settle_s = 0.0
    # ... and what to do with the pages of a transfer that may still be under way.
    _unsettled = "The engine may still read and write its pages: neither reuse nor free them on either side."

    def __init__(self, *, max_in_flight: int | None = None) -> None:
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 1")
        self.max_in_flight = max_in_flight
        self._changed = threading.Condition()  # guards all below but _registry
        self._closed = False  # refuses what is new
        self._gone = False  # nothing left to close
        self._spans = Spans([])
        self._transfers: set[Transfer] = set()  # not done yet
        self._lanes: dict[str, _Lane] = {}
        self._declared: dict[str, Peer] = {}
        self._registry = threading.Lock()  # one registration, or close, at a time
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=f"kvplan-{type(self).__name__}")

    # ---- what a kind of engine supplies

    @abc.abstractmethod
    def _register(self, memory: Memory, base: int, nbytes: int) -> None:
        """Make one span known to the engine, or raise RuntimeError."""

    @abc.abstractmethod
    def _unregister(self, memory: Memory, base: int, nbytes: int) -> None:
        """Undo `_register`."""

    @abc.abstractmethod
    def _write(self, session: str, chunk: Plan) -> int:
        """Write one checked chunk, and block until it is there. Returns 0, or a code that says it failed."""

    @abc.abstractmethod
    def _shut_down(self, spans: Spans) -> None:
        """Unregister what is left, and let the engine go. Called once, with nothing under way."""

    def _chunks(self, plan: Plan) -> Iterator[Plan]:
        return iter([plan]) if self.max_in_flight is None else plan.chunks(self.max_in_flight)

    # ---- memory

    def register(self, layout: Layout) -> None:
        """Register all memory of `layout`: peers may then write to it, and plans may read from it.

        Two layouts may share spans of memory, but only whole.

        Raises:
            LayoutError: a span overlaps a part of what is registered already.
            RuntimeError: the engine refused; nothing of the layout stays registered.
        """
        with self._registry:
            old = self._usable_spans()
            new = Spans([*old.layouts, layout])
            check_no_partial_overlap(new)
            done = []
            try:
                for span in sorted(new.all - old.all, key=lambda s: s[1]):
                    self._register(*span)
                    done.append(span)
            except BaseException:
                for span in done:
                    self._unregister(*span)
                raise
            with self._changed:
                self._spans = new

    def unregister(self, layout: Layout) -> None:
        """Undo `register`. Peers that still write to this memory get an error.

        Raises:
            ValueError: `layout` is not registered.
            RuntimeError: transfers from this engine are under way, or the engine refused.
        """
        with self._registry:
            with self._changed:
                old = self._usable_spans()
                if layout not in old.layouts:
                    raise ValueError(f"{layout} is not registered with {self!r}")
                if busy := self._under_way():
                    raise RuntimeError(f"cannot unregister: {busy} transfers from {self!r} are under way; wait first")
                left = list(old.layouts)
                left.remove(layout)
                self._spans = Spans(left)
            for span in old.all - self._spans.all:
                self._unregister(*span)

    def _under_way(self) -> int:
        return sum(not transfer.done() for transfer in self._transfers)

    def _usable_spans(self) -> Spans:
        if self._closed:
            raise RuntimeError(f"{self!r} is closed")
        return self._spans

    # ---- transfers

    def submit(self, plan: Plan, peer: Peer | str) -> Transfer:
        """Check every descriptor, then send `plan` in the background.

        Args:
            plan: its source must be registered here, its destination be declared by the peer.
            peer: a `Peer`, or the session alone, for a plan that knows its destination layout.

        Raises:
            PlanError: a descriptor is empty, or leaves what is registered; nothing has been sent.
            RuntimeError: the engine is closed.
        """
        target = self._peer(plan, peer)
        spans = None
        while True:
            with self._changed:
                if self._usable_spans() is spans:  # what was checked against still holds
                    transfer = Transfer(self, plan, target.session)
                    if transfer.descriptors:
                        self._transfers.add(transfer)
                        lane = self._lanes.setdefault(target.session, _Lane())
                        lane.queue.append(transfer)
                        self._pump(target.session, lane)
                    return transfer
                spans = self._spans
            check(plan, spans, target._spans)

    def _peer(self, plan: Plan, peer: Peer | str) -> Peer:
        if isinstance(peer, Peer):
            return peer
        if not isinstance(peer, str):
            raise TypeError(f"peer must be a Peer or a session, not {type(peer).__name__}")
        layout = getattr(plan, "dst_layout", None)
        if layout is None:
            raise PlanError(f"the plan does not know its destination layout: submit it to Peer({peer!r}, layout)")
        known = self._declared.get(peer)
        if known is None or known.layout is not layout:
            if len(self._declared) >= 1024:  # only a memo; it must not grow with every peer there ever was
                self._declared.clear()
            known = self._declared[peer] = Peer(peer, layout)
        return known

    def _pump(self, session: str, lane: _Lane) -> None:
        """Start what may be started to one peer. Called with the lock held."""
        while lane.queue and lane.calls < _CALLS_PER_PEER:
            coming = lane.queue[0]._next
            limit = self.max_in_flight
            if coming is not None and limit is not None and lane.in_flight + len(coming) > limit:
                break
            transfer = lane.queue.popleft()
            chunk = transfer._take()
            if chunk is not None:
                lane.calls += 1
                lane.in_flight += len(chunk)
                self._pool.submit(self._carry, session, lane, transfer, chunk)
        if not (lane.queue or lane.in_flight):
            self._lanes.pop(session, None)

    def _carry(self, session: str, lane: _Lane, transfer: Transfer, chunk: Plan) -> None:
        failure: tuple[Any, BaseException | None] | None = None
        try:
            code = self._write(session, chunk)
            if code != 0:
                failure = (code, None)
        except Exception as error:
            failure = (None, error)
        transfer._give_back(failure)
        with self._changed:
            lane.calls -= 1
            if failure and self._settle_s:
                # The engine may still hold these: they go on counting against the limit.
                timer = threading.Timer(self._settle_s, self._release, (session, lane, len(chunk)))
                timer.daemon = True
                timer.start()
            else:
                lane.in_flight -= len(chunk)
            if transfer.done():
                self._transfers.discard(transfer)
            else:
                lane.queue.append(transfer)
            self._pump(session, lane)
            self._changed.notify_all()

    def _release(self, session: str, lane: _Lane, descriptors: int) -> None:
        with self._changed:
            lane.in_flight -= descriptors
            self._pump(session, lane)

    def _withdraw(self, transfer: Transfer) -> None:
        """Forget a transfer that was given up, unless a call is still at work for it."""
        with self._changed:
            if transfer.done() and transfer in self._transfers:
                self._transfers.discard(transfer)
                lane = self._lanes.get(transfer.peer)
                if lane is not None and transfer in lane.queue:
                    lane.queue.remove(transfer)
                    self._pump(transfer.peer, lane)
                self._changed.notify_all()

    # ---- the end

    def close(self) -> None:
        """Refuse new plans, wait until those under way have ended, unregister all memory, let the engine go.

        May be called again; it then only waits for the first call.
        """
        with self._registry:
            with self._changed:
                if self._gone:
                    return
                self._closed = True
                self._changed.wait_for(lambda: not self._under_way())
            self._pool.shutdown()
            self._shut_down(self._spans)
            self._gone = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({getattr(self, 'session', 'not initialized')!r})"
