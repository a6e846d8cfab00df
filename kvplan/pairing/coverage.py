"""The proof for a whole cluster: every head and row of every decode rank is written by exactly one prefill rank.

What a region holds is a set of heads times a set of row positions modulo a period. For each problem (regions that are
alike on all ranks) a grid counts who sends what: one row for each stretch of heads that no rank cuts, one column for
each row position modulo the least common period. What a decode rank holds of the grid must be 1 everywhere, and what a
prefill rank holds of it must be held by some decode rank.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..errors import PairingError, listed
from ..layout import Region
from .columns import Columns, Key, Problem
from .match import Unsent
from .shares import period, residues

_MOST_CELLS = 1 << 24  # of one grid: only periods that no deployment has need more
_MOST_FAULTS = 16  # of one kind of decode region


@dataclasses.dataclass(frozen=True)
class Part:
    """Heads [start, stop) of `total` (0: heads are not told apart), at the row positions that `rows` says."""

    start: int
    stop: int
    total: int
    rows: str

    def __str__(self) -> str:
        whole = not self.total or self.stop - self.start == self.total
        heads = "all heads" if whole else f"head {_span(self.start, self.stop)} of {self.total}"
        return f"{heads}, {self.rows}"


@dataclasses.dataclass(frozen=True)
class Fault:
    """What nobody sends, several prefill ranks send, or no decode rank holds.

    Attributes:
        keys: (name, layer) of the regions.
        part: which heads and rows of them.
        decode: ranks on which it is not written once; none where no decode rank holds it.
        senders: the prefill ranks that send it, none or two or more; or those that hold what no decode rank holds.
    """

    keys: list[Key]
    part: Part
    decode: list[int]
    senders: list[int]

    def __str__(self) -> str:
        if not self.decode:
            return (
                f"no decode rank holds {words_of(self.keys)}, {self.part}, which prefill rank {listed(self.senders)} "
                f"holds (name it in allow_unsent if it is not meant to be sent)"
            )
        who = f"prefill ranks {listed(self.senders)} all send" if self.senders else "nobody sends"
        if len(self.senders) == 2:
            who = f"prefill ranks {self.senders[0]} and {self.senders[1]} both send"
        return f"{who} {words_of(self.keys)}, {self.part}, to decode rank {listed(self.decode)}"


@dataclasses.dataclass(frozen=True)
class Flow:
    """What one prefill rank sends to one decode rank of regions that are alike."""

    prefill: int
    decode: int
    keys: list[Key]
    part: Part


def words_of(keys: Sequence[Key]) -> str:
    """(name, layer) pairs for a message: each name with its layers."""
    layers: dict[str, list[int]] = {}
    for name, layer in keys:
        layers.setdefault(name, []).append(layer)
    return listed(f"region {name} layer {_ranges(sorted(found))}" for name, found in layers.items())


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    shown = [f"{a}" if a == b else f"{a} to {b}" for a, b in parts[:4]]
    return ", ".join(shown) + (f" and {len(parts) - 4} more stretches" if len(parts) > 4 else "")


def _span(start: int, stop: int) -> str:
    return f"{start}" if stop == start + 1 else f"{start} to {stop - 1}"


def unsent_keys(columns: Columns, allowed: set[Unsent]) -> None:
    """Refuse source regions that no decode rank holds.

    Raises:
        PairingError: it names them, and a rank that has one.
    """
    lost = (columns.held >= 0).any(0) & ~(columns.written >= 0).any(0)
    keys = _others((columns.keys[number] for number in np.flatnonzero(lost).tolist()), allowed)
    if keys:
        rank = int(np.flatnonzero(columns.held[:, columns.keys.index(keys[0])] >= 0)[0])
        raise PairingError(
            f"no decode rank holds {words_of(keys)} of the prefill side (rank {rank} has the first). Name it in "
            f"allow_unsent if it is not meant to be sent"
        )


def faults(columns: Columns, allow_unsent: set[Unsent], allow_unwritten: set[Unsent]) -> list[Fault]:
    """All that is not written once, and what no decode rank holds of regions that some hold in part.

    Regions of `allow_unwritten` that nobody sends at all are left out, and what is lost of those of `allow_unsent`.

    Raises:
        PairingError: interleaves repeat together after so many rows that it cannot be decided.
    """
    found: list[Fault] = []
    for problem in columns.problems():
        written = problem.keys if problem.senders else _others(problem.keys, allow_unwritten)
        held = _others(problem.keys, allow_unsent)
        if written or (held and problem.holders):
            grid = _Grid(problem, columns.kinds)
            found += _not_once(problem, grid, written) if written else []
            found += _lost(problem, grid, held) if held else []
    return found


def _others(keys: Iterable[Key], allowed: set[Unsent]) -> list[Key]:
    return [key for key in keys if key not in allowed and key[0] not in allowed]


def flows(columns: Columns) -> Iterator[Flow]:
    """Who sends what to whom, in no order that matters."""
    for problem in columns.problems():
        grid = _Grid(problem, columns.kinds)
        for src, senders in problem.senders.items():
            for dst, receivers in problem.receivers.items():
                part = grid.meeting(src, dst)
                if part is not None:
                    for i in senders:
                        for j in receivers:
                            yield Flow(i, j, problem.keys, part)


class _Grid:
    """Heads, cut wherever a rank cuts them, times row positions modulo the least common period."""

    def __init__(self, problem: Problem, kinds: Sequence[Region]) -> None:
        self.kinds = kinds
        numbers = [*problem.holders, *problem.receivers]
        regions = [kinds[number] for number in numbers]
        self.total = math.lcm(*(region.heads.total for region in regions if region.heads))
        self.told_apart = any(region.heads for region in regions)
        self.cuts = sorted({edge for region in regions for edge in self._edges(region)})
        self.span = math.lcm(*(period(region) for region in regions))
        if self.span * (len(self.cuts) - 1) > _MOST_CELLS:
            sizes = sorted({period(region) for region in regions})
            raise PairingError(
                f"cannot decide whether {words_of(problem.keys)} is written once: interleaves of {listed(sizes)} "
                f"repeat together only after {self.span} rows"
            )
        self.shape = len(self.cuts) - 1, self.span
        self.rows = {number: residues(kinds[number], self.span) for number in numbers}

    def _edges(self, region: Region) -> tuple[int, int]:
        heads = region.heads
        if heads is None:
            return 0, self.total
        return heads.start * self.total // heads.total, heads.stop * self.total // heads.total

    def cells(self, kind: int) -> tuple[slice, np.ndarray]:
        """What a region of this kind holds: rows and columns of the grid."""
        start, stop = self._edges(self.kinds[kind])
        return slice(bisect_left(self.cuts, start), bisect_left(self.cuts, stop)), self.rows[kind]

    def part(self, heads: slice, rows: np.ndarray, held: np.ndarray, total: int) -> Part:
        """Rows and columns of the grid in words, in heads of `total`, where `held` are all rows of the decode rank."""
        start, stop = self.cuts[heads.start] * total // self.total, -(-self.cuts[heads.stop] * total // self.total)
        return Part(start, stop, total if self.told_apart else 0, _rows_in_words(rows, held))

    def total_of(self, kind: int) -> int:
        """Heads in all, as a region of this kind counts them."""
        heads = self.kinds[kind].heads
        return heads.total if heads else self.total

    def meeting(self, src: int, dst: int) -> Part | None:
        """What both hold."""
        (ours, our_rows), (theirs, their_rows) = self.cells(src), self.cells(dst)
        heads, rows = slice(max(ours.start, theirs.start), min(ours.stop, theirs.stop)), our_rows & their_rows
        if heads.start >= heads.stop or not rows.any():
            return None
        return self.part(heads, rows, their_rows, self.total_of(dst))


def _rows_in_words(rows: np.ndarray, held: np.ndarray) -> str:
    if rows.all():
        return "all rows"
    span = len(rows)
    every = next(n for n in range(1, span + 1) if span % n == 0 and (rows.reshape(-1, n) == rows[:n]).all())
    places = np.flatnonzero(rows[:every]).tolist()
    text = f"rows at positions {listed(places, 4)} modulo {every}"
    return f"all its rows ({text})" if (rows == held).all() else text


def _not_once(problem: Problem, grid: _Grid, keys: list[Key]) -> Iterator[Fault]:
    """What a decode rank holds, and not exactly one prefill rank sends."""
    counts = np.zeros(grid.shape, np.int32)
    for kind, ranks in problem.senders.items():
        heads, rows = grid.cells(kind)
        counts[heads] += rows * np.int32(len(ranks))
    for kind, receivers in problem.receivers.items():
        heads, rows = grid.cells(kind)
        wrong = np.zeros(grid.shape, bool)
        wrong[heads] = (counts[heads] != 1) & rows
        for stretch, area, senders in _areas(grid, problem.senders, wrong):
            yield Fault(keys, grid.part(stretch, area, rows, grid.total_of(kind)), receivers, senders)


def _lost(problem: Problem, grid: _Grid, keys: list[Key]) -> Iterator[Fault]:
    """What a prefill rank holds, and no decode rank."""
    due = np.zeros(grid.shape, bool)
    for kind in problem.receivers:
        heads, rows = grid.cells(kind)
        due[heads] |= rows
    for kind in problem.holders:
        heads, rows = grid.cells(kind)
        lost = np.zeros(grid.shape, bool)
        lost[heads] = rows & ~due[heads]
        for stretch, area, holders in _areas(grid, problem.holders, lost):
            due[stretch] |= area  # of several kinds that hold it, it is named for the first
            yield Fault(keys, grid.part(stretch, area, rows, grid.total_of(kind)), [], holders)


def _areas(
    grid: _Grid, ranks: dict[int, list[int]], wrong: np.ndarray
) -> Iterator[tuple[slice, np.ndarray, list[int]]]:
    """The cells of `wrong`, cut into parts that the same of `ranks`, by kind, have: heads, rows, and these ranks."""
    for _ in range(_MOST_FAULTS):
        if not wrong.any():
            break
        cell = np.unravel_index(int(wrong.argmax()), wrong.shape)
        area, found = wrong.copy(), list[int]()
        for kind, of_kind in ranks.items():
            heads, rows = grid.cells(kind)
            there = np.zeros(grid.shape, bool)
            there[heads] = rows
            if there[cell]:
                found += of_kind
            area &= there == there[cell]
        stretch = _stretch(area)
        rows = area[stretch.start].copy()
        wrong[stretch] &= ~rows
        yield stretch, rows, sorted(found)


def _stretch(area: np.ndarray) -> slice:
    """The first rows of `area` that are equal and lie one after another."""
    start = int(area.any(1).argmax())
    stop = start + 1
    while stop < len(area) and (area[stop] == area[start]).all():
        stop += 1
    return slice(start, stop)


def refuse(found: Sequence[Fault], most: int = 5) -> None:
    """Raise what was found, as one error; nothing where nothing was.

    Raises:
        PairingError: names `most` of the faults, and counts the rest.
    """
    if found:
        rest = f"; and {len(found) - most} more" if len(found) > most else ""
        raise PairingError("; ".join(str(fault) for fault in found[:most]) + rest)
