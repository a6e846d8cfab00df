"""python -m bench.routes: the routes of a plan beside each other, direct, packed and few, over each engine.

Two processes on loopback TCP. "few" moves the same bytes as a few contiguous descriptors, which no route can beat.
Every byte of the destination is checked after every run. CPU is that of both processes. Routes take turns, so that they
meet the same machine; figures are medians. Prints a table with goals, and draws where the routes cross.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvplan import Heads, Layout, Memory, Plan, Region, Segment, engines, ops, pair

os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", UCX_MODULES="^ib")
os.environ.setdefault("GLOG_minloglevel", "3")
os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")

ROOT = Path(__file__).resolve().parents[1]
KINDS = ("mooncake", "nixl")
TOKENS = 64  # rows a page
FEW = 16 << 20  # bytes of each descriptor of "few"
SPARE = 2  # pages of every pool that nothing is sent to
GUARD = 0xEE
REACHED = 0.9  # a goal counts as reached from this part of it
ROUTES = ("direct", "packed", "few")


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of one size, `op` "write": TP 4 to 8, pushed; "read": TP 8 to 4, pulled.

    Attributes:
        row: bytes of a descriptor.
        count: descriptors.
        faster: goal, by engine: how many times as fast as direct.
        over_few: goal, by engine: how many times the time of few, at most.
    """

    name: str
    op: str
    row: int
    count: int
    faster: dict[str, float] = dataclasses.field(default_factory=dict)
    over_few: dict[str, float] = dataclasses.field(default_factory=dict)

    @property
    def pages(self) -> int:
        return self.count // TOKENS


OVER_FEW = {"mooncake": 2.0, "nixl": 1.7}
CASES = [
    Case("push, 131,072 rows of 1 KB (TP 4 to 8)", "write", 1024, 1 << 17, {"mooncake": 20, "nixl": 4}, OVER_FEW),
    Case("the same with 256-byte rows", "write", 256, 1 << 17, {"mooncake": 30, "nixl": 12}, OVER_FEW),
    Case("pull, TP 8 to 4, rows of 1 KB", "read", 1024, 1 << 17, {"mooncake": 25, "nixl": 2.3}, OVER_FEW),
]
SIZES = (256, 1024, 4096, 16_384, 65_536, 262_144)
COUNTS = (256, 2048, 16_384)
MOST = 128 << 20  # bytes of a case of the sweep
COPIES = {1024: 55, 1728: 60, 8448: 80, 37_440: 95}  # bytes of a row: goal, per cent of memcpy


# ---- the other process


def serve(kind: str, file: str) -> None:
    """Register a file's memory as a layout whenever told to, until nobody tells anything."""
    memory = np.memmap(file, np.uint8, "r+")
    engine = make_engine(kind)
    for line in sys.stdin:
        pages, row, heads = json.loads(line)
        layout = layout_of(memory.ctypes.data, pages, row, heads)
        engine.register(layout)
        print("SESSION" + json.dumps([engine.session, layout.to_dict()]), flush=True)
        sys.stdin.readline()
        engine.unregister(layout)


def make_engine(kind: str) -> engines.Engine:
    return engines.MooncakeEngine("127.0.0.1") if kind == "mooncake" else engines.NixlEngine()


def layout_of(base: int, pages: int, row: int, heads: int) -> Layout:
    """A pool of pages of 64 rows; of 8 heads, of `row` bytes a token each, it holds the first `heads`."""
    region = Region("kv", 0, base, TOKENS * row * heads, pages, row_bytes=row * heads, heads=Heads(0, heads, 8))
    return Layout([region], page_size=TOKENS)


class Sides:
    """This process's engine and memory, and the other process's."""

    def __init__(self, kind: str, here: int, there: int) -> None:
        self.kind = kind
        self.file = tempfile.NamedTemporaryFile(dir="/dev/shm" if Path("/dev/shm").is_dir() else None)  # noqa: SIM115
        self.file.truncate(there)
        self.there = np.memmap(self.file.name, np.uint8, "r+")
        self.here = np.zeros(here, np.uint8)
        self.engine = make_engine(kind)
        self.staging = engines.Staging(4 * FEW, FEW)
        command = [sys.executable, "-m", "bench.routes", "--serve", kind, self.file.name]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def ask(self, *words: Any) -> engines.Peer:
        """Have the other side register; what it declares."""
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(words) + "\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("SESSION"):
                session, layout = json.loads(line[len("SESSION") :])
                return engines.Peer(session, Layout.from_dict(layout))
        raise RuntimeError(f"the other process has ended, with {self.process.wait()}")

    def forget(self) -> None:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def cpu(self) -> float:
        """Seconds of CPU of both processes so far."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return time.process_time() + (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.engine.close()
        self.file.close()


# ---- cases


def measure(sides: Sides, case: Case, runs: int, tell: Callable[[str], None]) -> dict[str, dict[str, Any]]:
    """Seconds and CPU seconds of each route, medians of so many runs; and which way auto would go."""
    wide, narrow = (2, 1)  # heads here, heads there: this side has twice the heads
    pages = case.pages + SPARE
    mine = layout_of(sides.here.ctypes.data, pages, case.row, wide)
    peer = sides.ask(pages, case.row, narrow)
    sides.engine.register(mine)
    rng = np.random.default_rng(case.row)
    ours, theirs = (rng.permutation(pages)[: case.pages] for _ in range(2))
    lists, layouts = (
        ((ours, theirs), (mine, peer.layout)) if case.op == "write" else ((theirs, ours), (peer.layout, mine))
    )
    plan = pair(*layouts).plan(*lists)
    if len(plan) != case.count:
        raise RuntimeError(f"{case}: {len(plan)} descriptors")
    nbytes = plan.total_bytes
    here = sides.here[: 2 * pages * TOKENS * case.row]
    there = sides.there[: pages * TOKENS * case.row]
    source, target = (here, there) if case.op == "write" else (there, here)
    # Drawn anew for few MB alone, of a length that no row or page is a part of.
    source[:] = np.resize(rng.integers(1, 200, (4 << 20) + 4099, np.uint8), len(source))
    wanted = np.full(len(target), GUARD, np.uint8)
    rows_here = (here if case.op == "write" else wanted).reshape(pages, TOKENS, 2, case.row)
    rows_there = (wanted if case.op == "write" else there).reshape(pages, TOKENS, case.row)
    if case.op == "write":
        rows_there[theirs] = rows_here[ours, :, 0]
    else:
        rows_here[ours, :, 0] = rows_there[theirs]
    contiguous = np.full(len(target), GUARD, np.uint8)
    contiguous[:nbytes] = source[:nbytes]
    few = contiguous_plan(source, target, nbytes, case.op, sides, peer)
    ways = {
        "direct": (plan, {}, wanted),
        "packed": (plan, {"staging": sides.staging, "pack": "always"}, wanted),
        "few": (few, {}, contiguous),
    }
    found: dict[str, list[tuple[float, float]]] = {route: [] for route in ways}
    for run in range(runs + 1):  # the first is not counted: connections are made, memory is touched
        for route, (moved, how, due) in ways.items():
            if run == 0 and route == "direct" and case.count > 1 << 16:
                continue  # packed has warmed up all that it needs
            tell(f"{sides.kind}: {case.name}: {route}, run {run} of {runs}")
            target[:] = GUARD
            cpu, begun = sides.cpu(), time.perf_counter()
            sides.engine.submit(moved, peer, op=case.op, **how).wait(300)  # type: ignore[arg-type]
            took = time.perf_counter() - begun, sides.cpu() - cpu
            if not np.array_equal(target, due):
                raise RuntimeError(f"{sides.kind}, {case.name}, {route}: {(target != due).sum()} bytes are wrong")
            if run:
                found[route].append(took)
    packs = sides.engine.explain_routes(plan, op=case.op, staging=sides.staging)  # type: ignore[arg-type]
    sides.engine.unregister(mine)
    sides.forget()
    result: dict[str, dict[str, Any]] = {
        route: {
            "wall": statistics.median(wall for wall, _ in took),
            "cpu": statistics.median(cpu for _, cpu in took),
        }
        for route, took in found.items()
    }
    result["auto"] = {"packed": any("by way of staging" in line for line in packs)}
    return result


def contiguous_plan(source: np.ndarray, target: np.ndarray, nbytes: int, op: str, sides: Sides, peer: Any) -> Plan:
    """The same bytes as a few descriptors. `source` and `target` are this process's views; there, the peer's base."""
    theirs = peer.layout.regions[0].base
    bases = (source.ctypes.data, theirs) if op == "write" else (theirs, target.ctypes.data)
    starts = np.arange(0, nbytes, FEW)
    sizes = np.minimum(FEW, nbytes - starts)
    table = torch.from_numpy(np.stack([bases[0] + starts, bases[1] + starts, sizes]))
    return Plan(table, [Segment(Memory.DRAM, Memory.DRAM, 0, len(starts))])


def copies(row: int, runs: int) -> dict[str, float]:
    """Gather and scatter of rows from and to random places, one thread: per cent of memcpy's speed, by CPU time."""
    count = (64 << 20) // row
    apart, packed, other = (np.ones(k * count * row, np.uint8) for k in (2, 1, 1))
    places = apart.ctypes.data + 2 * row * np.random.default_rng(row).permutation(count)
    line = packed.ctypes.data + row * np.arange(count)
    sizes = np.full(count, row)
    tables = {
        "gather": torch.from_numpy(np.stack([places, line, sizes])),
        "scatter": torch.from_numpy(np.stack([line, places, sizes])),
    }
    times: dict[str, list[float]] = {"memcpy": [], "gather": [], "scatter": []}
    for _ in range(runs + 1):
        for name, took in times.items():
            begun = time.thread_time()
            if name == "memcpy":
                ctypes.memmove(other.ctypes.data, packed.ctypes.data, packed.nbytes)
            else:
                ops.copy_(tables[name])
            took.append(time.thread_time() - begun)
    best = {name: statistics.median(took[1:]) for name, took in times.items()}
    return {name: 100 * best["memcpy"] / best[name] for name in tables}


# ---- what is printed


def goal(value: float, wanted: float | None, most: bool = False) -> str:
    """A figure with its goal, marked where that is missed."""
    if wanted is None:
        return f"{value:.2f}×" if most else f"{value:.1f}×"
    missed = value * REACHED > wanted if most else value < REACHED * wanted
    sign, digits = ("≤", 2) if most else ("≥", 1)
    return f"{value:.{digits}f}× ({sign} {wanted:g}×{' **missed**' if missed else ''})"


def table(kind: str, case: Case, found: dict[str, dict[str, Any]]) -> str:
    cells = [f"{case.name}, {kind}"]
    cells += [f"{1e3 * found[route]['wall']:,.0f} [{1e3 * found[route]['cpu']:,.0f}]" for route in ROUTES]
    for other, wanted, most in (("direct", case.faster.get(kind), False), ("few", case.over_few.get(kind), True)):
        for what in ("wall", "cpu"):
            ratio = found[other][what] / found["packed"][what]
            cells.append(goal(1 / ratio if most else ratio, wanted, most))
    cells.append("packed" if found["auto"]["packed"] else "direct")
    return "| " + " | ".join(cells) + " |"


HEAD = [
    "| case | direct, ms [CPU] | packed, ms [CPU] | few, ms [CPU] | packed against direct, wall | CPU "
    "| packed against few, wall | CPU | `auto` |",
    "|---|---|---|---|---|---|---|---|---|",
]


def plot(rows: list[dict[str, Any]], path: Path, title: str) -> None:
    """Time by bytes a descriptor, for each engine and count, with s* of the cost model."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    figure, grid = pyplot.subplots(
        len(COUNTS), len(kinds), figsize=(4.5 * len(kinds), 8), squeeze=False, sharex=True, constrained_layout=True
    )
    for column, kind in enumerate(kinds):
        for line, count in enumerate(COUNTS):
            axes = grid[line][column]
            mine = [row for row in rows if row["kind"] == kind and row["count"] == count]
            for route, marker in zip(ROUTES, "osv", strict=True):
                xs, ys = [row["row"] for row in mine], [1e3 * row["found"][route]["wall"] for row in mine]
                axes.plot(xs, ys, marker=marker, label=route)
            crossing = engines.COSTS[kind, "tcp"].smaller_than
            axes.axvline(crossing, linestyle=":", color="grey")
            axes.annotate("s*", (crossing, axes.get_ylim()[1]), fontsize=8)
            axes.set(xscale="log", yscale="log", title=f"{kind}, {count:,} descriptors")
            axes.grid(alpha=0.3)
        grid[-1][column].set_xlabel("bytes a descriptor")
        grid[0][column].legend(fontsize=8)
    for line in grid:
        line[0].set_ylabel("ms")
    figure.suptitle(title, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def sweep() -> Iterator[Case]:
    for count in COUNTS:
        for row in SIZES:
            if count * row <= MOST:
                yield Case(f"{count:,} rows of {row:,} bytes", "write", row, count)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.routes", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/out", help="folder for routes.json and the plot")
    parser.add_argument("--runs", type=int, default=5, help="of each route of each case (default: %(default)s)")
    parser.add_argument("--engine", choices=KINDS, action="append", help="only this one; may be given twice")
    parser.add_argument("--only", choices=("cases", "sweep", "copies"), help="one part of it")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.serve:
        serve(*args.serve)
        return 0
    args.out.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()

    def tell(text: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s  {text}", file=sys.stderr, flush=True)

    machine = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start, loopback TCP, two processes"
    date = time.strftime("%Y-%m-%d")
    print(f"{machine}; {date}; medians of {args.runs}; every byte checked; `make bench-routes`\n")
    lines: list[str] = []
    rows: list[dict[str, Any]] = []
    if args.only in (None, "cases", "sweep"):
        print("\n".join(HEAD), flush=True)
        for kind in args.engine or KINDS:
            cases = [*(CASES if args.only != "sweep" else []), *(sweep() if args.only != "cases" else [])]
            there = max((case.pages + SPARE) * TOKENS * case.row for case in cases)
            sides = Sides(kind, 2 * there, there)
            try:
                for case in cases:
                    found = measure(sides, case, args.runs, tell)
                    if case in CASES:
                        lines.append(table(kind, case, found))
                        print(lines[-1], flush=True)
                    else:
                        rows.append({"kind": kind, "row": case.row, "count": case.count, "found": found})
            finally:
                sides.close()
    if rows:
        print(
            "\n| rows | engine | direct, ms | packed, ms | few, ms | `auto` | faster |\n|---|---|---|---|---|---|---|"
        )
        for row in rows:
            times = [row["found"][route]["wall"] for route in ROUTES]
            faster = "packed" if times[1] < times[0] else "direct"
            auto = "packed" if row["found"]["auto"]["packed"] else "direct"
            print(
                f"| {row['count']:,} of {row['row']:,} bytes | {row['kind']} | "
                + " | ".join(f"{1e3 * took:,.1f}" for took in times)
                + f" | {auto} | {faster} |"
            )
        (args.out / "routes.json").write_text(json.dumps({"machine": machine, "date": date, "rows": rows}, indent=1))
        plot(rows, args.out / "routes.png", f"{machine}, {date}")
        tell(f"plot: {args.out / 'routes.png'}")
    if args.only in (None, "copies"):
        print("\n| rows of | gather, of memcpy | scatter, of memcpy | goal |\n|---|---|---|---|")
        for row, wanted in COPIES.items():
            tell(f"copies of {row} bytes")
            found_copies = copies(row, max(args.runs, 5))
            cells = [
                f"{share:.0f}%{' **missed**' if share < REACHED * wanted else ''}" for share in found_copies.values()
            ]
            lines.append("".join(cells))
            print(f"| {row:,} bytes | {' | '.join(cells)} | {wanted}% |", flush=True)
    missed = sum(line.count("**missed**") for line in lines)
    print(f"\nGoals missed: {missed} (a figure counts as reached from {REACHED} of it). They are an idle machine's.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
