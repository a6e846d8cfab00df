"""The end of a peer, and of an engine."""

from __future__ import annotations

import abc
import threading
from typing import TYPE_CHECKING

from ..errors import TransferTimeout, listed
from .limits import deadline_of, left, seconds

if TYPE_CHECKING:
    from .check import Spans
    from .collisions import Unsettled
    from .fences import Fences
    from .lanes import Lanes, Lock
    from .transfer import Transfer


class Ending(abc.ABC):
    """The part of an engine that brings transfers to an end that have not come to one by themselves."""

    _lock: Lock
    _registry: threading.Lock
    _closed: bool
    _gone: bool
    _spans: Spans
    _transfers: set[Transfer]
    _unsettled_transfers: Unsettled
    _lanes: Lanes
    _fences: Fences

    @abc.abstractmethod
    def _check_session(self, session: str) -> None: ...

    @abc.abstractmethod
    def _key_of(self, session: str) -> str: ...

    @abc.abstractmethod
    def _shut_down(self, spans: Spans) -> None:
        """Unregister what is left, and let the engine go. Called once, with nothing under way."""

    @abc.abstractmethod
    def _under_way(self) -> int: ...

    @abc.abstractmethod
    def _run_callbacks(self) -> None: ...

    def peer_ended(self, session: str) -> None:
        """Say that the process of a peer has ended, as your supervisor knows; kvplan never concludes that by itself.

        Unfinished transfers with this peer fail. A write settles at once, or when its running engine call returns. A
        read that timed out settles only when the engine has finished it. Transfers that failed earlier settle too. No
        more fences are sent to that peer.

        A process that is started again may have the same session. So what is submitted to it later is not refused.

        Args:
            session: of the peer, or any other that it had.

        Raises:
            ValueError: it is no session.
        """
        self._check_session(session)
        key = self._key_of(session)
        with self._lock:
            self._fences.forget(key)
            for transfer in [t for t in self._transfers if t._key == key]:
                transfer._peer_gone = True
                if transfer._busy:
                    transfer._next = None
                    if not transfer.done():
                        transfer._close("failed", "its peer has ended")
                elif not transfer.done():
                    transfer._close("failed", "its peer has ended")
            for transfer in self._unsettled_transfers.of(key):
                transfer._peer_gone = True
                if not transfer._busy and (transfer.op == "write" or transfer._finished is None):
                    transfer._show_settled()
        self._run_callbacks()

    def close(self, timeout: float | None = 60.0) -> None:
        """Refuse new plans, start nothing that is queued, wait for what is under way, and let the engine go.

        Transfers that have not begun fail at once. Those that have begun go on for at most `timeout` seconds in all;
        then no more of their chunks are started. When no call of the engine is at work any more, all memory is
        unregistered and the engine let go of. May be called again; once it has returned it does nothing.

        Args:
            timeout: seconds; None or infinity: no limit. Engines end a call to a peer that hangs by themselves, within
                30 seconds unless told otherwise.

        Raises:
            TransferTimeout: calls of the engine are still at work. It stays closed to what is new; all memory is still
                registered, and must neither be freed nor reused. Call `close` again.
            ValueError: `timeout` is negative or NaN.
        """
        deadline = deadline_of(seconds(timeout, "timeout"))
        rest = left(deadline)
        if not self._registry.acquire(timeout=-1 if rest is None else rest):
            raise TransferTimeout(f"{self!r} is being closed, or memory registered, by another thread", settled=False)
        try:
            if self._gone:
                return
            with self._lock:
                self._closed = True
                self._fences.forget()
                for transfer in [t for t in self._transfers if not t._sent and not t.done()]:
                    transfer._close("failed", "the engine was closed before it began")
            self._run_callbacks()
            with self._lock:
                self._lanes.wait(lambda: not self._under_way() or self._stands_still(), left(deadline))
                for transfer in [t for t in self._transfers if not t.done()]:
                    transfer._stop = "the engine was closed before it was done"
                    transfer._changed.notify_all()  # a piece may be waiting for staging
                    if not transfer._busy:
                        transfer._close("failed", transfer._stop)
                over = self._lanes.wait(lambda: not self._lanes.calls, left(deadline))
                busy = [transfer._named() for transfer in self._transfers if transfer._busy]
                if over:
                    self._lanes.stop()
            self._run_callbacks()
            if not over:
                raise TransferTimeout(
                    f"{self!r} is closed to what is new, but calls are still at work after {timeout:g} s: "
                    f"{listed(busy) or 'a fence'}. Its memory stays registered; close it again",
                    settled=False,
                )
            self._shut_down(self._spans)
            self._gone = True
        finally:
            self._registry.release()

    def _stands_still(self) -> bool:
        """Nothing goes on by itself any more: the process ends."""
        return self._lanes.halted and not self._lanes.calls
