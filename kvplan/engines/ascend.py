"""Huawei's memfabric_hybrid, for Ascend NPUs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .base import Engine
from .check import Span, Spans
from .transfer import Op, Outcome

if TYPE_CHECKING:
    from ..planning import Plan

_LIMIT = 8192

_INSTALL = "pip install memfabric_hybrid (it needs the Ascend driver and CANN to move anything)"


class AscendEngine(Engine):
    """Carries plans with `memfabric_hybrid.TransferEngine`.

    No NPU has ever run this class. It is written against the signatures and return codes of memfabric_hybrid 1.3.0, and
    tested with a stand-in of the same signatures that copies memory on the CPU and checks every address; the real
    package is only known to load here, and to refuse `initialize` for want of a driver.

    memfabric knows addresses alone, no kinds of memory: host pages and device pages are one list to it. That a
    descriptor lies in the right kind is checked by kvplan, as for every engine.

    Args:
        store_url: of the store through which engines find each other, for example "tcp://10.0.0.1:9000".
        session: name of this engine for its peers, unlike any other's; memfabric recommends "host:port".
        role: "Prefill" or "Decode".
        device: number of the NPU. `Memory.VRAM(device)` is its memory.
        op: a name of `memfabric_hybrid.TransDataOpType`: "SDMA", "DEVICE_RDMA", "HOST_RDMA", ...
        max_in_flight: descriptors with the engine at once for one peer. (8192 is a guess, to end soon when cancelled.)

    Raises:
        ImportError: the package is missing or does not load, or mf_adapter is loaded in this process.
        RuntimeError: the engine did not initialize.
        ValueError: an argument is out of range.
    """

    _unsettled = (
        "memfabric does not say whether it goes on after a failure. It is over when the peer's process, or this one, "
        "has ended."
    )

    def __init__(
        self,
        store_url: str,
        session: str,
        role: str,
        *,
        device: int = 0,
        op: str = "SDMA",
        max_in_flight: int = _LIMIT,
    ) -> None:
        super().__init__(max_in_flight=max_in_flight)
        self._check_session(session)
        if role not in ("Prefill", "Decode"):
            raise ValueError(f"role must be 'Prefill' or 'Decode', not {role!r}")
        module = _load()
        kind = getattr(module.TransDataOpType, op, None)
        if kind is None:
            raise ValueError(f"memfabric_hybrid has no data operation {op!r}")
        engine = module.TransferEngine()
        code = engine.initialize(store_url, session, role, device, kind)
        if code != 0:  # it must not be used any further: after this, registration claims to succeed
            raise RuntimeError(
                f"memfabric did not initialize ({store_url=}, {session=}, {role=}, {device=}, {op=}): it returned "
                f"{code}. Is there an NPU, with its driver, and a store at that address?"
            )
        self.session, self.device = session, device
        self._engine: Any = engine

    def _register(self, spans: Sequence[Span]) -> None:
        for memory, base, _ in spans:
            if memory.kind == "VRAM" and memory.device != self.device:
                raise RuntimeError(f"{memory} {base:#x} is not memory of this engine's device, {self.device}")
        if not spans:
            return
        # In one batch: memfabric widens spans to 2 MiB and joins what then overlaps, within one batch only.
        code = self._engine.batch_register_memory([base for _, base, _ in spans], [nbytes for _, _, nbytes in spans])
        if code != 0:
            raise RuntimeError(
                f"memfabric did not register {len(spans)} spans of memory, from {self._named_span(spans[0])} on: {code}"
            )

    def _unregister(self, spans: Sequence[Span]) -> None:
        self._unregister_each(spans, self._engine.unregister_memory, "memfabric")

    def _move(self, session: str, chunk: Plan, op: Op) -> Outcome:
        src, dst, nbytes = chunk.lists()
        here, there = (src, dst) if op == "write" else (dst, src)
        call = self._engine.batch_transfer_sync_write if op == "write" else self._engine.batch_transfer_sync_read
        return Outcome(call(session, here, there, nbytes))

    def _shut_down(self, spans: Spans) -> None:
        for _, base, _ in spans.all:
            self._engine.unregister_memory(base)
        self._engine.destroy()
        self._engine = None


def _load() -> Any:
    """The package; ImportError says what is wrong."""
    if "mf_adapter" in sys.modules:
        raise ImportError("mf_adapter is loaded in this process; memfabric_hybrid must not be loaded beside it")
    try:
        import memfabric_hybrid
    except ModuleNotFoundError as error:
        raise ImportError(f"AscendEngine needs memfabric_hybrid: {_INSTALL}") from error
    except (ImportError, OSError) as error:
        raise ImportError(f"memfabric_hybrid does not load: {error}. {_INSTALL}") from error
    return memfabric_hybrid
