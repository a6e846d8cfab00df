"""Blocks that the prefill side holds for decode engines: until they are read, or until nobody has asked for long."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable


class Leases:
    """Finished requests whose blocks must not be freed yet. All methods may be called from any thread.

    A lease ends when the decode side says that it has read, or when its time has passed without a word. The decode
    side asks at the end whether the lease still holds: if not, what it read may be another request's.

    Args:
        seconds: how long a lease lasts after the last word of the decode side.
        clock: seconds, never going back.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._ends: dict[str, float] = {}
        self._done: set[str] = set()

    def hold(self, request: str) -> None:
        """Begin a lease."""
        with self._lock:
            self._ends[request] = self._clock() + self.seconds

    def renew(self, requests: Iterable[str]) -> None:
        """Begin the time of these leases anew. Requests without a lease are left out: those may not be held yet."""
        with self._lock:
            for request in requests:
                self._renew(request)

    def held(self, request: str) -> bool:
        """Whether the blocks have been held all the time until now. If so, their time begins anew."""
        with self._lock:
            return self._renew(request)

    def done(self, requests: Iterable[str]) -> None:
        """These have been read, or will not be."""
        with self._lock:
            self._done.update(request for request in requests if self._ends.pop(request, None) is not None)

    def released(self) -> tuple[set[str], set[str]]:
        """Take out the requests whose blocks are free now: (those that were done with, those whose time has passed)."""
        with self._lock:
            now = self._clock()
            expired = {request for request, end in self._ends.items() if end <= now}
            for request in expired:
                del self._ends[request]
            done, self._done = self._done, set()
            return done, expired

    def _renew(self, request: str) -> bool:
        now = self._clock()
        if self._ends.get(request, now) <= now:  # its time has passed, though nobody has taken it out yet
            return False
        self._ends[request] = now + self.seconds
        return True

    def __len__(self) -> int:
        return len(self._ends)
