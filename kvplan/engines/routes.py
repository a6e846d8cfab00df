"""Which descriptors of a plan go straight to the peer, and which by way of staging."""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..planning import Plan
from ..planning.packed import Packed, pack
from .costs import Cost
from .outcome import Op
from .pieces import Chunk, Piece

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..planning import Segment
    from .check import Spans
    from .staging import Staging

Pack = Literal["auto", "never", "always"]


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Descriptors [start, stop) of a plan, in one segment, that go one way.

    Attributes:
        start, stop: numbers of descriptors.
        packed: whether they go by way of staging.
        merged: descriptors that staging would leave of them for the engine.
        nbytes: bytes in all.
    """

    start: int
    stop: int
    packed: bool
    merged: int
    nbytes: int

    def __len__(self) -> int:
        return self.stop - self.start


def stretches(plan: Plan, op: Op, how: Pack, cost: Cost | None, piece: int) -> list[Stretch]:
    """Cut a plan into stretches, in order, each of which goes one way.

    "auto" packs what is smaller than s* (`Cost.smaller_than`), where there is more than N* of it (`Cost.more_than`) and
    the model says that it is faster. It looks at stretches of descriptors that are smaller, or not, and not at entries:
    plans of batches and plans that were not made by a pairing do not know their entries, and within an entry runs make
    descriptors of many sizes. Larger ones between two such stretches go along where copying them takes less than
    `Cost.fixed`, which is about what another stretch costs.
    """
    found: list[Stretch] = []
    for segment in plan.segments:
        if not len(segment):
            continue
        table = plan.table.numpy()[:, segment.start : segment.stop]
        if how == "never" or (cost is None and how == "auto"):
            packs, cuts = np.zeros(1, bool), np.array([0, len(segment)])
        elif how == "always":
            packs, cuts = np.ones(1, bool), np.array([0, len(segment)])
        else:
            assert cost is not None
            packs, cuts = _small(table[2], cost)
        side = table[1] if op == "write" else table[0]
        joins = np.zeros(len(segment), np.int64)  # a descriptor goes on where the one before it ends
        joins[1:] = side[1:] == side[:-1] + table[2, :-1]
        for packed, start, stop in zip(packs.tolist(), cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
            nbytes = int(table[2, start:stop].sum())
            merged = stop - start - int(joins[start + 1 : stop].sum())
            if packed and how == "auto":
                assert cost is not None
                packed = stop - start > cost.more_than and cost.packed(merged, nbytes, piece) < cost.direct(
                    stop - start, nbytes
                )
            new = Stretch(segment.start + start, segment.start + stop, packed, merged, nbytes)
            if found and not (packed or found[-1].packed) and start > 0:  # both straight, in one segment
                old = found.pop()
                new = Stretch(old.start, new.stop, False, old.merged + merged, old.nbytes + nbytes)
            found.append(new)
    return found


def _small(nbytes: np.ndarray, cost: Cost) -> tuple[np.ndarray, np.ndarray]:
    """Stretches of descriptors that are smaller than s*, and others: bool [S], whether they are; int [S + 1] cuts."""
    small = nbytes < cost.smaller_than
    cuts = _cuts(small)
    sizes = np.add.reduceat(nbytes, cuts[:-1])
    along = sizes < cost.fixed * cost.copy
    along[0] = along[-1] = False  # they must lie between two smaller ones
    small = np.repeat(small[cuts[:-1]] | along, np.diff(cuts))
    cuts = _cuts(small)
    return small[cuts[:-1]], cuts


def _cuts(values: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1, [len(values)]))


class Work(Iterable[Chunk]):
    """What a transfer by way of staging gives to the engine, in plan order. May be gone through more than once.

    Args:
        plan: the engine's own copy.
        staging: where pieces lie.
        parts: of `stretches`.
        peer: what the peer has declared: no merged descriptor goes on from one span of it into another.
        chunks: cuts a plan into what one call of the engine takes.
        most: descriptors of a piece that a call may take; None: no limit.
    """

    def __init__(
        self,
        plan: Plan,
        op: Op,
        staging: Staging,
        parts: list[Stretch],
        peer: Spans,
        chunks: Callable[[Plan], Iterator[Plan]],
        most: int | None,
    ) -> None:
        self._plan, self._op, self._staging = plan, op, staging
        self._chunks, self._most = chunks, most
        self._parts: list[tuple[Stretch, Packed | None]] = []
        for part in parts:
            packed = None
            if part.packed:
                (segment,) = _cut(plan, part.start, part.stop).segments
                memory = segment.dst_memory if op == "write" else segment.src_memory
                table = plan.table[:, part.start : part.stop]
                packed = pack(table, op, staging.piece, [segment], array("Q", peer.bases(memory).tobytes()))
            self._parts.append((part, packed))

    def __iter__(self) -> Iterator[Chunk]:
        for part, packed in self._parts:
            if packed is None:
                yield from self._chunks(_cut(self._plan, part.start, part.stop))
            else:
                yield from self._pieces(part, packed)

    def _pieces(self, part: Stretch, packed: Packed) -> Iterator[Piece]:
        plan, op = self._plan, self._op
        (segment,) = packed.segments
        ends = np.cumsum(plan.table[2, part.start : part.stop].numpy())  # byte of staging behind each descriptor
        side = 1 if op == "write" else 0  # row of the copies in which staging is
        bounds = zip(*packed.pieces.tolist(), strict=True)
        for (copy, move, first), (copy_stop, move_stop, stop) in itertools.pairwise(bounds):
            # Descriptors that begin before the piece ends, and those that end within it. One that is larger than a
            # piece lies in several.
            begun = int(np.searchsorted(ends, stop, side="left")) + 1
            whole = int(np.searchsorted(ends, stop, side="right"))
            at = int(np.searchsorted(ends, first, side="right"))
            copies = packed.copies[:, copy:copy_stop].clone()
            moves = packed.merged[:, move:move_stop].clone()
            copies[side] -= first
            moves[1 - side] -= first
            yield Piece(
                self._staging,
                op,
                segment,
                copies,
                moves,
                _cut(plan, part.start + at, part.start + begun),
                nbytes=stop - first,
                reached=part.start + begun,
                complete=part.start + whole,
                most=self._most,
            )


def _cut(plan: Plan, start: int, stop: int) -> Plan:
    """Descriptors [start, stop), a view."""
    segments: list[Segment] = []
    for segment in plan.segments:
        first, end = max(segment.start, start), min(segment.stop, stop)
        if first < end:
            segments.append(dataclasses.replace(segment, start=first - start, stop=end - start))
    return Plan(plan.table[:, start:stop], segments, plan.src_layout, plan.dst_layout)


def words(parts: list[Stretch], cost: Cost | None, piece: int, staged: bool) -> list[str]:
    """Lines that say which way a plan goes, for `Plan.explain`."""
    if cost is None:
        return ["it goes straight to the peer: for this engine nothing says that staging is faster"]
    lines = []
    for part in parts:
        mean = part.nbytes // len(part)
        what = f"descriptors {part.start} to {part.stop - 1} ({len(part)} of {mean} bytes on average)"
        if not part.packed:
            lines.append(f"{what}: straight to the peer")
            continue
        direct = cost.direct(len(part), part.nbytes)
        packed = cost.packed(part.merged, part.nbytes, piece)
        gain = f"about {1e3 * packed:.3g} ms, {1e3 * direct:.3g} ms without"
        if staged:
            lines.append(f"{what}: by way of staging, {part.merged} descriptors for the engine, {gain}")
        else:
            lines.append(
                f"{what}: straight to the peer, which is slow. WARNING: tiny pieces, and no staging: with "
                f"submit(..., staging=) {part.merged} descriptors for the engine, {gain}"
            )
    return lines
