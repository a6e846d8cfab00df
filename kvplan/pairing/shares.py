"""What one rank holds and sends, before anybody asks to whom: its share of the regions, and of the rows."""

from __future__ import annotations

import numpy as np

from ..layout import Layout, Region


def shares(src: Layout) -> set[tuple[str, int]]:
    """Keys of the regions that this source rank sends: of those that equally many ranks hold, every count-th."""
    alike: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for region in src.regions:
        alike.setdefault(region.replica or src.replica, []).append(region.key)
    return {key for (index, count), keys in alike.items() for key in sorted(keys)[index::count]}


def period(region: Region) -> int:
    """After how many row positions the pattern of the rows held repeats."""
    return region.interleave.size * region.run_rows if region.interleave else 1


def residues(region: Region, span: int) -> np.ndarray:
    """Which of the row positions 0 to span - 1 are held, bool [span]; `span` is a multiple of `period`."""
    share, positions = region.interleave, np.arange(span)
    return positions // region.run_rows % share.size == share.rank if share else positions >= 0
