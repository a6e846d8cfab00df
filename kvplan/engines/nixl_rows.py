"""The segments of a plan as rows that NIXL takes, and which row it must mean where it refuses them."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .nixl_metadata import Metadata

if TYPE_CHECKING:
    from ..layout import Layout, Memory
    from ..planning import Plan, Segment

Side: TypeAlias = "tuple[np.ndarray, Memory, Layout | None]"  # NIXL's rows, memory, what is declared there


def sides(chunk: Plan, segment: Segment) -> tuple[Side, Side]:
    """Source and destination of a segment."""
    table = chunk.table.numpy().view(np.uint64)[:, segment.start : segment.stop]
    return (
        (_rows(table[0], table[2], segment.src_memory), segment.src_memory, chunk.src_layout),
        (_rows(table[1], table[2], segment.dst_memory), segment.dst_memory, chunk.dst_layout),
    )


def _rows(addresses: np.ndarray, nbytes: np.ndarray, memory: Memory) -> np.ndarray:
    """NIXL's rows, uint64 [N, 3]: address, bytes, device."""
    rows = np.empty((len(addresses), 3), np.uint64)
    rows[:, 0], rows[:, 1], rows[:, 2] = addresses, nbytes, memory.device
    return rows


def refusal(error: Exception, here: Side, there: Side, own: Metadata, peer: Metadata) -> str:
    """What NIXL said, and which descriptor it must mean: one that is not in what this engine or the peer registered."""
    for (rows, memory, layout), held, whose in ((here, own, "this engine"), (there, peer, peer.name)):
        number = held.outside(memory.kind, rows)
        if number >= 0:
            address, nbytes = map(int, rows[number, :2])
            regions = layout.regions if layout is not None else ()
            name = next(
                (
                    f" of region {r.name!r}, layer {r.layer},"
                    for r in regions
                    if r.memory == memory and 0 <= address - r.base < r.span_bytes
                ),
                "",
            )
            return f"{error}: {memory} {address:#x}, {nbytes} bytes{name} is not registered by {whose}"
    return f"{error}: NIXL does not take a transfer to {peer.name}"
