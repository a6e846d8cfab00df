"""How an engine that keeps order shows that what it had for a peer is over: by a word sent behind it.

Such an engine may go on, after a call has failed, with what it had queued; in order, whenever the peer takes it. So a
call that begins after the failed one has ended, and succeeds, comes behind all that was left. The caller's own next
transfer does as well. Where there is none, a *fence* is sent: eight bytes between words that belong to the two engines,
never to a page, so that a fence itself cannot disturb anything.
"""

from __future__ import annotations

import functools
import time
from typing import TYPE_CHECKING

from ..errors import clipped
from .limits import left

if TYPE_CHECKING:
    from .owner import Owner
    from .transfer import Op, Transfer

PAUSE_S = 0.2  # from the end of a fence that failed to the next one


class Fences:
    """The fences of one engine: at most one under way for a peer and direction. Guarded by the engine's lock."""

    def __init__(self, engine: Owner) -> None:
        self._engine = engine
        self._last: dict[tuple[str, Op], Transfer] = {}  # under way, or the last one that failed

    def settle(self, transfer: Transfer, deadline: float) -> str | None:
        """Wait, with fences, until a failed transfer is settled; else say why it is not known to be."""
        while True:
            with transfer._changed:
                if transfer._is_settled:
                    return None
                why = self._start(transfer)
                if why is not None:
                    return why
                fence = self._last[transfer._key, transfer.op]
                if fence.done():  # it failed: the next one comes after a pause
                    transfer._changed.wait(left(min(deadline, fence._ended + PAUSE_S)))
                else:
                    transfer._changed.wait_for(functools.partial(_over, transfer, fence), left(deadline))
                if transfer._is_settled:
                    return None
                if time.monotonic() >= deadline:
                    return self._said(transfer)

    def _said(self, transfer: Transfer) -> str:
        fence = self._last.get((transfer._key, transfer.op))
        if fence is None or fence._failure is None:
            return (
                f"{clipped(transfer._peer_name)} has not received the fence that was sent after this transfer yet. "
                f"{self._engine._unsettled}"
            )
        code, cause = fence._failure
        return f"a later transfer to the peer does not arrive either: the engine said {cause or code}"

    def _start(self, transfer: Transfer) -> str | None:
        """See that a fence which can show that `transfer` is settled is under way; else why there can be none."""
        engine, at = self._engine, (transfer._key, transfer.op)
        last = self._last.get(at)
        if last is not None and (not last.done() or time.monotonic() < last._ended + PAUSE_S):
            return None
        if engine._closed:
            return f"{engine!r} is closed, and can show nothing any more. {engine._unsettled}"
        plan = engine._fence(transfer.peer, transfer.op)
        if plan is None:
            return (
                f"the session {clipped(transfer.peer)} has no fence word, so settle() cannot check; a later transfer "
                f"of yours that arrives shows it. {engine._unsettled}"
            )
        fence = engine._make_fence(plan, transfer.peer, transfer.op)
        try:
            engine._lanes.put(transfer._key, fence, first=True)
        except RuntimeError as error:
            return str(error)
        self._last[at] = fence
        return None

    def ended(self, transfer: Transfer, begun: float) -> None:
        """A call for `transfer`, a fence or not, that began at `begun` has ended."""
        if transfer._failure is None:
            for other in self._engine._unsettled_transfers.of(transfer._key):
                if other.op == transfer.op and other._failure is not None and other._ended < begun:
                    other._show_settled()
        at = (transfer._key, transfer.op)
        fence = self._last.get(at)
        if fence is not None and fence.done():
            waits = [t for t in self._engine._unsettled_transfers.of(transfer._key) if t.op == transfer.op]
            if fence._failure is None or not waits:
                del self._last[at]
            for other in waits:
                other._changed.notify_all()  # whoever settles it looks again

    def forget(self, key: str | None = None) -> None:
        """Send none that is queued for a peer, or for any."""
        for at in [at for at in self._last if key in (None, at[0])]:
            fence = self._last.pop(at)
            if not fence.done() and not fence._busy:
                fence._close("cancelled")
                self._engine._lanes.remove(at[0], fence)
            for other in self._engine._unsettled_transfers.of(at[0]):
                other._changed.notify_all()


def _over(transfer: Transfer, fence: Transfer) -> bool:
    return transfer._is_settled or fence.done()
