"""How calls and transfers end, and when: what engines and transfers tell each other."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Generator
from typing import Any, Literal

Op = Literal["write", "read"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How one call of an engine ended. A value, not an exception: no traceback keeps the engine's objects alive.

    Args:
        code: 0, or what the engine said.
        started: False when the engine surely took nothing of it.
        finished: for a call that timed out while the engine goes on with it: a function to poll. True: all arrived.
            False: still running. RuntimeError: it cannot be known any more. One thread calls it at a time.
    """

    code: Any = 0
    started: bool = True
    finished: Callable[[], bool] | None = None


@dataclasses.dataclass
class Times:
    """When things happened to a transfer, by `time.monotonic()`, in seconds; None for what has not happened.

    Each is written down when it happens, however late somebody looks.

    Attributes:
        submitted: `submit` was called.
        first_call: the engine was given its first descriptors.
        last_byte: the call that brought its last byte ended. None where it did not arrive whole.
        ended: it arrived, failed or was cancelled.
        settled: it was known from then on that nothing of it is under way.
    """

    submitted: float
    first_call: float | None = None
    last_byte: float | None = None
    ended: float | None = None
    settled: float | None = None


def waiter(of: Any) -> Generator[Any, None, None]:
    """Suspend the running task until `of`, which has `add_done_callback`, has ended."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def resolve() -> None:
        if not future.done():
            future.set_result(None)

    def ended(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(resolve)

    of.add_done_callback(ended)
    yield from future.__await__()
