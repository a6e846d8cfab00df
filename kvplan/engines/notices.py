"""Notices: what peers say once a transfer of theirs has arrived."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from collections.abc import Callable

from . import limits

MAX_BYTES = 1024  # of one notice
# Of what nobody has waited for yet. Beyond that the oldest of the sender that has the most go, a sixteenth of what it
# has: so no peer can fill this memory, or push out what another has sent.
MAX_KEPT = 65_536  # different notices
MAX_KEPT_BYTES = 16 << 20
_MAX_SENDERS = 1024  # further ones are counted as one
_OVERHEAD = 64  # bytes counted for each, beside its own


def check(notice: bytes) -> None:
    """Raises ValueError where `notice` is not 1 to 1024 bytes."""
    if not isinstance(notice, bytes) or not 1 <= len(notice) <= MAX_BYTES:
        raise ValueError(f"a notice is 1 to {MAX_BYTES} bytes, not {notice!r:.50}")


class _Sender:
    """What one sender has said and nobody has waited for, oldest first, and how often."""

    def __init__(self) -> None:
        self.counts: collections.OrderedDict[bytes, int] = collections.OrderedDict()
        self.nbytes = 0


class Notices:
    """What has been heard and not yet been waited for.

    Args:
        hear: returns what has come since it was called last: pairs of a sender's name and a notice.
    """

    def __init__(self, hear: Callable[[], list[tuple[str, bytes]]]) -> None:
        self._hear = hear
        self._lock = threading.Lock()
        self._senders: dict[str, _Sender] = {}
        self._kept = 0  # different notices
        self._nbytes = 0

    def collect(self) -> int:
        """Keep what has come; how many notices that were."""
        with self._lock:
            return self._collect()

    def take(self, notice: bytes) -> bool:
        """Whether `notice` has come; then it is taken away, once."""
        with self._lock:
            self._collect()
            for name, sender in self._senders.items():
                if notice in sender.counts:
                    sender.counts[notice] -= 1
                    if not sender.counts[notice]:
                        self._drop(name, sender, notice)
                    return True
            return False

    def wait(self, notice: bytes, timeout: float | None) -> None:
        """Return once `notice` has come. Raises TimeoutError when it has not within `timeout` seconds."""
        limit = limits.seconds(timeout, "timeout")
        deadline = limits.deadline_of(limit)
        while not self.take(notice):
            if time.monotonic() >= deadline:
                raise TimeoutError(f"no transfer with notice {notice!r} arrived within {limit:g} s")
            time.sleep(0.001)

    def _collect(self) -> int:
        heard = self._hear()
        for name, notice in heard:
            if not 1 <= len(notice) <= MAX_BYTES:  # none of ours is longer
                continue
            sender = self._sender(name[:MAX_BYTES])
            if notice in sender.counts:
                sender.counts[notice] += 1
                continue
            sender.counts[notice] = 1
            self._count(sender, notice, 1)
            while self._kept > MAX_KEPT or self._nbytes > MAX_KEPT_BYTES:
                most, it = max(self._senders.items(), key=lambda item: item[1].nbytes)
                for old in list(itertools.islice(it.counts, max(1, len(it.counts) // 16))):
                    self._drop(most, it, old)
        return len(heard)

    def _sender(self, name: str) -> _Sender:
        if name not in self._senders and len(self._senders) >= _MAX_SENDERS:
            name = ""
        return self._senders.setdefault(name, _Sender())

    def _drop(self, name: str, sender: _Sender, notice: bytes) -> None:
        del sender.counts[notice]
        self._count(sender, notice, -1)
        if not sender.counts:
            del self._senders[name]

    def _count(self, sender: _Sender, notice: bytes, by: int) -> None:
        self._kept += by
        sender.nbytes += by * (len(notice) + _OVERHEAD)
        self._nbytes += by * (len(notice) + _OVERHEAD)
