"""NVIDIA's NIXL, over UCX or another of its back ends."""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import hashlib
import importlib
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .base import Engine
from .check import Span, Spans
from .transfer import Op, Outcome

if TYPE_CHECKING:
    from ..layout import Memory
    from ..planning import Plan

# A descriptor takes NIXL about 6 µs to post over TCP, and it posts for one peer at a time: longer plans go in chunks.
_LIMIT = 16_384
_MAX_SESSION = 16 << 20  # characters; 60 regions take about 10,000
_KEPT = 1 << 18  # characters of a session whose parse is kept
_SESSION = re.compile(r"nixl:([\w.-]{1,64}):([0-9a-f]{32}):([\w+/]*={0,2})", re.ASCII)

_INSTALL = (
    "pip install 'kvplan[nixl]' (CUDA 12) or 'kvplan[nixl-cuda13]'; without a GPU: pip install --no-deps nixl-cu12"
)
_NO_RDMA = (
    "this machine has no RDMA device, and UCX's module for them ends such a process with a segmentation fault when it "
    "exits: set UCX_MODULES=^ib in its environment, or pass ucx={'UCX_MODULES': '^ib'} before anything has loaded UCX"
)


class NixlEngine(Engine):
    """Carries plans with a `nixl_agent`: one NIXL transfer for every segment of a plan, all posted, then all awaited.

    `session` holds all that a peer needs, the agent's metadata; so it changes with every `register` and `unregister`,
    and grows with the number of regions. `unregister` puts a new agent in place of the old one, which ends all
    connections: over TCP peers could otherwise go on writing to memory that is not registered any more, and end this
    process where it has been freed.

    Descriptors are handed over as they are. Strided lists and prepared handles save 0.5 ms of the 50 ms that 10,000
    descriptors take over TCP, and would have to be kept for every peer.

    Args:
        timeout: seconds after which a call to a peer that does not answer is given up. NIXL has no such limit.
        backend: NIXL's plugin.
        max_in_flight: descriptors with the engine at once for one peer.
        ucx: variables for UCX, put in this process's environment, the only place where UCX looks for them: for example
            {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"} on a machine without RDMA.

    Raises:
        ImportError: the package is missing or does not load; the message says what to install.
        RuntimeError: there is no such back end, it did not start, or the process would end with a crash (see the text).
        ValueError: an argument is out of range.
    """

    _notifies = True
    _unsettled = (
        "NIXL lost the connection. It reads no more pages here, but what lay in the socket of a peer that hangs is "
        "written when it no longer does; nothing here can show that it has been. It is over when the peer says so, or "
        "its process has ended."
    )

    def __init__(
        self,
        *,
        timeout: float = 30.0,
        backend: str = "UCX",
        max_in_flight: int = _LIMIT,
        ucx: Mapping[str, str] | None = None,
    ) -> None:
        if not 0 < timeout < 1e6:
            raise ValueError(f"timeout is {timeout}; it must be a number of seconds above 0")
        super().__init__(max_in_flight=max_in_flight)
        os.environ.update(ucx or {})
        if backend == "UCX" and not _has_rdma() and not _leaves_out_ib(os.environ.get("UCX_MODULES", "")):
            raise RuntimeError(_NO_RDMA)
        self.timeout, self.backend = timeout, backend
        self._nixl = _load()
        self._agent: Any = None
        self._gate = threading.Condition()  # guards all below
        self._calls = 0  # at work with the agent
        self._renewing = False
        self._peers: dict[str, str] = {}  # agent's name -> the session that is loaded
        self._open: dict[int, tuple[str, list[Any]]] = {}  # calls given up: number -> agent's name, handles under way
        self._opened = 0
        self._start([])

    # ---- the agent

    def _start(self, spans: Sequence[Span]) -> None:
        nixl = self._nixl
        self._name = f"kvplan-{secrets.token_hex(8)}"
        # Without strict locking an agent is not safe to use from several threads.
        config = nixl.nixl_agent_config(backends=[], sync_mode=nixl.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT)
        self._agent = nixl.nixl_agent(self._name, config)
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
        metadata = self._agent.get_agent_metadata()
        digest = hashlib.sha256(metadata).hexdigest()[:32]
        self.session = f"nixl:{self._name}:{digest}:{base64.b64encode(metadata).decode()}"

    def _renew(self, spans: Sequence[Span]) -> None:
        """Put a new agent that knows `spans` alone in place of the old one: no peer reaches that any more."""
        with self._gate:
            self._renewing = True
            self._gate.wait_for(lambda: self._calls == 0)
            try:
                self._drop()
                self._start(spans)
            finally:
                self._renewing = False
                self._gate.notify_all()

    def _drop(self) -> None:
        # Only when its last reference goes does the agent end; every handle holds one.
        for _, handles in self._open.values():
            _release(handles)
        self._open.clear()
        self._peers.clear()
        self._agent = None

    def _register(self, spans: Sequence[Span]) -> None:
        try:
            self._using(lambda: self._add(spans))
        except Exception as error:
            refusal = f"NIXL did not register {len(spans)} spans of memory, {spans[0]} and on: {error}"
        else:
            return
        self._renew(list(self._spans.all))  # an agent that has refused memory may refuse all else
        raise RuntimeError(refusal)

    def _unregister(self, spans: Sequence[Span]) -> None:
        if spans:
            self._renew(list(self._spans.all))

    def _shut_down(self, spans: Spans) -> None:
        with self._gate:
            self._drop()

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
        _parse(session)

    def _told(self, session: str) -> str:
        return session.split(":")[1] if session.startswith("nixl:") else session

    def _connect(self, session: str) -> str:
        """Name of the peer's agent, which is known to ours when this returns."""
        name, metadata = _parse(session)
        with self._gate:
            if self._peers.get(name) == session:
                return name
            # Half of what does not load stays loaded, and spoils this name: but no peer can tell another's name.
            loaded = self._agent.add_remote_agent(metadata)
            if loaded != name.encode():
                self._forget(loaded)
                raise RuntimeError(f"the session of {name} holds the metadata of {loaded!r:.80}")
            self._peers[name] = session
        return name

    def _disconnect(self, name: str) -> None:
        """Forget a peer whose connection failed, so that the next call makes a new one."""
        with self._gate:
            self._forget(name)

    def _forget(self, name: str | bytes) -> None:
        self._peers.pop(name if isinstance(name, str) else name.decode(errors="replace"), None)
        with contextlib.suppress(Exception):  # NIXL may have forgotten it already
            self._agent.remove_remote_agent(name)

    def _tell(self, session: str, notice: bytes) -> None:
        self._using(lambda: self._agent.send_notif(self._connect(session), notice))

    def _heard(self) -> list[bytes]:
        heard = self._using(lambda: self._agent.get_new_notifs())
        return [notice for notices in heard.values() for notice in notices]

    # ---- transfers

    def _move(self, session: str, chunk: Plan, op: Op) -> Outcome:
        return self._using(lambda: self._transfer(session, chunk, op))

    def _transfer(self, session: str, chunk: Plan, op: Op) -> Outcome:
        handles: list[Any] = []
        try:
            name = self._connect(session)
            for segment in chunk.segments:
                rows = chunk.table.numpy().view(np.uint64)[:, segment.start : segment.stop]
                src, dst = (
                    self._agent.get_xfer_descs(_rows(addresses, rows[2], memory), memory.kind)
                    for addresses, memory in ((rows[0], segment.src_memory), (rows[1], segment.dst_memory))
                )
                here, there = (src, dst) if op == "write" else (dst, src)
                handles.append(self._agent.initialize_xfer(op.upper(), here, there, name))
        except Exception as error:  # nothing has been posted
            _release(handles)
            return Outcome(str(error), started=False)
        try:
            under_way = [handle for handle in handles if self._busy(self._agent.transfer(handle))]
            deadline, pause = time.monotonic() + self.timeout, 2e-5
            while under_way := self._still_under_way(under_way):
                if time.monotonic() >= deadline:
                    return self._give_up(name, handles, under_way)
                time.sleep(pause)
                pause = min(2 * pause, 1e-3)
        except Exception as error:
            _release(handles)
            self._disconnect(name)
            return Outcome(str(error))
        _release(handles)
        return Outcome()

    def _busy(self, state: str) -> bool:
        if state not in ("PROC", "DONE"):
            raise RuntimeError(f"transfer state {state}")
        return state == "PROC"

    def _still_under_way(self, handles: list[Any]) -> list[Any]:
        return [handle for handle in handles if self._busy(self._agent.check_xfer_state(handle))]

    def _give_up(self, name: str, handles: list[Any], under_way: list[Any]) -> Outcome:
        """Keep what is under way: a handle that is released is carried out all the same, but no longer tells."""
        _release([handle for handle in handles if handle not in under_way])
        with self._gate:
            self._opened += 1
            number = self._opened
            self._open[number] = (name, under_way)
        told = f"no answer within {self.timeout:g} s"
        return Outcome(told, finished=lambda: self._using(lambda: self._finished(number)))

    def _finished(self, number: int) -> bool:
        with self._gate:
            if number not in self._open:
                raise RuntimeError(f"NIXL no longer knows of it. {self._unsettled}")
            name, under_way = self._open[number]
            try:
                self._open[number] = (name, left := self._still_under_way(under_way))
            except Exception as error:
                told = f"NIXL says {error}. {self._unsettled}"
                _release(under_way)
                left = []
            else:
                told = ""
            if not left:
                _release(self._open.pop(number)[1] or under_way)
        if told:
            self._disconnect(name)
            raise RuntimeError(told)
        return not left


def _rows(addresses: np.ndarray, nbytes: np.ndarray, memory: Memory) -> np.ndarray:
    """NIXL's rows, uint64 [N, 3]: address, bytes, device."""
    rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, memory.device
    return rows


def _release(handles: list[Any]) -> None:
    """Let handles go. They must not be used any more: NIXL may crash on one that was released."""
    for handle in handles:
        with contextlib.suppress(Exception):  # one that cannot be stopped is released with the agent
            handle.release()
    handles.clear()


def _parse(session: str) -> tuple[str, bytes]:
    """(agent's name, metadata) of a session; ValueError where it is none, or not whole."""
    if len(session) > _MAX_SESSION:
        raise ValueError(f"a NIXL session of {len(session)} characters; at most {_MAX_SESSION} are taken from a peer")
    return _parsed(session) if len(session) <= _KEPT else _parsed.__wrapped__(session)


@functools.lru_cache(256)
def _parsed(session: str) -> tuple[str, bytes]:
    match = _SESSION.fullmatch(session)
    if not match:
        raise ValueError(f"{session!r:.80} is no session of a NixlEngine")
    name, digest, text = match.groups()
    try:
        metadata = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the session of NIXL agent {name} is damaged: {error}") from None
    if hashlib.sha256(metadata).hexdigest()[:32] != digest:
        raise ValueError(f"the session of NIXL agent {name} is damaged: its metadata is not what was sent")
    return name, metadata


def _load() -> Any:
    """NIXL's Python API; ImportError says what to install."""
    reasons = []
    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("nixl"):
                reasons.append(f"{package}: {error}")
        except ImportError as error:
            reasons.append(f"{package}: {error}")
    if reasons:
        raise ImportError(f"NIXL does not load ({'; '.join(reasons)}). {_INSTALL}")
    raise ImportError(f"NixlEngine needs NIXL: {_INSTALL}")


def _has_rdma() -> bool:
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def _leaves_out_ib(modules: str) -> bool:
    """Whether UCX does not load its module for InfiniBand, given its variable UCX_MODULES."""
    names = modules.lstrip("^").split(",")
    return "ib" in names if modules.startswith("^") else bool(modules) and "ib" not in names and "all" not in names
