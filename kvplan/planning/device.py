"""Plans made where the page ids live: on a GPU's stream, with no wait, until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from .. import ops
from ..errors import PlanError
from ..ops import backend
from ..pairing import PairingTables
from .case import keep_case
from .plan import Cuts, Plan, cuts_of
from .refusal import refusal
from .requests import request_at
from .segment import Segment


class Planner:
    """Requests of fixed lengths and positions to one peer, planned on a GPU as often as wanted.

    `Pairing.planner` makes one. To use a CUDA graph, call `run` once, then capture it. Each replay reads the current
    page ids from the same tensors. Keep the planner alive as long as the graph. All work is on the current stream, and
    nothing waits for it.

    Attributes:
        table: int64 [3, most], on the device or in pinned memory: room for every descriptor there can be.
        info: int64 [6 + segments * requests], on the device; see `ops.plan_`.
    """

    def __init__(
        self,
        pairing: PairingTables,
        lists: Sequence[torch.Tensor],
        windows: Sequence[int],
        requests: int,
        device: torch.device,
        pinned: bool,
    ) -> None:
        self.pairing = pairing
        self.windows = windows
        self.requests = requests
        self.device = device
        for ids in lists:
            if ids.device != device:
                raise PlanError(f"page ids are on {ids.device}, and the plan is to be made on {device}")
        self._lists = list(lists) or [torch.empty(0, dtype=torch.int64, device=device)]
        job, status = ops.prepare(pairing.tables, windows, sum(len(ids) for ids in lists))
        facts = status.tolist()
        if facts[0]:
            raise refusal(pairing, facts, np.empty(0, np.int64), windows)
        self._sizes: list[int] = job[: ops.SIZES].tolist()
        self._job = backend.send(job, device)
        self._tables = pairing.tables_on(device)
        self._ready = self._record() if device.type != "cpu" else None
        room = self._sizes[-1]
        gpu = device.type != "cpu"
        self.table = torch.empty(
            (3, room), dtype=torch.int64, device="cpu" if pinned else device, pin_memory=pinned and gpu
        )
        words = 6 + len(pairing.segment_memories) * requests
        self.info = torch.empty(words, dtype=torch.int64, device=device)
        self._use = torch.empty(min(room, 1), dtype=torch.int64, device=device)
        # Read by the host while the device goes on: one for each planner, written by each run.
        self._host_info = torch.empty(words, dtype=torch.int64, pin_memory=gpu)

    def run(self) -> DevicePlan:
        """Plan what the lists hold now.

        Each run (or graph replay) reads the page ids again and overwrites the previous plan. Wait for the previous
        plan's transfers first. (`Engine.submit` copies a plan, so a submitted one is safe.)

        A plan that is returned during capture has no result of its own. Reading it waits for the current stream, and
        returns the result of the latest replay.
        """
        captures = self._captures()
        if self._ready is not None and not captures:
            self._stream().wait_event(self._ready)  # it may be another stream than the one that sent tables and job
        ids = torch.cat(self._lists) if len(self._lists) > 1 else self._lists[0]
        ops.plan_(self._tables, self._job, ids, self._sizes, self.table, self.info)
        self._host_info.copy_(self.info, non_blocking=True)
        if self.table.device != self.device:
            # Kernels write it, and torch knows nothing of that: a copy from it keeps torch from giving it away early.
            self._use.copy_(self.table.view(-1)[:1], non_blocking=True)
        event = None
        if self.device.type != "cpu" and not captures:
            event = self._record()
        return DevicePlan(self, ids, self._host_info, event)

    def _stream(self) -> Any:
        return torch.get_device_module(self.device.type).current_stream(self.device)

    def _record(self) -> Any:
        event = torch.get_device_module(self.device.type).Event()
        event.record(self._stream())  # by default it would be that of the current device
        return event

    def _captures(self) -> bool:
        if self.device.type != "cuda":
            return False
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()


class DevicePlan(Plan):
    """A plan that is still being made on a GPU, or lies there.

    `execute` and `ops.copy_` use it there, with no wait. Reading anything of it, or submitting it to an engine, waits
    for it once, and raises the PlanError of a request that was refused.

    Attributes:
        device_table: int64 [3, most]; the first `count` columns are the plan.
        count: int64 [1] on the device: descriptors; 0 where the request was refused.
    """

    def __init__(self, planner: Planner, ids: torch.Tensor, host_info: torch.Tensor, event: Any) -> None:
        self.device_table = planner.table
        self.count = planner.info[-1:]
        self.device = planner.device
        self.src_layout = planner.pairing.src
        self.dst_layout = planner.pairing.dst
        self.requests = planner.requests
        self.segment_memories = planner.pairing.segment_memories
        self._planner = planner
        self._ids = ids
        self._host_info = host_info
        self._event = event
        self._captured = event is None and planner.device.type != "cpu"
        self._read: tuple[torch.Tensor, Cuts] | None = None

    def wait(self) -> None:
        """Return when the plan is made.

        Raises:
            PlanError: the request was refused. Names region, space, position and value.
        """
        self._fetch()

    def _fetch(self) -> tuple[torch.Tensor, Cuts]:
        if self._read is None:
            facts = self._facts()
            read = self.device_table[:, : facts[-1]].cpu(), cuts_of(self.segment_memories, facts, self.requests)
            if self._captured:
                return read  # another one after the next replay
            self._read = read
        return self._read

    def _facts(self) -> list[int]:
        """The words of info, as soon as they are known."""
        if self._event is not None:
            self._event.synchronize()
        elif self._captured:
            torch.cuda.current_stream(self.device).synchronize()
        facts: list[int] = self._host_info.tolist()
        if facts[0]:
            planner = self._planner
            pairing, ids, windows = planner.pairing, self._ids.cpu().numpy(), planner.windows
            requests = [request_at(pairing, ids, windows, k) for k in range(planner.requests)]
            error = refusal(pairing, facts, ids, windows)
            keep_case(error, pairing, requests)
            raise error
        return facts

    def __len__(self) -> int:
        return self._facts()[-1] if self._read is None else self._read[0].shape[1]

    def __repr__(self) -> str:
        return f"DevicePlan(on {self.device}, not read)" if self._read is None else super().__repr__()

    def on_current_stream(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(device_table, count) for work on the current stream, which waits for the plan if another stream makes it."""
        if self._event is not None:
            stream = torch.get_device_module(self.device.type).current_stream(self.device)
            stream.wait_event(self._event)
            for tensor in (self.device_table, self.count):
                if tensor.device == self.device:
                    tensor.record_stream(stream)
        return self.device_table, self.count

    @property
    def table(self) -> torch.Tensor:  # type: ignore[override]
        """int64 [3, N] on the CPU."""
        return self._fetch()[0]

    def _segments_and_offsets(self) -> Cuts:
        return self._fetch()[1]

    def _to_pack(self) -> tuple[torch.Tensor, tuple[Segment, ...]]:
        facts = self._facts()  # the status, and how many descriptors there are: the table itself stays there
        return self.on_current_stream()[0][:, : facts[-1]], cuts_of(self.segment_memories, facts, self.requests)[0]
