"""NVIDIA's NIXL, over UCX or another of its back ends."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import limits, nixl_load, nixl_session
from .base import Engine
from .check import Span, Spans
from .costs import COSTS
from .nixl_peers import Loaded, Peers
from .nixl_rows import refusal, sides
from .transfer import Op, Outcome

if TYPE_CHECKING:
    from ..layout import Layout
    from ..planning import Plan

# A descriptor takes NIXL about 6 µs to post over TCP, and it posts for one peer at a time: longer plans go in chunks.
_LIMIT = 16_384
# Seconds between two looks for notices, so that none pile up in NIXL: where there were none, and where there were some.
_LOOK_S, _LOOK_AGAIN_S = 0.1, 0.01


class _GivenUp:
    """A call that was given up: its handles that are under way, until it is known what came of it."""

    def __init__(self, peer: Loaded, handles: list[Any]) -> None:
        self.peer, self.handles = peer, handles
        self.answer: bool | str | None = None  # all has arrived; or why that will not be known


class _Refused(RuntimeError):
    """NIXL refused memory."""

    def __init__(self, message: str, spans: Sequence[Span]) -> None:
        super().__init__(message)
        self.spans = spans


class NixlEngine(Engine):
    """Carries plans with a `nixl_agent`: one NIXL transfer for every segment of a plan, all posted, then all awaited.

    `session` holds all that a peer needs, the agent's metadata; so it changes with every `register` and `unregister`,
    and grows with the number of regions. `unregister` puts a new agent in place of the old one, which ends all
    connections: over TCP peers could otherwise go on writing to memory that is not registered any more, and end this
    process where it has been freed.

    Descriptors are handed over as they are. Strided lists and prepared handles save 0.5 ms of the 50 ms that 10,000
    descriptors take over TCP, and would have to be kept for every peer.

    What a peer sends is checked before NIXL or UCX reads it (`nixl_metadata`, `nixl_address`). Each session is an agent
    of its own to NIXL: what a peer says can spoil its own session alone.

    Args:
        timeout: seconds after which a call to a peer that does not answer is given up; None for no limit.
        backend: NIXL's plugin.
        max_in_flight: descriptors with the engine at once for one peer.
        ucx: variables for UCX, put in this process's environment, the only place where UCX looks for them: for example
            {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"} on a machine without RDMA.

    Raises:
        ImportError: the package is missing or does not load; the message says what to install.
        RuntimeError: there is no such back end, it did not start, or UCX would crash when the process exits, because
            there is no RDMA device: set UCX_MODULES=^ib.
        ValueError: an argument is out of range.
    """

    _notifies = True
    _unsettled = (
        "The connection was lost. NIXL reads no more pages here. Data already in the peer's socket may be written when "
        "the peer resumes, which this side cannot detect. It is over when the peer says so, or its process has ended."
    )

    def __init__(
        self,
        *,
        timeout: float | None = 30.0,
        backend: str = "UCX",
        max_in_flight: int = _LIMIT,
        ucx: Mapping[str, str] | None = None,
    ) -> None:
        self.timeout = limits.seconds(timeout, "timeout")
        if self.timeout == 0:
            raise ValueError("timeout is 0; it must be a number of seconds above 0, or None for no limit")
        super().__init__(max_in_flight=max_in_flight)
        os.environ.update(ucx or {})
        if backend == "UCX":
            nixl_load.check_ucx()
        self.backend = backend
        self.cost = COSTS.get(("nixl", nixl_load.transport(backend)))
        self._nixl = nixl_load.load()
        self._agent: Any = None
        self._gate = threading.Condition()  # guards all below
        self._calls = 0  # at work with the agent
        self._renewing = False
        self._peers = Peers(None, self._gate)
        self._open: set[_GivenUp] = set()
        self._late: dict[str, list[bytes]] = {}  # notices that an agent had when it ended
        self._start([])
        stop = threading.Event()
        looks = threading.Thread(
            target=_look_for_notices, args=(weakref.ref(self), stop), name=f"{self._name}-notices", daemon=True
        )
        # Also when the interpreter ends: a thread that is in NIXL then would end the process with an abort.
        self._stop_looking = weakref.finalize(self, _end, looks, stop)
        looks.start()

    # ---- the agent

    def _start(self, spans: Sequence[Span]) -> None:
        nixl = self._nixl
        self._name = f"kvplan-{secrets.token_hex(8)}"
        # Without strict locking an agent is not safe to use from several threads.
        config = nixl.nixl_agent_config(backends=[], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent = nixl.nixl_agent(self._name, config)
        self._peers = Peers(self._agent, self._gate)
        if self.backend not in self._agent.get_plugin_list():
            raise RuntimeError(f"NIXL has no back end {self.backend!r}, but {self._agent.get_plugin_list()}")
        try:
            self._agent.create_backend(self.backend)
        except Exception as error:
            raise RuntimeError(f"NIXL's back end {self.backend} did not start: {error}") from None
        self._add(spans)

    def _add(self, spans: Sequence[Span]) -> None:
        rows: dict[str, list[tuple[int, int, int, str]]] = {}
        for memory, base, nbytes in spans:
            rows.setdefault(memory.kind, []).append((base, nbytes, memory.device, ""))
        for kind, kind_rows in rows.items():
            self._agent.register_memory(kind_rows, kind)
        session = nixl_session.session_of(self._name, self._agent.get_agent_metadata())
        try:
            self._own = nixl_session.parse(session, self.backend)
        except ValueError as error:
            raise RuntimeError(f"no peer would take the session of this engine: {error}") from None
        self.session = session

    def _renew(self, spans: Sequence[Span]) -> None:
        """Put a new agent that knows `spans` alone in place of the old one: no peer reaches that any more."""
        with self._gate:
            self._renewing = True
            try:
                self._gate.wait_for(lambda: self._calls == 0)
                with contextlib.suppress(Exception):  # where the last agent did not even start
                    for sender, heard in self._new_notices().items():
                        self._late.setdefault(sender, []).extend(heard)
                self._drop()
                self._start(spans)
            finally:
                self._renewing = False
                self._gate.notify_all()

    def _drop(self) -> None:
        # Only when its last reference goes does the agent end; every handle holds one.
        for call in self._open:
            call.answer = f"NIXL no longer knows of it. {self._unsettled}"
            _release(call.handles)
        self._open.clear()
        self._peers = Peers(None, self._gate)
        self._agent = None

    def register(self, layout: Layout) -> None:
        try:
            super().register(layout)
        except _Refused as error:
            names = [
                f"region {r.name!r} of layer {r.layer}"
                for r in layout.regions
                if any(r.memory == memory and base <= r.base < base + nbytes for memory, base, nbytes in error.spans)
            ]
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise RuntimeError(f"{error}. They hold {', '.join(names[:3])}{more}") from None

    register.__doc__ = Engine.register.__doc__

    def _register(self, spans: Sequence[Span]) -> None:
        try:
            self._using(lambda: self._add(spans))
        except Exception as error:
            first = ", ".join(f"{memory} {base:#x} to {base + nbytes:#x}" for memory, base, nbytes in spans[:3])
            refusal = _Refused(f"NIXL did not register {len(spans)} spans of memory, {first}: {error}", spans)
        else:
            return
        self._renew(list(self._spans.all))  # an agent that has refused memory may refuse all else
        raise refusal

    def _unregister(self, spans: Sequence[Span]) -> None:
        if spans:
            self._renew(list(self._spans.all))

    def _shut_down(self, spans: Spans) -> None:
        self._stop_looking()
        with self._gate:
            self._gate.wait_for(lambda: self._calls == 0 and not self._renewing)
            self._drop()
            self._gate.notify_all()

    def _using(self, call: Callable[[], Any]) -> Any:
        """Call while the agent stays."""
        with self._gate:
            self._gate.wait_for(lambda: not self._renewing)
            if self._agent is None:
                raise RuntimeError(f"{self!r} is closed")
            self._calls += 1
        try:
            return call()
        finally:
            with self._gate:
                self._calls -= 1
                self._gate.notify_all()

    # ---- peers

    def _check_session(self, session: str) -> None:
        metadata = nixl_session.parse(session, self.backend)
        if metadata.places & self._own.places:  # what it declares would be written here, wherever that is
            raise ValueError(f"the session of {metadata.name} leads to this engine itself")

    def _peer_name(self, session: str) -> str:
        return nixl_session.name_of(session)

    def _key_of(self, session: str) -> str:
        # By its address, which stays when the peer registers more. A session of another process under this name is
        # another peer: what is unsettled there must not stand in the way of this one's transfers.
        address = nixl_session.parse(session, self.backend).address
        return f"{nixl_session.name_of(session)}:{hashlib.sha256(address).hexdigest()[:16]}"

    def _connected(self, session: str) -> contextlib.AbstractContextManager[Loaded]:
        return self._peers.connected(nixl_session.alias_of(session), lambda: nixl_session.parse(session, self.backend))

    # ---- notices

    def _tell(self, session: str, notice: bytes) -> None:
        def send() -> None:
            with self._connected(session) as peer:
                self._agent.send_notif(peer.alias, notice)

        self._using(send)

    def _receive_notices(self) -> list[tuple[str, bytes]]:
        def hear() -> list[tuple[str, bytes]]:
            late, self._late = self._late, {}
            return [(sender, notice) for new in (late, self._new_notices()) for sender in new for notice in new[sender]]

        return self._using(hear)

    def _new_notices(self) -> dict[str, list[bytes]]:
        try:
            return self._agent.get_new_notifs()
        except UnicodeDecodeError:  # a sender whose name is no text; what came with it is lost
            return {}

    # ---- transfers

    def _move(self, session: str, chunk: Plan, op: Op) -> Outcome:
        return self._using(lambda: self._transfer(session, chunk, op))

    def _transfer(self, session: str, chunk: Plan, op: Op) -> Outcome:
        with contextlib.ExitStack() as stack:
            try:
                peer = stack.enter_context(self._connected(session))
            except Exception as error:
                return Outcome(str(error), started=False)
            return self._post(peer, chunk, op)

    def _post(self, peer: Loaded, chunk: Plan, op: Op) -> Outcome:
        handles: list[Any] = []
        for segment in chunk.segments:
            src, dst = sides(chunk, segment)
            here, there = (src, dst) if op == "write" else (dst, src)
            try:
                descs = [self._agent.get_xfer_descs(rows, memory.kind) for rows, memory, _ in (here, there)]
                handles.append(self._agent.initialize_xfer(op.upper(), *descs, peer.alias))
            except Exception as error:  # nothing has been posted
                _release(handles)
                return Outcome(refusal(error, here, there, self._own, peer.metadata), started=False)
        try:
            under_way = [handle for handle in handles if self._busy(self._agent.transfer(handle))]
            deadline, pause = limits.deadline_of(self.timeout), 2e-5
            while under_way := self._still_under_way(under_way):
                if time.monotonic() >= deadline:
                    return self._give_up(peer, handles, under_way)
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        except Exception as error:
            _release(handles)
            self._peers.forget(peer)
            return Outcome(str(error))
        _release(handles)
        return Outcome()

    def _busy(self, state: str) -> bool:
        if state not in ("PROC", "DONE"):
            raise RuntimeError(f"transfer state {state}")
        return state == "PROC"

    def _still_under_way(self, handles: list[Any]) -> list[Any]:
        return [handle for handle in handles if self._busy(self._agent.check_xfer_state(handle))]

    def _give_up(self, peer: Loaded, handles: list[Any], under_way: list[Any]) -> Outcome:
        """Keep what is under way: a handle that is released is carried out all the same, but no longer tells."""
        _release([handle for handle in handles if handle not in under_way])
        call = _GivenUp(peer, under_way)
        with self._gate:
            peer.users += 1
            self._open.add(call)
        return Outcome(f"no answer within {self.timeout:g} s", finished=lambda: self._finished(call))

    def _finished(self, call: _GivenUp) -> bool:
        """Whether all of a call that was given up has arrived. The answer stays, once there is one.

        Raises:
            RuntimeError: that will not be known.
        """
        with self._gate:
            self._gate.wait_for(lambda: not self._renewing)
            if call.answer is None:
                try:
                    call.handles = self._still_under_way(under_way := call.handles)
                    if not call.handles:
                        call.answer = True
                except Exception as error:
                    call.answer = f"NIXL says {error}. {self._unsettled}"
                if call.answer is not None:
                    _release(under_way)
                    self._open.discard(call)
                    call.peer.users -= 1
                if isinstance(call.answer, str):
                    self._peers.forget(call.peer)
            if isinstance(call.answer, str):
                raise RuntimeError(call.answer)
            return call.answer is True


def _look_for_notices(engine: weakref.ref[NixlEngine], stop: threading.Event) -> None:
    """Take notices from NIXL until the engine is closed or gone."""
    pause = _LOOK_S
    while not stop.wait(pause):
        it = engine()
        if it is None:
            return
        try:
            pause = _LOOK_AGAIN_S if it._notices.collect() else _LOOK_S
        except Exception:  # whoever waits for a notice gets the same
            pause = _LOOK_S
        del it


def _end(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    if thread.is_alive() and thread is not threading.current_thread():
        thread.join(10)


def _release(handles: list[Any]) -> None:
    """Let handles go. They must not be used any more: NIXL may crash on one that was released."""
    for handle in handles:
        with contextlib.suppress(Exception):  # one that cannot be stopped is released with the agent
            handle.release()
    handles.clear()
