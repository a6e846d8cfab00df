"""What every engine has in common: plans are checked, carried out chunk by chunk, counted, and brought to an end.

An engine adds only how memory is registered and how one call moves one chunk; it never sees an address that was not
checked here first, because engines crash, or crash their peer, on a bad one.
"""

from __future__ import annotations

import abc
import collections
import contextlib
import functools
import logging
import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, ClassVar

import torch

from ..errors import PlanError, clipped, shown
from ..planning import Plan
from . import notices
from .check import Spans, check, check_form, check_text, nearest
from .collisions import Unsettled
from .costs import Cost
from .ending import Ending
from .fences import Fences
from .lanes import CALLS_PER_PEER, Lanes
from .limits import seconds
from .peer import Peer
from .pieces import Call, Piece, carry
from .registration import Registration
from .routes import Pack, Work, stretches, words
from .staging import PIECE, Staging
from .stats import Counters, Stats
from .transfer import Op, Outcome, Transfer
from .waiting import Waiting

if TYPE_CHECKING:
    from typing_extensions import Self

    from .pieces import Chunk

_log = logging.getLogger("kvplan.engines")


class Engine(Ending, Registration):
    """Carries plans between memory here and memory of peers. All methods may be called from any thread.

    Args:
        max_in_flight: descriptors that may be with the engine at once for one peer, over all transfers; a longer plan
            goes in chunks, in turn with the other transfers to that peer. None: no limit, a plan goes whole.
    """

    session: str  #: name under which peers reach this engine; read it again after `register` and `unregister`
    #: what descriptors and bytes cost here, by which pack="auto" decides; may be set. None: it never packs.
    cost: Cost | None = None

    # Each kind of engine sets these.
    # Whether nothing is read or written any more once a call has failed.
    _stops_on_failure: ClassVar[bool] = False
    # Whether it delivers to a peer in order, even after a failure: then a later success settles earlier failures.
    _in_order: bool = False
    # For how many seconds the descriptors of a failed call are counted as still in flight.
    _settle_s: ClassVar[float] = 0.0
    # Whether it can send a peer a notice that all has arrived.
    _notifies: ClassVar[bool] = False
    # What messages say of a failed transfer that is not settled.
    _unsettled: str = "The engine may still read and write its pages."
    # What messages say of a cancelled transfer that is not settled.
    _going_on: str = "The engine is still processing the descriptors it was given: it may read and write its pages."

    def __init__(self, *, max_in_flight: int | None = None) -> None:
        if max_in_flight is not None and max_in_flight < 1:
            raise ValueError(f"max_in_flight is {max_in_flight}; it must be at least 1")
        super().__init__()
        self.max_in_flight = max_in_flight
        self._gone = False  # nothing left to close
        self._transfers: set[Transfer] = set()  # not ended, or with a call at work; no fences
        self._unsettled_transfers = Unsettled()
        self._lanes = Lanes(self._lock, self._carry, lambda: self.max_in_flight, f"kvplan-{type(self).__name__}")
        self._fences = Fences(self)
        self._waiting = Waiting(self)
        self._counters = Counters()
        self._observers: list[Callable[[Transfer], object]] = []
        # What is to be called once the lock is free: callbacks, log lines.
        self._events: collections.deque[Callable[[], object]] = collections.deque()
        self._declared: dict[str, Peer] = {}
        self._stagings: list[Staging] = []
        self._notices = notices.Notices(self._receive_notices)

    # ---- what a kind of engine supplies, beside `_register` and `_unregister`

    @abc.abstractmethod
    def _move(self, session: str, chunk: Plan, op: Op) -> Outcome:
        """Write or read one checked chunk, and block until all of it is there or it has failed."""

    @abc.abstractmethod
    def _shut_down(self, spans: Spans) -> None:
        """Unregister what is left, and let the engine go. Called once, with nothing under way."""

    def _check_session(self, session: str) -> None:
        """Refuse, by ValueError, what is no session of this kind of engine."""
        check_text(session)

    def _peer_name(self, session: str) -> str:
        """What a peer is called in messages and counts: the same for all sessions of one peer."""
        return session

    def _key_of(self, session: str) -> str:
        """What counts as one peer: its queue, and its transfers that are not settled."""
        return self._peer_name(session)

    def _fence(self, session: str, op: Op) -> Plan | None:
        """One descriptor between words of the two engines, where `_in_order`; None where the session names none."""
        return None

    def _tell(self, session: str, notice: bytes) -> None:
        """Send a notice; only where `_notifies`."""
        raise NotImplementedError

    def _receive_notices(self) -> list[tuple[str, bytes]]:
        """Notices that have come since the last call, each with its sender's name; only where `_notifies`."""
        raise NotImplementedError

    def _chunks(self, plan: Plan) -> Iterator[Plan]:
        limit = self.max_in_flight
        return iter([plan]) if limit is None or len(plan) <= limit else plan.chunks(limit)

    # ---- transfers

    def submit(
        self,
        plan: Plan,
        peer: Peer | str,
        *,
        op: Op = "write",
        notify: bytes | None = None,
        label: str | None = None,
        queue_behind: bool = False,
        staging: Staging | None = None,
        pack: Pack = "auto",
    ) -> Transfer:
        """Check every descriptor, then carry `plan` out in the background.

        The table is copied first: a change of `plan.table` after this call changes nothing that is sent. A call that
        raises has no effect.

        Args:
            plan: what goes where. For op="write", the source must be registered with this engine, and the destination
                must be in the peer's layout.
            peer: a `Peer`, or the session alone, for a plan that knows the peer's layout.
            op: "write" pushes this side's pages to the peer; "read" pulls: the plan's source is declared by the peer
                and its destination registered here.
            notify: 1 to 1024 bytes, sent to the peer once all has arrived. The peer waits for them with `wait_notice`.
            label: what the transfer belongs to, for messages and logs; mostly the request's id.
            queue_behind: what to do if the plan conflicts with an unsettled transfer of this engine. True: start when
                that transfer has settled. False: raise PlanError. Two transfers conflict if one writes a byte, here or
                at the peer, that the other reads or writes.
            staging: memory through which small descriptors go as few large ones; see docs/packing.md. The first use
                registers it with this engine, as `register` does.
            pack: what goes by way of `staging`. "auto": what is faster so, by `cost`. "always": all; "never": nothing.

        Raises:
            PlanError: a descriptor is empty, or leaves what is registered; or the plan conflicts with an unsettled
                transfer.
            ValueError: an argument is out of its range, or the engine has no notices; or the staging belongs to another
                engine, or cannot hold bytes of these pages.
            RuntimeError: the engine is closed, or was made in another process, or no thread can be started; or it
                refused to register the staging.
        """
        self._lanes.check_process()
        if op not in ("write", "read"):
            raise ValueError(f"op must be 'write' or 'read', not {op!r}")
        if label is not None and not isinstance(label, str):
            raise ValueError(f"label must be a string, not {shown(label)}")
        if notify is not None:
            self._check_notice(notify)
        if pack not in ("auto", "never", "always"):
            raise ValueError(f"pack must be 'auto', 'never' or 'always', not {shown(pack)}")
        if staging is not None and not isinstance(staging, Staging):
            raise TypeError(f"staging must be a Staging, not a {type(staging).__name__}")
        if pack == "always" and staging is None:
            raise ValueError("pack='always' needs staging=Staging(nbytes)")
        target = self._peer(plan, peer, op)
        plan = _copied(plan)
        spans: Spans | None = None
        work: Work | None = None
        while True:
            with self._lock:
                now = self._usable_spans()
                if now is spans:  # what was checked against still holds
                    transfer = Transfer(self, plan, target.session, op, notify, label, work)
                    met = self._unsettled_transfers.collisions(plan, transfer._key, op)
                    if not met or queue_behind:
                        self._enqueue(transfer, plan, set(met))
                        break
                else:
                    met = {}
                    spans = now
            if not met:
                source, destination = (now, target._spans) if op == "write" else (target._spans, now)
                check(plan, source, destination, op)
                if work is None and staging is not None:
                    work = self._packing(plan, target, op, staging, pack)
            elif not any([other.settle(0) for other in met]):  # settled meanwhile, perhaps, and nobody has asked
                other, where = next(iter(met.items()))
                more = f" (and {len(met) - 1} more)" if len(met) > 1 else ""
                raise PlanError(
                    f"the plan for {clipped(transfer._peer_name)} conflicts with the {other._named()}{more}, which has "
                    f"{other._end} and is not settled: {where}. settle() it first, or submit with queue_behind=True"
                )
        self._run_callbacks()
        return transfer

    def _packing(self, plan: Plan, peer: Peer, op: Op, staging: Staging, pack: Pack) -> Work | None:
        """What goes by way of staging, and what does not; None where nothing does. The plan has been checked."""
        parts = stretches(plan, op, pack, self.cost, staging.piece)
        if not any(part.packed for part in parts):
            return None
        for segment in plan.segments:
            if any(part.packed and segment.start <= part.start < segment.stop for part in parts):
                staging._check_reach(segment, op)
        # Two pieces, of one transfer or of two, together keep to the limit of descriptors with the engine.
        most = None if self.max_in_flight is None else max(1, self.max_in_flight // CALLS_PER_PEER)
        work = Work(plan, op, staging, parts, peer._spans, self._chunks, most)
        staging._attach(self)
        return work

    def explain_routes(self, plan: Plan, *, op: Op = "write", staging: Staging | None = None) -> list[str]:
        """Lines that say what pack="auto" would send by way of staging, and what that saves; see `Plan.explain`."""
        piece = PIECE if staging is None else staging.piece
        return words(stretches(plan, op, "auto", self.cost, piece), self.cost, piece, staging is not None)

    def _enqueue(self, transfer: Transfer, plan: Plan, behind: set[Transfer]) -> None:
        """Queue what has been checked. Called with the lock held; a RuntimeError leaves nothing behind."""
        if transfer.done():  # it is empty
            self._close_transfer(transfer)
            return
        if behind:
            self._waiting.put(transfer, plan, behind)
        else:
            self._lanes.put(transfer._key, transfer)
        self._transfers.add(transfer)

    def _make_fence(self, plan: Plan, session: str, op: Op) -> Transfer:
        fence = Transfer(self, plan, session, op)
        fence._is_fence = True
        return fence

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

    def _carry(self, transfer: Transfer, chunk: Chunk) -> float:
        """Do one call of the engine, in a thread of its lane; for how many seconds its descriptors count on."""
        told = False
        with _nvtx(transfer):
            call = carry(transfer, chunk, self._move) if isinstance(chunk, Piece) else self._call(transfer, chunk)
            outcome, cause = call.outcome, call.cause
            last = transfer._next is None and len(transfer._jobs) == 1
            if outcome is not None and outcome.code == 0 and last and transfer._notify and not transfer.done():
                try:
                    self._tell(transfer.peer, transfer._notify)
                    told = True
                except Exception as error:
                    cause = RuntimeError(f"all arrived, but the peer could not be told: {error}")
        with self._lock:
            transfer._call_returned(chunk, outcome, cause, told)
            if self._in_order and call.begun is not None:
                self._fences.ended(transfer, call.begun)
        self._run_callbacks()
        # The engine may still hold the descriptors of a failed call: they go on counting against the limit.
        return self._settle_s if outcome is not None and outcome.code != 0 and outcome.started else 0.0

    def _call(self, transfer: Transfer, chunk: Plan) -> Call:
        begun = time.monotonic()
        try:
            return Call(self._move(transfer.peer, chunk, transfer.op) if len(chunk) else Outcome(), None, begun)
        except Exception as error:  # its frames hold the engine's objects
            return Call(Outcome(None), error.with_traceback(None), begun)

    def _under_way(self) -> int:
        return sum(transfer._busy or not transfer.done() for transfer in self._transfers)

    # ---- what transfers report, with the lock held

    def _close_transfer(self, transfer: Transfer) -> None:
        """It has ended: nothing more of it is started."""
        if transfer._is_fence:
            return
        self._lanes.remove(transfer._key, transfer)
        self._waiting.remove(transfer)
        self._counters.ended(transfer)
        if transfer._end == "failed":
            message = str(transfer._error())
            self._events.append(functools.partial(_log.warning, "%s", message))
        for observer in self._observers:
            self._events.append(functools.partial(transfer._call, observer))

    def _update_settled(self, transfer: Transfer) -> None:
        """It has ended, or a call for it has, or it is settled: keep account of what may still be moving."""
        if transfer._is_fence:
            return
        if not transfer._busy:
            self._transfers.discard(transfer)
        if not transfer._is_settled:
            self._unsettled_transfers.add(transfer)
            self._waiting.watch()
            return
        if transfer.times.settled is None:
            transfer.times.settled = time.monotonic()
        transfer._free_slots()
        self._unsettled_transfers.discard(transfer)
        self._waiting.settled(transfer)

    def _run_callbacks(self) -> None:
        """Call what has been put off until the lock is free. Called without it."""
        while self._events:
            with contextlib.suppress(IndexError):  # another thread was quicker
                self._events.popleft()()

    def _prove_settled(self, transfer: Transfer, deadline: float) -> str | None:
        """Show that nothing of a failed transfer is under way any more; else why that is not known."""
        return self._fences.settle(transfer, deadline) if self._in_order else self._unsettled

    def _where(self, transfer: Transfer) -> str:
        """Between which regions the first descriptor goes that did not arrive, for messages."""
        chunk = transfer._last.plan if isinstance(transfer._last, Piece) else transfer._last
        if chunk is None or not len(chunk):
            return ""
        src, dst = (int(word) % (1 << 64) for word in chunk.table[:2, 0])
        segment = chunk.segments[0]
        names = []
        for layout, address, memory in (
            (chunk.src_layout, src, segment.src_memory),
            (chunk.dst_layout, dst, segment.dst_memory),
        ):
            region = None if layout is None else nearest([layout], address, memory)
            names.append(f"{address:#x}" if region is None else f"{clipped(str(region))}, {memory} {address:#x}")
        return f"; the first descriptor not confirmed goes from {names[0]} to {names[1]}"

    # ---- counts

    def stats(self) -> Stats:
        """Bytes, descriptors and transfers so far and now, of each peer and in all."""
        with self._lock:
            return self._counters.stats(self._transfers, self._unsettled_transfers)

    def add_observer(self, observer: Callable[[Transfer], object]) -> None:
        """Have `observer(transfer)` called with every transfer that ends from now on; see `add_done_callback`."""
        with self._lock:
            self._observers.append(observer)

    def remove_observer(self, observer: Callable[[Transfer], object]) -> None:
        """Undo `add_observer`. Raises ValueError where it is none."""
        with self._lock:
            self._observers.remove(observer)

    # ---- notices

    def wait_notice(self, notice: bytes, timeout: float | None) -> None:
        """Return once a peer's transfer with this `notify` has arrived here. Each is waited for once.

        What nobody waits for is kept, but of more than 65,536 different ones the oldest are forgotten.

        Args:
            timeout: seconds; None or infinity: no limit.

        Raises:
            TimeoutError: it did not come in time.
            ValueError: it is not 1 to 1024 bytes, `timeout` is negative or NaN, or the engine has no notices.
            RuntimeError: the engine is closed.
        """
        self._check_notice(notice)
        limit = seconds(timeout, "timeout")
        self._usable_spans()
        self._notices.wait(notice, math.inf if limit is None else limit)

    def _check_notice(self, notice: bytes) -> None:
        if not self._notifies:
            raise ValueError(f"{type(self).__name__} cannot notify; tell the peer through a channel of your own")
        notices.check(notice)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        name = clipped(self._peer_name(self.session)) if hasattr(self, "session") else "not initialized"
        return f"{type(self).__name__}('{name}')"


def _copied(plan: Plan) -> Plan:
    """A plan with a table of its own, whose form is checked. Raises PlanError."""
    table = plan.table
    check_form(table)
    copy = table.clone(memory_format=torch.contiguous_format)
    return Plan(copy, plan.segments, plan.src_layout, plan.dst_layout)


_HAS_CUDA = torch.version.cuda is not None and torch.cuda.device_count() > 0


@contextlib.contextmanager
def _nvtx(transfer: Transfer) -> Iterator[None]:
    """A range in profiles around a call, where there is CUDA."""
    if not _HAS_CUDA:
        yield
        return
    torch.cuda.nvtx.range_push(f"kvplan {transfer._named()}")
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()
