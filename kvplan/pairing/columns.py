"""All ranks of a cluster as columns: a number for each kind of region, so that equal ones are looked at once."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Sequence

import numpy as np

from ..errors import PairingError
from ..layout import Layout, Region
from .overlap import shared_spaces
from .shares import shares
from .slices import slices
from .tables import PairingTables

Key = tuple[str, int]

# Where a region lies says nothing about what it holds.
_PLACE = ("name", "layer", "base", "num_pages", "space", "memory", "replica", "allocation", "shape")
_kind = operator.attrgetter(*(field.name for field in dataclasses.fields(Region) if field.name not in _PLACE))


@dataclasses.dataclass(frozen=True)
class Problem:
    """Keys whose regions are alike on every rank, so that one proof serves all of them.

    Attributes:
        keys: (name, layer) of each.
        holders: {number of a kind: prefill ranks that hold a region of it}.
        senders: the same of the ranks that send it: of several replicas, one.
        receivers: {number of a kind: decode ranks that hold a region of it}.
    """

    keys: list[Key]
    holders: dict[int, list[int]]
    senders: dict[int, list[int]]
    receivers: dict[int, list[int]]


class Columns:
    """The ranks of both sides, each a row of kinds, one column a key.

    Attributes:
        kinds: a region of each kind.
        keys: all (name, layer), sorted.
        held: int32 [prefill ranks, keys]: kind of the region that the rank holds, or -1.
        sent: as `held`, -1 also where another rank sends the region.
        written: as `held`, of the decode ranks.
    """

    def __init__(self, prefill: Sequence[Layout], decode: Sequence[Layout]) -> None:
        self.prefill, self.decode = prefill, decode
        self.keys: list[Key] = sorted({key for layout in (*prefill, *decode) for key in layout.by_key})
        self.kinds: list[Region] = []
        number = {key: column for column, key in enumerate(self.keys)}
        seen: dict[tuple[object, ...], int] = {}

        def codes(layouts: Sequence[Layout]) -> np.ndarray:
            table = np.full((len(layouts), len(self.keys)), -1, np.int32)
            for row, layout in zip(table, layouts, strict=True):
                for region in layout.regions:
                    kind = seen.setdefault(_kind(region), len(seen))
                    if kind == len(self.kinds):
                        self.kinds.append(region)
                    row[number[region.key]] = kind
            return table

        self.held, self.written = codes(prefill), codes(decode)
        mine = np.zeros(self.held.shape, bool)
        for row, layout in zip(mine, prefill, strict=True):
            row[[number[key] for key in shares(layout)]] = True
        self.sent = np.where(mine, self.held, -1)

    def problems(self) -> Iterator[Problem]:
        """The keys that some decode rank holds, put together where all ranks are alike."""
        there = _there(self.written)
        if not there:
            return
        ours = 2 * self.held + (self.sent >= 0)  # what is held, and whether it is sent, as one number
        both = np.concatenate((ours, self.written))[:, there]
        distinct, which = np.unique(both, axis=1, return_inverse=True)
        for column in range(distinct.shape[1]):
            alike = [self.keys[there[number]] for number in np.flatnonzero(which.reshape(-1) == column).tolist()]
            ours, written = np.split(distinct[:, column], [len(self.prefill)])
            held, sent = ours >> 1, np.where(ours & 1, ours >> 1, -1)
            yield Problem(alike, _ranks_by_kind(held), _ranks_by_kind(sent), _ranks_by_kind(written))

    def check_pairs(self) -> None:
        """Whatever `pair` would refuse for two of the ranks, unsent regions aside.

        Raises:
            PairingError: as `pair`, with the numbers of the ranks.
        """
        self._check_geometry()
        sources = {self.keys[number] for number in _there(self.held)}
        for rank, layout in enumerate(self.decode):
            try:
                shared_spaces(layout, sources)
            except PairingError as error:
                raise PairingError(f"decode rank {rank}: {error}") from None
        self._check_source_lists()

    def _check_geometry(self) -> None:
        """Each two kinds that meet must be movable row for row, or page for page."""
        meet: set[tuple[int, int]] = set()
        done: set[tuple[object, ...]] = set()
        shapes = [_shape(kind) for kind in self.kinds]
        both = np.concatenate((self.held, self.written))
        for column in np.unique(both, axis=1).T:
            held, written = (np.unique(part) for part in np.split(column, [len(self.prefill)]))
            for src in held[held >= 0].tolist():
                for dst in written[written >= 0].tolist():
                    if (src, dst) in meet:
                        continue
                    meet.add((src, dst))
                    one, other = self.kinds[src], self.kinds[dst]
                    alike = one.heads == other.heads, one.interleave == other.interleave
                    case = shapes[src], shapes[dst], alike
                    if case not in done:
                        done.add(case)
                        self._check_two(src, dst)

    def _check_two(self, src: int, dst: int) -> None:
        """Whether regions of these two kinds can be moved, asked of the first two that meet."""
        column = int(((self.held == src).any(axis=0) & (self.written == dst).any(axis=0)).argmax())
        i, j = int((self.held[:, column] == src).argmax()), int((self.written[:, column] == dst).argmax())
        key = self.keys[column]
        try:
            slices(self.prefill[i].by_key[key], self.decode[j].by_key[key])
        except PairingError as error:
            raise PairingError(f"prefill rank {i} and decode rank {j}: {error}") from None

    def _check_source_lists(self) -> None:
        """A destination space takes one list of source pages. Ranks that number pages alike are looked at once."""
        lists: dict[tuple[str, int], int] = {}
        spaces: dict[str, int] = {}
        src = np.full(self.held.shape, -1, np.int32)
        dst = np.full(self.written.shape, -1, np.int32)
        column = {key: number for number, key in enumerate(self.keys)}
        for row, sent, layout in zip(src, self.sent, self.prefill, strict=True):
            for region in layout.regions:
                number = column[region.key]
                if sent[number] >= 0:
                    row[number] = lists.setdefault((region.space, region.tokens or 0), len(lists))
        for row, layout in zip(dst, self.decode, strict=True):
            for region in layout.regions:
                row[column[region.key]] = spaces.setdefault(region.space, len(spaces))
        if len(lists) < 2:
            return
        src_rows, src_which = np.unique(src, axis=0, return_inverse=True)
        dst_rows, dst_which = np.unique(dst, axis=0, return_inverse=True)
        for a, ours in enumerate(src_rows):
            for b, theirs in enumerate(dst_rows):
                met = (ours >= 0) & (theirs >= 0)
                pairs = np.unique(np.stack((theirs[met], ours[met])), axis=1)
                if len(np.unique(pairs[0])) == pairs.shape[1]:
                    continue
                # Two lists for one space, if the ranks share heads and rows of both: only the tables say that.
                for i in np.flatnonzero(src_which.reshape(-1) == a).tolist():
                    for j in np.flatnonzero(dst_which.reshape(-1) == b).tolist():
                        self._check_tables(i, j)

    def _check_tables(self, i: int, j: int) -> None:
        src, dst = self.prefill[i], self.decode[j]
        mine = shares(src)
        met = [region for region in src.regions if region.key in mine and region.key in dst.by_key]
        pieces = [piece for region in met for piece in slices(region, dst.by_key[region.key])]
        try:
            PairingTables(src, dst, pieces)
        except PairingError as error:
            raise PairingError(f"prefill rank {i} and decode rank {j}: {error}") from None


def _shape(region: Region) -> tuple[object, ...]:
    """What decides, beside equal heads and equal interleaves, whether two regions can be moved row for row."""
    heads = (region.heads.stop - region.heads.start, region.heads.total) if region.heads else None
    fields = dict(zip(_KIND_FIELDS, _kind(region), strict=True))
    size = (region.interleave.size, region.interleave.run) if region.interleave else (1, 1)
    return (*(value for name, value in fields.items() if name not in ("heads", "interleave")), heads, size)


_KIND_FIELDS = tuple(field.name for field in dataclasses.fields(Region) if field.name not in _PLACE)


def _there(table: np.ndarray) -> list[int]:
    """Columns in which some rank has a region."""
    found: list[int] = np.flatnonzero((table >= 0).any(axis=0)).tolist()
    return found


def _ranks_by_kind(column: np.ndarray) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for rank, kind in enumerate(column.tolist()):
        if kind >= 0:
            found.setdefault(kind, []).append(rank)
    return found
