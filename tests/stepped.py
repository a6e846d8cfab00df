"""An engine that does one call when it is told to, for tests of transfers step by step."""

from __future__ import annotations

import threading
import time

from kvplan import engines
from kvplan.engines.outcome import Outcome


class Stepped(engines.LocalEngine):
    """Writes a chunk when told to, and returns what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.max_in_flight = 10
        self.steps: list[int] = []
        self.may = threading.Semaphore(0)
        self.free = False

    def step(self, code: int = 0) -> None:
        self.steps.append(code)
        self.may.release()

    def let_go(self) -> None:
        """Do all that comes, without being told to."""
        self.free = True
        for _ in range(100):
            self.step()

    def _move(self, session, chunk, op):
        if not self.free:
            self.may.acquire()
        code = self.steps.pop(0) if self.steps else 0
        return Outcome(code) if code else super()._move(session, chunk, op)


def until(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)
