"""python -m kvplan check: who sends what to whom in a whole cluster, and what is missing or sent twice."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ..errors import LayoutError, PairingError, clipped
from ..layout import Layout
from ..pairing import Columns, coverage
from ..pairing.words import ranges
from ..planning import Cluster
from ..planning.case import names_of

_MOST_ROWS = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of `python -m kvplan check`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
The file:
  {"prefill": [layout, ...], "decode": [layout, ...], "allow_unsent": [...], "allow_unwritten": [...]}
  prefill          all ranks that work on one request, in the form of Layout.to_dict()
  decode           all ranks that receive it, in the same form
  allow_unsent     optional: prefill regions that no decode rank need hold: "name" or ["name", layer]
  allow_unwritten  optional: decode regions that no prefill rank need hold, such as a decode-only draft model's

To write one, send each rank's layout.to_dict() to one place, and:
  json.dump({"prefill": prefill_dicts, "decode": decode_dicts}, open("cluster.json", "w"))

Printed: one line for equal parts. "prefill 0 to 3 -> decode 0, 1: k, v layer 0 to 31: head 2 of 8, all rows" means
that each of the prefill ranks sends that part to each of the decode ranks. Then what nobody sends, what several
ranks send, and what no decode rank holds.

Status: 0, every region, layer, head and row of every decode rank is written exactly once, and nothing of a prefill rank
is lost; 1, it is not so, or two ranks cannot be paired; 2, the file cannot be read, or the picture cannot be drawn."""
    parser.add_argument("file", metavar="CLUSTER.json", help="the layouts of all ranks; see below")
    parser.add_argument("--all", action="store_true", help=f"print every line, not only {_MOST_ROWS} of each kind")
    parser.add_argument("--picture", metavar="FILE", help="draw who sends what to whom (PNG, SVG or PDF, by the name)")


def load(path: str) -> Cluster:
    """Read the file of a cluster.

    Raises:
        OSError: it cannot be read.
        LayoutError: it holds something else, or a layout is wrong; names the side and the rank.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise LayoutError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise LayoutError(f"{path} is no JSON: {error}") from None
    known = {"prefill", "decode", "allow_unsent", "allow_unwritten"}
    if not isinstance(data, dict) or not {"prefill", "decode"} <= data.keys():
        raise LayoutError(f"{path} must hold an object with prefill and decode")
    if data.keys() - known:
        raise LayoutError(f"{path}: unknown fields {sorted(clipped(name) for name in data.keys() - known)}")
    allowed = [names_of(data, field, path) for field in ("allow_unsent", "allow_unwritten")]
    sides = [_layouts(data[side], side) for side in ("prefill", "decode")]
    return Cluster(*sides, allow_unsent=allowed[0], allow_unwritten=allowed[1])


def _layouts(given: Any, side: str) -> list[Layout]:
    if not isinstance(given, list) or not given:
        raise LayoutError(f"{side} must be a list of layouts, one a rank, and not empty")
    layouts = []
    for rank, data in enumerate(given):
        try:
            layouts.append(Layout.from_dict(data))
        except LayoutError as error:
            raise LayoutError(f"{side} rank {rank}: {error}") from None
    return layouts


Row = tuple[tuple[int, ...], tuple[int, ...], str]  # prefill ranks, decode ranks, what


def folded(flows: Iterable[coverage.Flow]) -> list[Row]:
    """Equal parts put together: each of these prefill ranks sends this to each of these decode ranks."""
    between: dict[tuple[int, int, str], list[coverage.Key]] = {}
    for flow in flows:
        between.setdefault((flow.prefill, flow.decode, str(flow.part)), []).extend(flow.keys)
    targets: dict[tuple[str, int], list[int]] = {}
    for (prefill, decode, part), keys in between.items():
        targets.setdefault((f"{_names_and_layers(keys)}: {part}", prefill), []).append(decode)
    senders: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for (what, prefill), decodes in targets.items():
        senders.setdefault((what, tuple(sorted(decodes))), []).append(prefill)
    return sorted((tuple(sorted(prefills)), decodes, what) for (what, decodes), prefills in senders.items())


def _names_and_layers(keys: Iterable[coverage.Key]) -> str:
    layers: dict[str, list[int]] = {}
    for name, layer in sorted(keys):
        layers.setdefault(name, []).append(layer)
    names: dict[str, list[str]] = {}
    for name, found in layers.items():
        names.setdefault(ranges(found), []).append(clipped(name))
    return "; ".join(f"{', '.join(found)} layer {text}" for text, found in names.items())


def main(args: argparse.Namespace) -> int:
    """Print who sends what to whom. 0: all is written once; 1: it is not; 2: the file cannot be read."""
    try:
        cluster = load(args.file)
    except (OSError, LayoutError) as error:
        print(f"kvplan check: {error}", file=sys.stderr)
        return 2
    columns = Columns(cluster.prefill, cluster.decode)
    try:
        cluster.check_pairs(columns)
        faults, rows = cluster.faults(columns), folded(coverage.flows(columns))
    except PairingError as error:
        print(f"REFUSED: {error}")
        return 1
    _print([f"prefill {ranges(list(i))} -> decode {ranges(list(j))}: {what}" for i, j, what in rows], args.all)
    _print([f"WRONG: {fault}" for fault in faults], args.all)
    if not faults:
        print(
            f"right: {len(cluster.prefill)} prefill ranks write every region, layer, head and row of "
            f"{len(cluster.decode)} decode ranks exactly once"
        )
    if args.picture:
        try:
            draw(cluster, rows, faults, args.picture)
        except (ImportError, OSError, ValueError) as error:
            print(f"kvplan check: no picture: {error}", file=sys.stderr)
            return 2
        print(f"picture: {args.picture}")
    return int(bool(faults))


def _print(lines: Sequence[str], every: bool) -> None:
    most = len(lines) if every else _MOST_ROWS
    for line in lines[:most]:
        print(line)
    if len(lines) > most:
        print(f"... and {len(lines) - most} more such lines: --all prints them")


def draw(cluster: Cluster, rows: Sequence[Row], faults: Sequence[coverage.Fault], path: str) -> None:
    """Draw prefill ranks on the left, decode ranks on the right, a line for each two that share something.

    A colour is one kind of part (names, layers, heads, rows). A rank is red where
    something is missing, doubled or not sent.

    Raises:
        ImportError: matplotlib is missing; the message says how to install it.
        ValueError: the name ends in no form of picture.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("a picture needs matplotlib: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    tall = max(len(cluster.prefill), len(cluster.decode))
    figure, axes = pyplot.subplots(figsize=(8, min(max(3.0, 0.35 * tall + 1.5), 40.0)), constrained_layout=True)
    # Each side spread over the same height.
    left, right = (
        [-tall * (k + 0.5) / count for k in range(count)] for count in map(len, (cluster.prefill, cluster.decode))
    )
    colours = {what: f"C{number % 10}" for number, what in enumerate(dict.fromkeys(row[2] for row in rows))}
    for prefills, decodes, what in rows:
        lines = [((0, left[i]), (1, right[j])) for i in prefills for j in decodes]
        axes.add_collection(
            matplotlib.collections.LineCollection(lines, colors=colours[what], alpha=0.6, linewidths=1.5)
        )
    wrong = {("decode", rank): "missing or doubled" for fault in faults for rank in fault.decode}
    wrong |= {("prefill", rank): "not all is sent" for fault in faults if not fault.decode for rank in fault.senders}
    for x, places, side in ((0, left, "prefill"), (1, right, "decode")):
        for rank, y in enumerate(places):
            fault = wrong.get((side, rank), "")
            colour = "red" if fault else "black"
            axes.plot(x, y, "s", color=colour, markersize=7)
            align = "right" if x == 0 else "left"
            axes.text(x, y, f"  {side} {rank}  {fault}  ", ha=align, va="center", fontsize=8, color=colour)
    few = list(colours.items())[:12]
    handles = [matplotlib.lines.Line2D([], [], color=colour, label=_short(what)) for what, colour in few]
    if handles:
        rest = f"and {len(colours) - len(few)} more" if len(colours) > len(few) else None
        axes.legend(handles=handles, title=rest, loc="upper center", bbox_to_anchor=(0.5, 0), fontsize=7, frameon=False)
    axes.set_title(f"{len(faults)} faults" if faults else "every row is written once", fontsize=10)
    axes.set_xlim(-0.55 if wrong else -0.35, 1.55 if wrong else 1.35)
    axes.set_ylim(-tall, 0)
    axes.axis("off")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _short(text: str) -> str:
    return (text if len(text) <= 90 else text[:87] + "...").replace("$", r"\$")
