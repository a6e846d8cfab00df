"""Transfers that begin when others, which they would meet, have settled."""

from __future__ import annotations

import contextlib
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..planning import Plan
    from .owner import Owner
    from .transfer import Transfer

_PAUSE_S = 0.05  # between two questions whether what is waited for has settled


class Waiting:
    """The transfers of one engine that are queued behind unsettled ones. Guarded by the engine's lock.

    One thread asks for as long as there are any, since the caller may be waiting for nothing else.
    """

    def __init__(self, engine: Owner) -> None:
        self._engine = engine
        self._plans: dict[Transfer, Plan] = {}  # in the order in which they came
        self._asks = False

    def put(self, transfer: Transfer, plan: Plan, behind: set[Transfer]) -> None:
        """Keep it back until all of `behind` have settled. RuntimeError, with no effect, for want of a thread."""
        self._start()
        transfer._behind = behind
        self._plans[transfer] = plan

    def watch(self) -> None:
        """Ask as well after those that hold slots of staging, as long as others wait for slots."""
        if self._holders():
            with contextlib.suppress(RuntimeError):  # for want of a thread; the next one that waits tries again
                self._start()

    def _start(self) -> None:
        if not self._asks:
            try:
                threading.Thread(target=self._ask, name="kvplan-waiting", daemon=True).start()
            except RuntimeError as error:
                raise RuntimeError(f"no thread can be started, so nothing is submitted: {error}") from error
            self._asks = True

    def _holders(self) -> set[Transfer]:
        wanted = [staging for staging in self._engine._stagings if any(not t.done() for t in staging._waiting)]
        return {t for t in self._engine._unsettled_transfers if any(piece.staging in wanted for piece in t._held)}

    def remove(self, transfer: Transfer) -> None:
        """It has ended."""
        self._plans.pop(transfer, None)
        transfer._behind = None

    def settled(self, other: Transfer) -> None:
        """Start what waited for `other` alone."""
        engine = self._engine
        for transfer, plan in list(self._plans.items()):
            assert transfer._behind is not None
            transfer._behind.discard(other)
            if transfer._behind or engine._closed:
                continue
            # What has failed since it came counts as well.
            transfer._behind = set(engine._unsettled_transfers.collisions(plan, transfer._key, transfer.op))
            if not transfer._behind:
                self.remove(transfer)
                try:
                    engine._lanes.put(transfer._key, transfer)
                except RuntimeError as error:
                    transfer._close("failed", str(error))

    def _ask(self) -> None:
        while True:
            with self._engine._lock:
                others = {other for transfer in self._plans for other in transfer._behind or ()} | self._holders()
                if not others:
                    self._asks = False
                    return
            for other in others:
                other.settle(0)
            time.sleep(_PAUSE_S)
