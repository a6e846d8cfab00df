"""Pages of transfers that failed, kept aside until they are free."""

from __future__ import annotations

import threading
import time
from typing import Generic, TypeVar

from .group import TransferGroup
from .limits import deadline_of, left, seconds
from .transfer import Transfer

_PAUSE_S = 0.01  # between two rounds of questions

Pages = TypeVar("Pages")


class Quarantine(Generic[Pages]):
    """Where a serving stack puts the pages of a request that failed, and gets them back once they are free.

    `pages` is whatever the caller calls them: kvplan hands the same object back. All methods may be called from any
    thread. It neither cancels nor ends anything; `Engine.peer_ended` settles what a dead peer leaves.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, tuple[Transfer | TransferGroup, Pages]] = {}
        self._next = 0

    def add(self, transfers: Transfer | TransferGroup, pages: Pages) -> None:
        """Keep `pages` until `transfers`, all those that may touch them, have settled.

        Raises:
            TypeError: `transfers` is neither a Transfer nor a TransferGroup.
        """
        if not isinstance(transfers, (Transfer, TransferGroup)):
            raise TypeError(f"pages wait for a Transfer or a TransferGroup, not a {type(transfers).__name__}")
        with self._lock:
            self._kept[self._next] = transfers, pages
            self._next += 1

    def free(self, timeout: float | None = 0.0) -> list[Pages]:
        """Take out the pages that are free now, and wait for some where there are none.

        Args:
            timeout: seconds to wait for the first that are; 0 only looks. None or infinity: no limit.

        Returns:
            The `pages` of every `add` whose transfers have settled: each once. Empty when none has in time, or none
            is kept.

        Raises:
            ValueError: `timeout` is negative or NaN.
        """
        deadline = deadline_of(seconds(timeout, "timeout"))
        while True:
            with self._lock:
                kept = list(self._kept.items())
            settled = [number for number, (transfers, _) in kept if transfers.settle(0)]
            with self._lock:  # only now, so that an interrupt loses none
                taken = [self._kept.pop(number, None) for number in settled]
            found = [entry[1] for entry in taken if entry is not None]
            rest = left(deadline)
            if found or not kept or rest == 0:
                return found
            time.sleep(_PAUSE_S if rest is None else min(_PAUSE_S, rest))

    def reasons(self) -> list[tuple[Pages, str]]:
        """What is kept, and why it was not free when `free` was called last."""
        with self._lock:
            kept = list(self._kept.values())
        return [(pages, transfers.unsettled or "nobody has asked yet") for transfers, pages in kept]

    def __len__(self) -> int:
        return len(self._kept)

    def __repr__(self) -> str:
        return f"<Quarantine of {len(self)} collections of pages>"
