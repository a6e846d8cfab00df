"""Chunks planned whole, and handed to SGLang's engine."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

from kvplan import LayoutError, Pairing, PairingError, Plan, PlanError, Request

from . import handover
from .guarded import GuardedManager
from .names import NotToldError
from .pairings import Pairings

REFUSALS = (PlanError, PairingError, LayoutError, NotToldError)


class Sending(GuardedManager, Pairings):
    """A guarded manager that plans a chunk before it sends any of it, in the calls that SGLang would make."""

    _sglang: type = MooncakeKVManager  # the class that this one takes the place of

    def _plan(self, pairing: Pairing, source: np.ndarray, lists: dict[str, Any]) -> list[Plan]:
        """The whole chunk's plans, before the first is sent: one, or one for each batch of indices."""
        if not pairing.space_names:
            return []
        most = self.max_transfer_batch_indices
        if most <= 0 or len(source) <= most or self._by_entry():
            return [pairing.plan(source, lists)]
        starts = range(0, len(source), most)
        for space, ids in lists.items():
            if len(ids) != len(source):
                raise PlanError(f"{len(source)} source pages, and {len(ids)} of space {space!r}")
        plan = pairing.plan_batch(
            [Request(source[at : at + most], {space: ids[at : at + most] for space, ids in lists.items()})
             for at in starts]
        )  # fmt: skip
        return [plan.request(number) for number in range(len(starts))]

    def _by_entry(self) -> bool:
        """Whether SGLang makes a call a layer: with a memory pool of its own."""
        return self.enable_custom_mem_pool and self.custom_mem_pool_type != "INTRA_NODE_NVLINK"

    def _send(self, session: str, plans: Sequence[Plan], executor: Any) -> int:
        if not self._by_entry():
            for plan in plans:
                code = self._hand_over(session, plan.table.numpy())
                if code != 0:
                    return code
            return 0
        parts: deque[np.ndarray] = deque()
        for plan in plans:
            table = plan.table.numpy()
            parts += [table[:, start:stop] for start, stop in itertools.pairwise(plan.entry_cuts()) if stop > start]
        # A future a thread, not a future a call: with few pages, futures would cost more than planning.
        threads = min(len(parts), getattr(executor, "_max_workers", 1))
        return self._await_transfer_futures(
            [executor.submit(self._hand_over_parts, session, parts) for _ in range(threads)]
        )

    def _hand_over_parts(self, session: str, parts: deque[np.ndarray]) -> int:
        """Hand over parts of tables, a call each, until none is left or a call fails. Threads share the parts."""
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return 0
            code = self._hand_over(session, part)
            if code != 0:
                parts.clear()
                return code

    def _hand_over(self, session: str, table: np.ndarray) -> int:
        if self.handed is None:
            self.handed = handover.Engine(self.engine, self._sglang is MooncakeKVManager)
        code = self.handed.send(session, table)
        if code != 0:
            self.peers.forget(session)
        return code
