"""Notices: what peers say once a transfer of theirs has arrived."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

MAX_BYTES = 1024  # of one notice
MAX_KEPT = 65_536  # that nobody has waited for yet; then the oldest go, so that no peer can fill this memory


def check(notice: bytes) -> None:
    """Raises ValueError where `notice` is not 1 to 1024 bytes."""
    if not isinstance(notice, bytes) or not 1 <= len(notice) <= MAX_BYTES:
        raise ValueError(f"a notice is 1 to {MAX_BYTES} bytes, not {notice!r:.50}")


class Notices:
    """What has been heard and not yet been waited for.

    Args:
        hear: returns what has come since it was called last.
    """

    def __init__(self, hear: Callable[[], list[bytes]]) -> None:
        self._hear = hear
        self._lock = threading.Lock()
        self._kept: collections.OrderedDict[bytes, int] = collections.OrderedDict()

    def take(self, notice: bytes) -> bool:
        """Whether `notice` has come; then it is taken away, once."""
        with self._lock:
            for heard in self._hear():
                if 1 <= len(heard) <= MAX_BYTES:  # none of ours is longer
                    self._kept[heard] = self._kept.get(heard, 0) + 1
                if len(self._kept) > MAX_KEPT:
                    self._kept.popitem(last=False)
            count = self._kept.pop(notice, 0)
            if count > 1:
                self._kept[notice] = count - 1
            return count > 0

    def wait(self, notice: bytes, timeout: float) -> None:
        """Return once `notice` has come. Raises TimeoutError when it has not within `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self.take(notice):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no transfer with notice {notice!r} arrived within {timeout:g} s")
            time.sleep(0.001)
