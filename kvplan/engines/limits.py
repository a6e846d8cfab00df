"""Time limits, as every call that waits takes them."""

from __future__ import annotations

import math
import numbers
import threading
import time

from ..errors import shown

_LONGEST = threading.TIMEOUT_MAX  # seconds; what Python's locks can wait for at once


def seconds(value: float | None, what: str) -> float | None:
    """A time limit: seconds from 0 on, or None where there is none. Infinity means no limit as well.

    Raises:
        ValueError: `value` is negative, NaN, or no number; `what` is how the message names it.
    """
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(f"{what} must be a number of seconds, or None for no limit, not {shown(value)}")
    number = float(value)
    if math.isnan(number) or number < 0:
        raise ValueError(f"{what} is {number}; it must be 0 seconds or more, or None for no limit")
    return number if number < _LONGEST else None


def deadline_of(limit: float | None) -> float:
    """The moment, by `time.monotonic`, at which a limit from `seconds` has passed; infinity where there is none."""
    return math.inf if limit is None else time.monotonic() + limit


def left(deadline: float) -> float | None:
    """Seconds until a deadline, 0 once it has passed; None where there is none, as Python's locks take it."""
    return None if deadline == math.inf else max(0.0, deadline - time.monotonic())
