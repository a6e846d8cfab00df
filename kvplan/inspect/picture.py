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
        axes.set_xlabel("page id")
        if found is None or not found[2].shape[1]:
            axes.set_title(f"space {space!r}: nothing is sent")
            continue
        source, destination, (src, dst, nbytes) = found
        runs = len(src)
        for number in range(0, runs, max(1, runs // _MOST_RUNS)):
            here = (int(src[number]) - source.base) / source.page_stride  # type: ignore[operator]
            there = (int(dst[number]) - destination.base) / destination.page_stride  # type: ignore[operator]
            # As wide as the run is on either side, padding left out.
            wide_here = int(nbytes[number]) / source.page_stride  # type: ignore[operator]
            wide_there = int(nbytes[number]) / destination.page_stride  # type: ignore[operator]
            colour = f"C{number % 10}"
            axes.fill(
                [here, here + wide_here, there + wide_there, there], [1, 1, 0, 0], color=colour, alpha=0.3, linewidth=0
            )
            axes.plot([here, here + wide_here], [1, 1], color=colour, linewidth=6, solid_capstyle="butt")
            axes.plot([there, there + wide_there], [0, 0], color=colour, linewidth=6, solid_capstyle="butt")
        axes.set_title(
            f"{source.name} layer {source.layer}: space {source.space!r} -> {space!r}\n"
            f"{runs} descriptors, {int(nbytes.sum())} bytes",
            fontsize=9,
        )
        axes.set_ylim(-0.2, 1.2)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
