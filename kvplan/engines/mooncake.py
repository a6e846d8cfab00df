"""Mooncake's transfer engine, in peer-to-peer mode (no metadata server)."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..errors import clipped, shown
from ..layout import Memory
from ..planning import Plan, Segment
from .base import Engine
from .check import Span, Spans, check_text
from .costs import COSTS
from .transfer import Op, Outcome

# Over TCP Mooncake 0.3.13 queues 1024 descriptors a peer and lets 1024 more wait; any beyond fail, and with them the
# path to that peer, for seconds or for good.
_TCP_LIMIT = 1024

_OTHER_LIMIT = 8192

# Name or address, port; and the address of the peer's fence word (see fences.py), where it has one.
_SESSION = re.compile(r"((?:[\w.-]+|\[[\w.:%-]+\]):(\d{1,5}))(?:;fence=0x([0-9a-f]{1,16}))?", re.ASCII)

_FENCE_BYTES = 4096  # a page of its own, of which three words are used
_SOURCE, _TARGET, _SCRATCH = 0, 8, 16  # bytes into it

_INSTALL = (
    "pip install 'kvplan[mooncake]' (CUDA 12), 'kvplan[mooncake-cuda13]' (CUDA 13) or 'kvplan[mooncake-cpu]' (no GPU)"
)


class MooncakeEngine(Engine):
    """Carries plans with `mooncake.engine.TransferEngine`.

    Its calls keep a core busy while they wait, so there are at most two at a time for one peer. A version that takes
    arrays (0.3.14 and later) is given the plan's own, others lists. The interpreter's lock is free while bytes move.

    Over TCP `session` is "host:port;fence=0x...", with the address of a word of this engine: through it a peer shows
    that a failed transfer is over, without touching a page (`Transfer.settle`). A session without it, "host:port", is
    taken as well; then only a later transfer that arrives can show that.

    Args:
        hostname: address of this machine that peers can reach, without a port: the engine chooses that. (It listens on
            all addresses.)
        protocol: "tcp" or "rdma". Mooncake takes any other word too, and may quietly use TCP; so others are refused.
        device: names of RDMA devices, separated by commas; "" lets the engine choose.
        max_in_flight: descriptors with the engine at once for one peer. Default 1024 over TCP, the most that it bears;
            else 8192, so that a transfer that is cancelled stops soon.
        calls: "sync", or "async" for the engine's asynchronous calls, one wait for each: as fast over TCP.

    Raises:
        ImportError: the package, or a library that it needs, is missing; the message says what to install.
        RuntimeError: the engine did not initialize.
        ValueError: hostname has a port, or protocol, max_in_flight or calls is none that there is.
    """

    # A call that fails leaves the rest of its descriptors in the engine's queue for that peer. They are sent all the
    # same, in order, with whatever bytes the source pages hold by then: within a second if all is well; to a peer that
    # hangs, or refuses (its memory is not registered), whenever it no longer does, were it minutes later. Closing the
    # engine drops the queue, but not what lies in the socket of a peer that hangs. (All seen over TCP.)
    # What waits behind a full queue expires after 1 s: so with 2 s between failures the queue never overflows.
    _settle_s = 2.0
    _unsettled = (
        "Mooncake may still read and write its pages. This usually lasts less than 2 s. If the peer hangs or rejects "
        "writes, queued data is sent once it recovers. Over TCP, settle() detects the end. Otherwise wait until the "
        "peer's process has exited."
    )

    def __init__(
        self,
        hostname: str = "127.0.0.1",
        protocol: str = "tcp",
        device: str = "",
        *,
        max_in_flight: int | None = None,
        calls: str = "sync",
    ) -> None:
        if protocol not in ("tcp", "rdma"):
            raise ValueError(f"protocol is {protocol!r}; it must be 'tcp' or 'rdma'")
        _check_hostname(hostname)
        tcp = protocol == "tcp"
        limit = (_TCP_LIMIT if tcp else _OTHER_LIMIT) if max_in_flight is None else max_in_flight
        super().__init__(max_in_flight=limit)
        if tcp and limit > _TCP_LIMIT:
            raise ValueError(f"max_in_flight is {limit}; over TCP Mooncake fails with more than {_TCP_LIMIT}")
        if calls not in ("sync", "async"):
            raise ValueError(f"calls must be 'sync' or 'async', not {calls!r}")
        self.cost = COSTS["mooncake", protocol]
        self._in_order = tcp  # of RDMA, with its many queue pairs, this is not known
        self._calls = calls
        engine = _transfer_engine()
        code = engine.initialize(hostname, "P2PHANDSHAKE", protocol, device)
        if code != 0:
            raise RuntimeError(f"Mooncake did not initialize ({hostname=}, {protocol=}, {device=}): it returned {code}")
        if protocol == "rdma" and not _has_rdma(engine):
            raise RuntimeError(
                f"Mooncake found no RDMA device ({device=}) and would quietly use TCP: say protocol='tcp'"
            )
        host = f"[{hostname}]" if ":" in hostname and not hostname.startswith("[") else hostname
        self.session = f"{host}:{engine.get_rpc_port()}"
        self._engine: Any = engine  # only ever used between initialize and close: it crashes outside
        self._fence_page = mmap.mmap(-1, _FENCE_BYTES)  # stays for as long as this object does
        self._fence_at = np.frombuffer(self._fence_page, np.uint8).ctypes.data
        if self._in_order:
            code = engine.register_memory(self._fence_at, _FENCE_BYTES)
            if code != 0:
                raise RuntimeError(f"Mooncake did not register {_FENCE_BYTES} bytes for fences: {code}")
            self.session += f";fence={self._fence_at + _TARGET:#x}"
        self._arrays = hasattr(engine, f"batch_transfer_{calls}_write_arrays")  # 0.3.14 and later

    def _check_session(self, session: str) -> None:
        check_text(session)
        match = _SESSION.fullmatch(session)
        if not match or not 0 < int(match[2]) < 1 << 16:
            raise ValueError(f"{session!r:.80} is no session of a MooncakeEngine, which is host:port;fence=0x...")

    def _peer_name(self, session: str) -> str:
        return session.partition(";")[0]

    def _fence(self, session: str, op: Op) -> Plan | None:
        match = _SESSION.fullmatch(session)
        if match is None or match[3] is None:
            return None
        words = (
            (self._fence_at + _SOURCE, int(match[3], 16))
            if op == "write"
            else (int(match[3], 16), self._fence_at + _SCRATCH)
        )
        table = torch.from_numpy(np.array([[words[0]], [words[1]], [8]], np.uint64).view(np.int64))
        return Plan(table, [Segment(Memory.DRAM, Memory.DRAM, 0, 1)])

    def _register(self, spans: Sequence[Span]) -> None:
        done: list[Span] = []
        for memory, base, nbytes in spans:
            code = self._engine.register_memory(base, nbytes)
            if code != 0:
                self._unregister(done)
                why = " (a part of it is registered already)" if code == -7 else ""
                raise RuntimeError(f"Mooncake did not register {self._named_span((memory, base, nbytes))}: {code}{why}")
            done.append((memory, base, nbytes))

    def _unregister(self, spans: Sequence[Span]) -> None:
        self._unregister_each(spans, self._engine.unregister_memory, "Mooncake")

    def _move(self, session: str, chunk: Plan, op: Op) -> Outcome:
        src, dst, nbytes = chunk.table.numpy().view(np.uint64)
        columns = (src, dst, nbytes) if op == "write" else (dst, src, nbytes)  # memory here, memory there
        call = getattr(self._engine, f"batch_transfer_{self._calls}_{op}{'_arrays' if self._arrays else ''}")
        # Lists where they must be: given arrays, those versions take them number by number, several times slower.
        answer = call(self._peer_name(session), *(columns if self._arrays else [column.tolist() for column in columns]))
        if self._calls == "sync":
            return Outcome(answer)
        # The number of a batch, or 0 where none began. Its status may be asked for once: Mooncake crashes on a number
        # that it does not know, or no longer.
        if answer == 0:
            return Outcome("no batch")
        return Outcome(self._engine.get_batch_transfer_status([answer]))

    def _shut_down(self, spans: Spans) -> None:
        # Peers learn of what is unregistered; the engine itself goes when its last reference does.
        for _, base, _ in spans.all:
            self._engine.unregister_memory(base)
        if self._in_order:
            self._engine.unregister_memory(self._fence_at)
        self._engine = None


def _check_hostname(hostname: str) -> None:
    """ValueError where it has a port: that is taken for a name that nobody has, or for Mooncake's own port."""
    if not isinstance(hostname, str) or not hostname:
        raise ValueError(f"hostname must be an address or a name, not {shown(hostname)}")
    bare, colon, port = hostname.rpartition(":")
    if colon and port.isdigit() and (":" not in bare or bare.endswith("]")):
        raise ValueError(
            f"hostname is {clipped(hostname)!r}, with a port: say {clipped(bare)!r}; Mooncake chooses the port"
        )


def _transfer_engine() -> Any:
    """A new, not yet initialized engine; ImportError says what to install."""
    try:
        from mooncake.engine import TransferEngine
    except ModuleNotFoundError as error:
        raise ImportError(f"MooncakeEngine needs Mooncake's transfer engine: {_INSTALL}") from error
    except ImportError as error:
        if "libibverbs" in str(error):
            advice = "apt-get install libibverbs1"
        elif "libcuda" in str(error):
            advice = f"the installed build needs CUDA, of its own version; install the one that fits: {_INSTALL}"
        else:
            advice = f"its builds: {_INSTALL}"
        raise ImportError(f"Mooncake's transfer engine does not load: {error}. {advice}") from error
    return TransferEngine()


def _has_rdma(engine: Any) -> bool:
    """Whether the engine found a device; True where it cannot tell."""
    try:
        topology = json.loads(engine.get_local_topology())
    except (AttributeError, TypeError, ValueError):
        return True
    return any(devices for lists in topology.values() for devices in lists)
