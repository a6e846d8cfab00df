"""The measured table and its plot, from one run."""

from __future__ import annotations

import datetime
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench import inputs

Row = dict[str, Any]


def collect(benchmarks: dict[str, Any], peers: list[Row], memory: dict[str, int]) -> dict[str, Any]:
    """One record of the run: machine, versions, rows of {what, pages, pattern, descriptors, best_s, median_s}."""
    rows = [
        entry["extra_info"] | {"best_s": entry["stats"]["min"], "median_s": entry["stats"]["median"]}
        for entry in benchmarks["benchmarks"]
    ]
    for row in peers:
        rows.append(row | {"what": f"SGLang, gc {row.pop('gc', 'frozen')}"})
    cpu = benchmarks["machine_info"]["cpu"]
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{cpu.get('brand_raw', platform.machine())}, {cpu.get('count', '?')} cores",
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, NumPy {np.__version__}",
        "memory": memory,
        "rows": rows,
    }


def find(results: dict[str, Any], what: str, pages: int, pattern: str) -> Row | None:
    """The row of one case, or None where it was not measured."""
    for row in results["rows"]:
        if (row["what"], row.get("pages"), row.get("pattern")) == (what, pages, pattern):
            return row
    return None


def find_case(results: dict[str, Any], what: str, case: str) -> Row | None:
    """The same for what bench/test_rows.py measures."""
    for row in results["rows"]:
        if (row["what"], row.get("case")) == (what, case):
            return row
    return None


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    seconds = row["median_s"]
    return f"{1e6 * seconds:.1f} µs" if seconds < 1e-3 else f"{1e3 * seconds:.2f} ms"


def _ratio(row: Row | None, ours: Row | None) -> str:
    return "-" if row is None or ours is None else f"{row['median_s'] / ours['median_s']:,.1f}×"


PEERS = ("SGLang, gc on", "SGLang, gc frozen", "NumPy broadcast", "memset")


def text(results: dict[str, Any]) -> str:
    """The table in Markdown: median times, and how many times kvplan's each peer takes."""
    lines = [
        f"{results['machine']}; {results['versions']}; {results['date']}; medians; `make bench`",
        "",
        "| pages × 62 regions | descriptors | kvplan | kvplan, as lists | " + " | ".join(PEERS) + " |",
        "|---|---|---|---|" + "---|" * len(PEERS),
    ]
    for pages in inputs.PAGES:
        for pattern in inputs.PATTERNS:
            ours = find(results, "kvplan", pages, pattern)
            if ours is None:
                continue
            cells = [f"{pages:,} {pattern}", f"{ours['descriptors']:,}", _time(ours)]
            cells.append(_time(find(results, "kvplan, lists", pages, pattern)))
            for what in PEERS:
                row = find(results, what, pages, pattern)
                cells.append("-" if row is None else f"{_time(row)} ({_ratio(row, ours)})")
            lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *_busy_text(results), "", *_rows_text(results), ""]
    memory = results["memory"]
    lines += [
        f"Scratch memory of the largest plan, beyond its table of {memory['table']:,} bytes: {memory['extra']:,} bytes."
    ]
    return "\n".join(lines)


def _busy_text(results: dict[str, Any]) -> list[str]:
    """One plan after another and after pauses, alone and beside other processes."""
    lines = ["| 4,096 scattered; other processes that want the cores | back to back | each after a pause of 3 ms |"]
    lines.append("|---|---|---|")
    found = {(row["case"], row["pause"]): row for row in results["rows"] if row["what"] == "busy"}
    for case in ("none", "one a core", "two a core", "memset"):
        cells = [f"{case} (as many bytes; none)" if case == "memset" else case]
        for pause in ("back to back", "after 3 ms"):
            row = found.get((case, pause))
            alone = f" ({_ratio(row, found.get(('none', pause)))})" if row and case != "none" else ""
            cells.append(_time(row) + alone)
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _rows_text(results: dict[str, Any]) -> list[str]:
    """Row-wise plans, batches, pairing and checks."""
    lines = ["| rows, one pair of ranks | descriptors | kvplan | memset | SGLang, gc frozen |", "|---|---|---|---|---|"]
    for case in ("DCP 8", "TP 4 to 8"):
        ours = find_case(results, "kvplan", case)
        cells = [case, f"{ours['descriptors']:,}" if ours else "-", _time(ours)]
        for what in ("memset", "SGLang, gc frozen"):
            row = find_case(results, what, case)
            cells.append("-" if row is None else f"{_time(row)} ({_ratio(row, ours)})")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", "| `Plan.packed` of | descriptors | write | read |", "|---|---|---|---|"]
    for case in ("DCP 8", "TP 4 to 8", "TP 4 to 8, in part"):
        found = [find_case(results, f"packed, {op}", case) for op in ("write", "read")]
        count = f"{found[0]['descriptors']:,}" if found[0] else "-"
        lines.append(f"| {case} | {count} | {_time(found[0])} | {_time(found[1])} |")
    lines += ["", "| 64 requests of | plan_batch | plan, 64 times |", "|---|---|---|"]
    for pages in (4, 64, 512):
        case = f"64 requests of {pages} pages"
        batch, singly = (find_case(results, what, case) for what in ("plan_batch", "plan, 64 times"))
        lines.append(f"| {pages} pages | {_time(batch)} | {_time(singly)} ({_ratio(singly, batch)}) |")
    pairs = [f"{count} regions {_time(find_case(results, 'pair', f'{count} regions'))}" for count in ("62", "10,000")]
    checks = find_case(results, "checks alone, as four calls", "4,096 scattered")
    whole = find(results, "kvplan", 4096, "scattered")
    share = f"{100 * checks['median_s'] / whole['median_s']:.0f}%" if checks and whole else "-"
    lines += ["", f"`pair`: {', '.join(pairs)}. Checks of 4,096 scattered pages, as four calls of their own: "
              f"{_time(checks)}, at most {share} of planning them."]  # fmt: skip
    return lines


def plot(results: dict[str, Any], path: Path) -> None:
    """Time against descriptors for each planner, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), constrained_layout=True)
    for what, marker in zip(("kvplan", "kvplan, lists", *PEERS), "osv^Dx", strict=True):
        rows = [row for row in results["rows"] if row["what"] == what and row.get("pattern") == "scattered"]
        rows.sort(key=lambda row: row["descriptors"])
        if rows:
            counts, times = [row["descriptors"] for row in rows], [1e3 * row["median_s"] for row in rows]
            axes.plot(counts, times, marker=marker, label=what)
            axes.annotate(f"{times[-1]:.3g} ms", (counts[-1], times[-1]), textcoords="offset points", xytext=(6, -3))
    axes.set(xscale="log", yscale="log", xlabel="descriptors (scattered pages × 62 regions)", ylabel="ms to plan")
    axes.set_title(f"{results['machine']}, {results['date']}", fontsize=9)
    axes.margins(x=0.25)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
