"""What every engine has in common: registration, the check of every address, and the turns that transfers take.

An engine adds only how memory is registered and how one call moves one chunk; it never sees an address that was not
checked here first, because engines crash, or crash their peer, on a bad one.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

from ..errors import PlanError, TransferError
from . import notices
from .check import Span, Spans, check, check_registrable, check_text
from .peer import Peer
from .transfer import Op, Outcome, Transfer

if TYPE_CHECKING:
    from typing_extensions import Self

    from ..layout import Layout
    from ..planning import Plan

_MAX_THREADS = 64  # started as needed
_CALLS_PER_PEER = 2  # so that a peer that hangs cannot take all threads from the others
_FENCE_PAUSE_S = 0.2  # between two attempts to show that a transfer is settled


class _Lane:
    """What is queued for and under way to one peer."""

    def __init__(self) -> None:
        self.queue: collections.deque[Transfer] = collections.deque()
        self.calls = 0
        self.in_flight = 0  # descriptors


class Engine(abc.ABC):
    """Carries plans between memory here and memory of peers. All methods may be called from any thread.

    Args:
        max_in_flight: descriptors that may be with the engine at once for one peer, over all transfers; a longer plan
            goes in chunks, in turn with the other transfers to that peer. None: no limit, a plan goes whole.
    """

    session: str  #: name under which peers reach this engine; read it again after `register` and `unregister`

    # What is true of a kind of engine. Nothing is read or written any more once a call has failed:
    _stops_on_failure: ClassVar[bool] = False
    # what it holds for one peer goes there in order, also after a failure: a later success settles what was before:
    _in_order: bool = False
    # for how many seconds the descriptors of a failed call are counted as still in flight:
    _settle_s: ClassVar[float] = 0.0
    # it can tell a peer that all has arrived:
    _notifies: ClassVar[bool] = False
    # and what holds for a transfer that may still be under way.
    _unsettled: str = "The engine may still read and write its pages."
    # The same for one that was only given up.
    _going_on: str = "The engine goes on with what it has of it: it may still read and write its pages."

    def __init__(self, *, max_in_flight: int | None = None) -> None:
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 1")
        self.max_in_flight = max_in_flight
        self._changed = threading.Condition()  # guards all below but _registry
        self._closed = False  # refuses what is new
        self._gone = False  # nothing left to close
        self._spans = Spans([])
        self._transfers: set[Transfer] = set()  # not done yet
        # Those that failed and are not known to be settled; only where _in_order.
        self._doubtful: weakref.WeakSet[Transfer] = weakref.WeakSet()
        self._lanes: dict[str, _Lane] = {}
        self._declared: dict[str, Peer] = {}
        self._notices = notices.Notices(self._heard)
        self._registry = threading.Lock()  # one registration, or close, at a time
        self._pool = ThreadPoolExecutor(_MAX_THREADS, thread_name_prefix=f"kvplan-{type(self).__name__}")

    # ---- what a kind of engine supplies

    @abc.abstractmethod
    def _register(self, spans: Sequence[Span]) -> None:
        """Make all `spans` known to the engine, or raise RuntimeError having kept none."""

    @abc.abstractmethod
    def _unregister(self, spans: Sequence[Span]) -> None:
        """Undo `_register`, though not necessarily of the same list. No peer reaches `spans` when it returns."""

    @abc.abstractmethod
    def _move(self, session: str, chunk: Plan, op: Op) -> Outcome:
        """Write or read one checked chunk, and block until all of it is there or it has failed."""

    @abc.abstractmethod
    def _shut_down(self, spans: Spans) -> None:
        """Unregister what is left, and let the engine go. Called once, with nothing under way."""

    def _check_session(self, session: str) -> None:
        """Refuse, by ValueError, what is no session of this kind of engine."""
        check_text(session)

    def _told(self, session: str) -> str:
        """How messages call this peer."""
        return session

    def _tell(self, session: str, notice: bytes) -> None:
        """Send a notice; only where `_notifies`."""
        raise NotImplementedError

    def _heard(self) -> list[tuple[str, bytes]]:
        """Notices that have come since the last call, each with its sender's name; only where `_notifies`."""
        raise NotImplementedError

    def _chunks(self, plan: Plan) -> Iterator[Plan]:
        limit = self.max_in_flight
        return iter([plan]) if limit is None or len(plan) <= limit else plan.chunks(limit)

    # ---- memory

    def register(self, layout: Layout) -> None:
        """Register all memory of `layout`: peers may then write to it and read it, and plans may use it on this side.

        Two layouts may share spans of memory, but only whole.

        Raises:
            LayoutError: a span overlaps a part of what is registered already.
            RuntimeError: the engine refused; nothing of the layout stays registered.
        """
        with self._registry:
            old = self._usable_spans()
            new = Spans([*old.layouts, layout])
            check_registrable(new)
            self._register(_ordered(new.all - old.all))
            with self._changed:
                self._spans = new

    def unregister(self, layout: Layout) -> None:
        """Undo `register`. Peers that still use this memory get an error.

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
            self._unregister(_ordered(old.all - self._spans.all))

    def _under_way(self) -> int:
        return sum(not transfer.done() for transfer in self._transfers)

    def _usable_spans(self) -> Spans:
        if self._closed:
            raise RuntimeError(f"{self!r} is closed")
        return self._spans

    # ---- transfers

    def submit(self, plan: Plan, peer: Peer | str, *, op: Op = "write", notify: bytes | None = None) -> Transfer:
        """Check every descriptor, then carry `plan` out in the background.

        Args:
            plan: what goes where. Written, its source is registered here and its destination declared by the peer.
            peer: a `Peer`, or the session alone, for a plan that knows the peer's layout.
            op: "write" pushes this side's pages to the peer; "read" pulls: the plan's source is declared by the peer
                and its destination registered here.
            notify: 1 to 1024 bytes that the peer is told once all has arrived; it waits for them with `wait_notice`.

        Raises:
            PlanError: a descriptor is empty, or leaves what is registered; nothing has been sent.
            ValueError: an argument is out of its range, or the engine has no notices.
            RuntimeError: the engine is closed.
        """
        if op not in ("write", "read"):
            raise ValueError(f"op must be 'write' or 'read', not {op!r}")
        if notify is not None:
            self._check_notice(notify)
        target = self._peer(plan, peer, op)
        spans = None
        while True:
            with self._changed:
                if self._usable_spans() is spans:  # what was checked against still holds
                    return self._enqueue(plan, target.session, op, notify)
                spans = self._spans
            check(plan, *((spans, target._spans) if op == "write" else (target._spans, spans)), op)

    def _enqueue(self, plan: Plan, session: str, op: Op, notify: bytes | None = None) -> Transfer:
        """Start what has been checked. Called with the lock held."""
        transfer = Transfer(self, plan, session, op, notify)
        if not transfer.done():
            self._transfers.add(transfer)
            lane = self._lanes.setdefault(session, _Lane())
            lane.queue.append(transfer)
            self._pump(session, lane)
        return transfer

    def _peer(self, plan: Plan, peer: Peer | str, op: Op) -> Peer:
        if not isinstance(peer, (Peer, str)):
            raise TypeError(f"peer must be a Peer or a session, not {type(peer).__name__}")
        self._check_session(peer if isinstance(peer, str) else peer.session)
        if isinstance(peer, Peer):
            return peer
        side = "destination" if op == "write" else "source"
        layout = plan.dst_layout if op == "write" else plan.src_layout
        if layout is None:
            raise PlanError(f"the plan does not know its {side} layout: submit it to Peer(session, layout)")
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
        if not (lane.queue or lane.in_flight or lane.calls):
            self._lanes.pop(session, None)

    def _carry(self, session: str, lane: _Lane, transfer: Transfer, chunk: Plan) -> None:
        begun = time.monotonic()
        cause: BaseException | None = None
        told = False
        try:
            outcome = self._move(session, chunk, transfer.op) if len(chunk) else Outcome()
        except Exception as error:
            outcome, cause = Outcome(None), error.with_traceback(None)  # its frames hold the engine's objects
        if outcome.code == 0 and transfer._next is None and transfer._notify and not transfer._given_up:
            try:
                self._tell(session, transfer._notify)
                told = True
            except Exception as error:
                cause = RuntimeError(f"all arrived, but the peer could not be told: {error}")
        transfer._give_back(outcome, cause, told)
        with self._changed:
            lane.calls -= 1
            if outcome.code != 0 and outcome.started and self._settle_s:
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
            if self._in_order:
                self._settle_earlier(transfer, begun)
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

    # ---- what is known of transfers that failed

    def _settle_earlier(self, transfer: Transfer, begun: float) -> None:
        """A call for `transfer` that began at `begun` has ended. Called with the lock held; only where _in_order."""
        if transfer._failure is not None:
            if not transfer._is_settled:
                self._doubtful.add(transfer)
            return
        for other in [t for t in self._doubtful if t.peer == transfer.peer and t._ended <= begun]:
            other._show_settled(arrived=False)
            self._doubtful.discard(other)

    def _prove_settled(self, transfer: Transfer, deadline: float) -> str | None:
        """Show by a fence that nothing of a failed transfer is under way any more; else why that is not known."""
        if not self._in_order:
            return self._unsettled
        assert transfer._last is not None
        table = transfer._last.table[:, -1:]
        segment = dataclasses.replace(transfer._last.segments[-1], start=0, stop=1)
        plan = type(transfer._last)(table, [segment])
        here, memory = (table[0], segment.src_memory) if transfer.op == "write" else (table[1], segment.dst_memory)
        address, nbytes = here.numpy().view("uint64"), table[2].numpy().view("uint64")
        while True:
            with self._changed:
                if transfer._is_settled:
                    return None
                if self._closed:
                    return f"{self!r} is closed, and can show nothing any more. {self._unsettled}"
                if self._spans.first_outside(memory, address, nbytes) >= 0:
                    return f"its memory here is not registered any more. {self._unsettled}"
                fence = self._enqueue(plan, transfer.peer, transfer.op)
            try:
                fence.wait(max(0.0, deadline - time.monotonic()))
            except TransferError as error:
                if time.monotonic() + _FENCE_PAUSE_S >= deadline:
                    return f"a later transfer to the peer does not arrive either: {error}"
                time.sleep(_FENCE_PAUSE_S)

    def wait_notice(self, notice: bytes, timeout: float) -> None:
        """Return once a peer's transfer with this `notify` has arrived here. Each is waited for once.

        What nobody waits for is kept, but of more than 65,536 different ones the oldest are forgotten.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it did not come in time.
            ValueError: it is not 1 to 1024 bytes, or the engine has no notices.
            RuntimeError: the engine is closed.
        """
        self._check_notice(notice)
        self._usable_spans()
        self._notices.wait(notice, timeout)

    def _check_notice(self, notice: bytes) -> None:
        if not self._notifies:
            raise ValueError(f"{type(self).__name__} cannot notify; tell the peer through a channel of your own")
        notices.check(notice)

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
        name = self._told(self.session) if hasattr(self, "session") else "not initialized"
        return f"{type(self).__name__}({name!r})"


def _ordered(spans: set[Span]) -> list[Span]:
    return sorted(spans, key=lambda s: (s[0].kind, s[0].device, s[1]))
