"""What kvplan took over, and what it left: counted, and each said once."""

from __future__ import annotations

import logging
import threading
from collections import Counter

logger = logging.getLogger("kvplan.sglang")


class Notes:
    """Counts of planned calls, of calls left to SGLang, and of refused rooms.

    Attributes:
        planned: calls by function.
        left: calls that SGLang planned, by (function, reason).
        refused: how many times a room was refused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.planned: Counter[str] = Counter()
        self.left: Counter[tuple[str, str]] = Counter()
        self.refused = 0

    def plan(self, function: str) -> None:
        """Count a call that kvplan has planned. The first of each function is logged."""
        self.planned[function] += 1
        if self.planned[function] == 1:
            logger.info("kvplan has planned its first %s", function)

    def leave(self, function: str, reason: str) -> None:
        """Count a call that is left to SGLang. Each reason is logged once."""
        with self._lock:
            self.left[function, reason] += 1
            first = self.left[function, reason] == 1
        if first:
            logger.warning("kvplan leaves %s to SGLang: %s", function, reason)

    def refuse(self, room: int | None, reason: str) -> None:
        """Count and log a room that is refused."""
        with self._lock:
            self.refused += 1
        logger.error("kvplan refuses room %s: %s", room, reason)
