"""A plan in other forms that engines take: indices into prepared lists, and strided lists."""

from __future__ import annotations

import numpy as np
import torch

from ..errors import PlanError, quoted
from ..pairing import PairingTables

_INT32_END = 1 << 31


def _pages(pairing: PairingTables, side: int) -> np.ndarray:
    """For each entry, how many pages its regions have on one side (0: source, 1: destination)."""
    return np.array([min(pair[side].num_pages for pair in regions) for regions in pairing.regions], np.int64)


def _check_whole(pairing: PairingTables) -> None:
    for entry, regions in enumerate(pairing.regions):
        if not pairing.by_page(entry):
            source, destination = regions[0]
            raise PlanError(
                f"{source}: rows move to space {quoted(destination.space)}, not whole pages, so there is no list of "
                f"prepared pages"
            )


def prepared(pairing: PairingTables) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Pairing.prepared`."""
    _check_whole(pairing)
    entries = pairing.entries.numpy()
    lists = []
    for side, base, stride in ((0, 0, 1), (1, 2, 3)):
        counts = _pages(pairing, side)
        total = sum(counts.tolist())
        if total > _INT32_END:
            name = ("source", "destination")[side]
            raise PlanError(f"the {name} has {total} pages over all entries; int32 indices reach {_INT32_END}")
        first = np.cumsum(counts) - counts
        page = np.arange(total) - np.repeat(first, counts)
        table = np.empty((2, total), np.int64)
        table[0] = np.repeat(entries[:, base], counts) + page * np.repeat(entries[:, stride], counts)
        table[1] = np.repeat(entries[:, 4], counts)
        lists.append(torch.from_numpy(table))
    return lists[0], lists[1]


def indices(pairing: PairingTables, table: np.ndarray, cuts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Plan.indices`. `cuts`: those of `Plan.entry_cuts`."""
    _check_whole(pairing)
    entries = pairing.entries.numpy()
    descriptors = np.diff(cuts)
    # A run of pages is one descriptor: here each page counts.
    counts = table[2] // np.repeat(entries[:, 4], descriptors)
    total = int(counts.sum())
    within = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    sides = []
    for side, base, stride in ((0, 0, 1), (1, 2, 3)):
        pages = _pages(pairing, side)
        if sum(pages.tolist()) > _INT32_END:
            name = ("source", "destination")[side]
            raise PlanError(f"the {name} has {sum(pages.tolist())} pages over all entries; int32 reaches {_INT32_END}")
        # Differences of addresses are right modulo 2**64, and spans are below 2**63 bytes a region.
        offsets = (table[side] - np.repeat(entries[:, base], descriptors)).view(np.uint64)
        page = (offsets // np.repeat(entries[:, stride], descriptors).view(np.uint64)).view(np.int64)
        first = np.repeat(np.cumsum(pages) - pages, descriptors) + page
        sides.append(torch.from_numpy((np.repeat(first, counts) + within).astype(np.int32)))
    return sides[0], sides[1]


def strided(table: np.ndarray, stops: list[int]) -> tuple[torch.Tensor, list[int]]:
    """See `Plan.strided`. `stops`: where the segments end."""
    number = table.shape[1]
    steps = np.diff(table[:2], axis=1)
    foldable = (table[2, 1:] == table[2, :-1]) & (steps > 0).all(axis=0)
    foldable[[stop - 1 for stop in stops if 0 < stop < number]] = False
    same = np.zeros(max(number - 1, 0), bool)  # the step is the one before it
    same[1:] = foldable[1:] & foldable[:-1] & (steps[:, 1:] == steps[:, :-1]).all(axis=0)
    starts = np.flatnonzero(foldable & ~same)  # of stretches of equal steps
    ends = np.flatnonzero(foldable & ~np.append(same[1:], False)) + 1
    lengths = ends - starts
    # A stretch of n steps joins n + 1 descriptors, or n where the stretch before it has taken the first. A stretch of
    # one step whose first is taken joins none. So `taken` alternates along stretches of one step, and is true behind
    # any longer one; a stretch that does not touch the one before it starts afresh.
    places = np.arange(len(starts))
    touches = np.zeros(len(starts), bool)
    touches[1:] = starts[1:] == ends[:-1]
    resets = ~touches
    resets[1:] |= lengths[:-1] > 1
    last = np.maximum.accumulate(np.where(resets, places, 0))
    taken = touches[last] ^ ((places - last) % 2 == 1)
    joined = lengths + 1 - taken
    real = joined > 1
    first, joined = starts[real] + taken[real], joined[real]
    covered = np.zeros(number + 1, np.int64)
    np.add.at(covered, first, 1)
    np.add.at(covered, first + joined, -1)
    alone = np.flatnonzero(np.cumsum(covered)[:number] == 0)
    at = np.concatenate((first, alone))
    order = np.argsort(at, kind="stable")
    out = np.zeros((6, len(at)), np.int64)
    out[:3] = table[:, at[order]]
    out[3:5, : len(first)] = steps[:, first]
    out[5, : len(first)], out[5, len(first) :] = joined, 1
    out[3:] = out[3:, order]
    return torch.from_numpy(out), [0, *np.searchsorted(at[order], stops).tolist()]
