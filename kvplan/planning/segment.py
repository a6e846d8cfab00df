"""Segments: stretches of descriptors, or of what is made of them, between the same two kinds of memory."""

from __future__ import annotations

import dataclasses

from ..layout import Memory


@dataclasses.dataclass(frozen=True)
class Segment:
    """Descriptors [start, stop) of a plan: all share one source memory and one destination memory."""

    src_memory: Memory
    dst_memory: Memory
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start
