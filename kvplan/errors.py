"""The errors kvplan raises. All refusals happen before a byte moves; only TransferError comes after."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any


class LayoutError(ValueError):
    """A region or layout contradicts itself (message: region, field, value)."""


class PairingError(ValueError):
    """Two layouts cannot be paired (message: region and why)."""


class PlanError(ValueError):
    """A request cannot be planned, or a plan may not be submitted (message: region, space, position, value)."""

    _case: Callable[[], dict[str, Any]] | None = None

    def case(self) -> dict[str, Any] | None:
        """The layouts and requests that were refused, for `json.dump`. None where the error is about no request.

        `python -m kvplan explain FILE` reads the file, and says what goes where and why it is refused.
        """
        return None if self._case is None else self._case()


class TransferError(RuntimeError):
    """An engine did not carry out a plan.

    Attributes:
        peer: session of the peer, or None.
        failed: numbers, in plan order, of the descriptors not confirmed to have arrived; None where nothing was sent.
        code: what the engine returned, or None.
        settled: True when it is known that no write of this transfer can still be outstanding, False when one may be
            (see `Transfer.settle`). Until it is True the pages on both sides must be neither reused nor freed.
    """

    def __init__(
        self,
        message: str,
        *,
        peer: str | None = None,
        failed: range | None = None,
        code: int | str | None = None,
        settled: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.peer = peer
        self.failed = failed
        self.code = code
        self.settled = settled


class TransferTimeout(TransferError, TimeoutError):
    """What was waited for has not ended in the time allowed, and goes on. `settled` is False."""


def clipped(text: str, most: int = 64) -> str:
    """Text that a peer or a caller chose, for a message: printable ASCII, of at most about `most` characters."""
    return ascii(text if len(text) <= most else f"{text[:most]}...")[1:-1]


def quoted(name: str) -> str:
    """The name of a region or space, for a message: it may be a peer's choice, up to 256 characters of any script."""
    return f"'{clipped(name)}'"


def listed(names: Iterable[object], most: int = 5, *, show: Callable[[str], str] = clipped) -> str:
    """Names for a message: each clipped (or `quoted`), and no more than `most` of them."""
    every = [show(str(name)) for name in names]
    rest = f" and {len(every) - most} more" if len(every) > most else ""
    return ", ".join(every[:most]) + rest


def shown(value: Any) -> str:
    """`value` for a message: short, printable and quick, whatever a peer has sent."""
    if isinstance(value, str):
        return ascii(value) if len(value) <= 80 else f"{value[:80]!a}... of {len(value)} characters"
    if isinstance(value, int) and not isinstance(value, bool):
        return repr(value) if value.bit_length() <= 256 else f"an integer of {value.bit_length()} bits"
    return repr(value) if value is None or isinstance(value, (bool, float)) else f"a {type(value).__name__}"
