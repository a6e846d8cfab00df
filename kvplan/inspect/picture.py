"""A picture of a plan: source pages above, destination pages of each space below, and the runs between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..layout import Region
    from ..planning import Pairing, Plan

_MOST_RUNS = 2000  # more lines than that are one grey area


def _one_region(pairing: Pairing, plan: Plan, space: str) -> tuple[Region, Region, np.ndarray] | None:
    """The first pair of regions in `space` and its descriptors, uint64 [3, n]; all regions of a space look alike."""
    table = plan.table.numpy().view(np.uint64)
    for regions in pairing.regions:
        source, destination = regions[0]
        if destination.space == space:
            start, stop = np.uint64(destination.base), np.uint64(destination.base + destination.span_bytes - 1)
            return source, destination, table[:, (table[1] >= start) & (table[1] <= stop)]
    return None


def _pages(address: np.ndarray, nbytes: np.ndarray, region: Region) -> tuple[np.ndarray, np.ndarray]:
    """First page and the page behind the last of each descriptor in `region`: int64 [n] each."""
    start = (address - np.uint64(region.base)).astype(np.int64)
    stride = region.page_stride
    return start // stride, -(-(start + nbytes.astype(np.int64)) // stride)


def _runs(here: tuple[np.ndarray, np.ndarray], there: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
    """Descriptors of one page, and of pages that follow one another on both sides, as one: int64 [runs, 4].

    Each is (first source page, the one behind the last, the same of the destination). A slice of heads is many
    descriptors a page, drawn as that page.
    """
    goes_on = np.ones(len(here[0]) - 1, dtype=bool)
    for start, stop in (here, there):
        goes_on &= (start[1:] == stop[:-1]) | (start[1:] == stop[:-1] - 1)
    first = np.r_[0, np.flatnonzero(~goes_on) + 1]
    last = np.r_[first[1:] - 1, len(goes_on)]
    return np.stack([here[0][first], here[1][last], there[0][first], there[1][last]], axis=1)


def draw(pairing: Pairing, plan: Plan, path: str) -> None:
    """Write the picture as PNG. One column a destination space, by the first region of it.

    Raises:
        ImportError: matplotlib is missing; the message says how to install it.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    spaces = pairing.space_names or ("nothing",)
    figure, columns = pyplot.subplots(
        1, len(spaces), figsize=(6 * len(spaces), 4), constrained_layout=True, squeeze=False
    )
    for axes, space in zip(columns[0], spaces, strict=True):
        found = _one_region(pairing, plan, space)
        axes.set_yticks([0, 1], ["destination", "source"])
        axes.set_xlabel("destination page id")
        if found is None or not found[2].shape[1]:
            axes.set_title(f"space {space!r}: nothing is sent")
            continue
        source, destination, (src, dst, nbytes) = found
        here = _pages(src, nbytes, source)
        there = _pages(dst, nbytes, destination)
        runs = _runs(here, there)
        # One axis a side: page ids of the source above, of the destination below, each as wide as its ids need.
        left, width = int(there[0].min()), int(there[1].max() - there[0].min())
        source_left, source_width = int(here[0].min()), int(here[1].max() - here[0].min())
        above = axes.twiny()
        above.set_xlim(source_left, source_left + source_width)
        above.set_xlabel("source page id")
        axes.set_xlim(left, left + width)
        for number, (first, last, start, stop) in enumerate(runs[:: max(1, len(runs) // _MOST_RUNS)]):
            first, last = (left + (page - source_left) * width / source_width for page in (first, last))
            colour = f"C{number % 10}"
            axes.fill([first, last, stop, start], [1, 1, 0, 0], color=colour, alpha=0.3, linewidth=0)
            axes.plot([first, last], [1, 1], color=colour, linewidth=6, solid_capstyle="butt")
            axes.plot([start, stop], [0, 0], color=colour, linewidth=6, solid_capstyle="butt")
        axes.set_title(
            f"{source.name} layer {source.layer}: space {source.space!r} -> {space!r}\n"
            f"{len(runs)} runs of pages, {len(src)} descriptors, {int(nbytes.sum())} bytes",
            fontsize=9,
        )
        axes.set_ylim(-0.2, 1.2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
