"""Packing: a plan of many small descriptors becomes local copies and a few large descriptors, by way of staging."""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Sequence

import torch

from .. import ops
from ..errors import PlanError, shown
from ..ops import backend
from .segment import Segment

PIECE = 16 << 20  #: bytes of a piece by default
_OPS = ("write", "read")


@dataclasses.dataclass(frozen=True)
class Packed:
    """A plan whose bytes go through staging: local copies, and fewer descriptors for the engine.

    Byte k of the plan, in plan order, is byte k of staging. It is cut into *pieces*, which are moved one after another,
    so that the copies of one can go on while another travels. On the side of staging, an address in these tables is an
    offset: add the address at which staging begins. (A piece may also lie elsewhere in staging: then subtract the
    offset with which it begins.)

    Attributes:
        copies: int64 [3, C]: src, dst, nbytes of local copies.
        merged: int64 [3, M]: src, dst, nbytes of what the engine moves.
        pieces: int64 [3, P + 1]: the copy, the merged descriptor and the byte with which each piece begins. The last
            column: C, M and the bytes in all.
        op: "write": copies gather, from the local source into staging, and merged goes from staging to the peer.
            "read": merged goes from the peer into staging, and copies scatter, from staging to the local destination.
        segments: cut the P pieces by memory of source and destination, as the segments of the plan do: piece k of a
            segment has start <= k < stop. Those of no bytes are left out.
        descriptors: descriptors of the plan.
        piece: bytes of a piece, at most.
    """

    copies: torch.Tensor
    merged: torch.Tensor
    pieces: torch.Tensor
    op: str
    segments: tuple[Segment, ...]
    descriptors: int
    piece: int

    def __len__(self) -> int:
        """Pieces."""
        return self.pieces.shape[1] - 1

    @property
    def total_bytes(self) -> int:
        """Bytes moved in all."""
        return int(self.pieces[2, -1])

    def explain(self) -> str:
        """In words: what is copied here, what the engine moves, and in how many pieces."""
        copied = _counted(self.copies.shape[1], "copy", "copies")
        moved = _counted(self.merged.shape[1], "descriptor")
        total, count = self.total_bytes, _counted(self.descriptors, "descriptor")
        if self.op == "write":
            lines = [f"write of {count}, {total} bytes: {copied} into staging here, then {moved} into the peer"]
        else:
            lines = [f"read of {count}, {total} bytes: {moved} from the peer into staging, then {copied} from it here"]
        columns = self.pieces.tolist()
        for segment in self.segments:
            copies, merged, nbytes = (row[segment.stop] - row[segment.start] for row in columns)
            lines.append(
                f"segment {segment.src_memory} -> {segment.dst_memory}: {_counted(len(segment), 'piece')} of at most "
                f"{self.piece} bytes, {nbytes} bytes: {_counted(copies, 'copy', 'copies')}, "
                f"{_counted(merged, 'descriptor')} of {nbytes // merged} bytes on average"
            )
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"Packed({self.op}, {self.descriptors} descriptors by way of staging: {self.copies.shape[1]} local copies, "
            f"{self.merged.shape[1]} descriptors for the engine, {len(self)} pieces of at most {self.piece} bytes)"
        )


def pack(
    table: torch.Tensor,
    op: str,
    piece: int,
    segments: Sequence[Segment],
    edges: array[int] | None = None,
) -> Packed:
    """Local copies and merged descriptors that together do what a table of descriptors says.

    "write": neighbours whose destinations follow one another become one merged descriptor. "read": neighbours whose
    sources do. Copies whose other side follows on become one as well. Nothing is sorted. A piece ends behind the last
    descriptor that fits into it; a descriptor larger than a piece is cut. No copy and no merged descriptor goes on over
    the end of a piece, and no piece over the end of a segment. Descriptors of no bytes are left out.

    On a GPU, the tensors are made there. This waits for the device three times, for numbers alone: they say how much
    there is of everything.

    Args:
        table: int64 [3, N], src address, dst address, nbytes; on the CPU or a GPU.
        op: "write" or "read".
        piece: bytes of a piece, at most; at least 1.
        segments: cut the N descriptors, in order and without gaps.
        edges: addresses of the peer's, ascending, over which no descriptors are merged: where memory begins that is
            registered apart.

    Raises:
        PlanError: a descriptor passes 64 bits, or the bytes in all pass 2^63; names it.
        ValueError: `op` or `piece` is none.
    """
    if op not in _OPS:
        raise ValueError(f"op is {shown(op)}; it must be 'write' or 'read'")
    if isinstance(piece, bool) or not isinstance(piece, int) or not 1 <= piece < 1 << 63:
        raise ValueError(f"piece is {shown(piece)}; it must be a number of bytes from 1 to 2^63 - 1")
    cuts = _cuts(segments, table.shape[1])
    bits = torch.frombuffer(edges, dtype=torch.int64) if edges else torch.empty(0, dtype=torch.int64)
    copies, merged, pieces, info = ops.pack(table, cuts, op == "read", piece, backend.send(bits, table.device))
    bad, *starts = info.tolist()
    if bad >= 0:
        raise _refusal(table, bad)
    parts = zip(segments, starts[:-1], starts[1:], strict=True)
    kept = tuple(dataclasses.replace(part, start=at, stop=end) for part, at, end in parts if end > at)
    return Packed(copies, merged, pieces, op, kept, table.shape[1], piece)


def _cuts(segments: Sequence[Segment], count: int) -> list[int]:
    cuts = [0]
    for segment in segments:
        if segment.start != cuts[-1] or segment.stop < segment.start:
            raise PlanError(
                f"segments must follow one another: descriptors {segment.start} to {segment.stop - 1} come behind "
                f"descriptor {cuts[-1] - 1}"
            )
        cuts.append(segment.stop)
    if cuts[-1] != count:
        raise PlanError(f"segments end at descriptor {cuts[-1]} of {count}")
    return cuts


def _refusal(table: torch.Tensor, number: int) -> PlanError:
    src, dst, nbytes = (word % (1 << 64) for word in table[:, number].tolist())
    what = f"descriptor {number}: {nbytes} bytes from {src:#x} to {dst:#x}"
    if max(src, dst) + nbytes > 1 << 64:
        return PlanError(f"{what} end behind the last 64-bit address")
    return PlanError(f"{what}: with them, the plan has 2^63 bytes or more")


def _counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number} {one if number == 1 else many or one + 's'}"
