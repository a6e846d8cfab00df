"""All transfers of a request, as one: only they together say when its pages are free."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any

from ..errors import TransferError, TransferTimeout, clipped
from .limits import deadline_of, left, seconds
from .outcome import waiter
from .transfer import Transfer


class TransferGroup:
    """The transfers of one request, through one engine or several. All methods may be called from any thread.

    A transfer knows of its own bytes alone. Another one of the same request may still write to the same pages, so only
    the group says that they are free: when `settle` has returned True, or `wait` has returned.

    Args:
        transfers: of the request, so far.
        label: of the request, for messages.
    """

    def __init__(self, transfers: Iterable[Transfer] = (), *, label: str | None = None) -> None:
        self.label = label
        self._changed = threading.Condition()
        self._transfers: list[Transfer] = []
        for transfer in transfers:
            self.add(transfer)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Those of the group, in the order in which they came."""
        with self._changed:
            return tuple(self._transfers)

    def add(self, transfer: Transfer) -> None:
        """Take one more into the group. Raises TypeError where it is no Transfer."""
        if not isinstance(transfer, Transfer):
            raise TypeError(f"a TransferGroup holds Transfers, not a {type(transfer).__name__}")
        with self._changed:
            if transfer in self._transfers:
                return
            self._transfers.append(transfer)
        transfer.add_done_callback(self._one_ended)

    def _one_ended(self, _: Transfer) -> None:
        with self._changed:
            self._changed.notify_all()

    def done(self) -> bool:
        """Whether every transfer has ended; see `Transfer.done`."""
        return all(transfer.done() for transfer in self.transfers)

    def wait(self, timeout: float | None = None) -> None:
        """Return when every transfer has arrived. Then the pages are free.

        Args:
            timeout: seconds, for all of them; None or infinity: no limit. When it has passed the transfers go on.

        Raises:
            TransferError: one has failed or was cancelled; at once, whatever the others do. Its cause is that
                transfer's own error; its `settled` says whether the whole group is.
            TransferTimeout: they have not ended in time, and go on.
            ValueError: `timeout` is negative or NaN.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error

    def exception(self, timeout: float | None = None) -> TransferError | None:
        """The error that `wait` raises; None once all have arrived.

        Raises:
            TransferTimeout, ValueError: as `wait`.
        """
        limit = seconds(timeout, "timeout")
        with self._changed:
            ended = self._changed.wait_for(lambda: self._failed() or self._all_ended(), limit)
            transfers = tuple(self._transfers)
            failed = self._failed()
        if failed is not None:
            error = failed.exception(0)
            assert error is not None
            settled = self.settled
            count = sum(t._end in ("failed", "cancelled") for t in transfers)
            free = (
                "All of it is settled: its pages are free." if settled else "Its pages are free when settle() says so."
            )
            whole = TransferError(
                f"{count} of the {len(transfers)} transfers of {self._named()} failed. {free} The first: {error}",
                peer=error.peer,
                failed=error.failed,
                code=error.code,
                settled=settled,
            )
            whole.__cause__ = error
            return whole
        if not ended:
            going = sum(not t.done() for t in transfers)
            raise TransferTimeout(
                f"{going} of the {len(transfers)} transfers of {self._named()} have not ended within {limit:g} s; they "
                f"go on",
                settled=False,
            )
        return None

    def _failed(self) -> Transfer | None:
        return next((t for t in self._transfers if t._end in ("failed", "cancelled")), None)

    def _all_ended(self) -> bool:
        return all(transfer.done() for transfer in self._transfers)

    def cancel(self) -> None:
        """Cancel every transfer that has not ended. See `settle` for what is under way."""
        for transfer in self.transfers:
            transfer.cancel()

    @property
    def settled(self) -> bool:
        """Whether it is known that no transfer of the group can read or write any more: the pages are free."""
        return all(transfer.settled for transfer in self.transfers)

    @property
    def unsettled(self) -> str | None:
        """Why `settle` returned False last, for the first transfer that is not settled; None where all are."""
        for transfer in self.transfers:
            if not transfer.settled:
                return f"{transfer._named()}: {transfer.unsettled or 'nobody has asked settle() yet'}"
        return None

    def settle(self, timeout: float | None = 10.0) -> bool:
        """Wait until no transfer of the group can read or write any more: then the pages of the request are free.

        Args:
            timeout: seconds, for all of them; None or infinity: no limit.

        Returns:
            True when they are free, on both sides. False when that could not be shown in time; `unsettled` says why.

        Raises:
            ValueError: `timeout` is negative or NaN.
        """
        deadline = deadline_of(seconds(timeout, "timeout"))
        # Each is asked, also behind one that does not settle in time: that starts its fence.
        return all([transfer.settle(left(deadline)) for transfer in self.transfers])

    def add_done_callback(self, call: Callable[[TransferGroup], object]) -> None:
        """Have `call(group)` called once, when every transfer that is in the group now has ended."""
        transfers = self.transfers
        rest = len(transfers)
        lock = threading.Lock()

        def one_ended(_: object) -> None:
            nonlocal rest
            with lock:
                rest -= 1
                last = rest == 0
            if last:
                call(self)

        if not transfers:
            call(self)
        for transfer in transfers:
            transfer.add_done_callback(one_ended)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait until every transfer has ended, without blocking the event loop; then as `wait`."""
        yield from waiter(self)
        self.wait(0)

    def _named(self) -> str:
        return "a request" if self.label is None else f"request {clipped(self.label)!r}"

    def __len__(self) -> int:
        return len(self.transfers)

    def __repr__(self) -> str:
        transfers = self.transfers
        states = [transfer.state for transfer in transfers]
        counts = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        label = "" if self.label is None else f" {clipped(self.label)!r}"
        return f"<TransferGroup{label}: {counts or 'empty'}{', settled' if self.settled else ''}>"
