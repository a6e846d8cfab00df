"""python -m bench.copies: gather and scatter of small rows against memcpy of the same bytes, in CPU time of one thread.

Rows lie at random places of 512 MB of torch's memory, whose pages are small, and side by side in staging. Runs take
turns with memcpy, so that what else the machine does is the same for both; of each the least and the median is taken.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from kvplan import ops

SIZES = (1024, 1728, 8448, 37_440)  # bytes a row
GOALS = (55, 60, 80, 95)  # percent of memcpy
POOL = 512 << 20


def seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def measure(size: int, total: int, runs: int) -> dict[str, list[float]]:
    """CPU seconds of each run: "memcpy", "gather" and "scatter" of `total` bytes in rows of `size`."""
    pool, staging = (torch.ones(nbytes, dtype=torch.uint8) for nbytes in (POOL, total))
    count = total // size
    rng = np.random.default_rng(size)
    scattered = pool.data_ptr() + rng.permutation(POOL // size)[:count].astype(np.int64) * size
    packed = staging.data_ptr() + np.arange(count, dtype=np.int64) * size
    nbytes = np.full(count, size, dtype=np.int64)
    tables = {
        "gather": torch.from_numpy(np.stack([scattered, packed, nbytes])),
        "scatter": torch.from_numpy(np.stack([packed, scattered, nbytes])),
    }
    found: dict[str, list[float]] = {"memcpy": [], "gather": [], "scatter": []}
    for _ in range(runs):
        for what, table in tables.items():
            copy = lambda: ctypes.memmove(staging.data_ptr(), pool.data_ptr(), count * size)  # noqa: E731
            found["memcpy"].append(seconds(copy))
            found[what].append(seconds(lambda table=table: ops.copy_(table)))  # type: ignore[misc]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.copies", description=__doc__)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--mb", type=int, default=128, help="bytes of each run, in MB")
    args = parser.parse_args()
    print("| bytes a row | memcpy, GB/s | gather, % of memcpy: least, median | scatter | goal |\n|---|---|---|---|---|")
    for size, goal in zip(SIZES, GOALS, strict=True):
        found = measure(size, args.mb << 20, args.runs)
        cells = []
        for what in ("gather", "scatter"):
            least = min(found["memcpy"]) / min(found[what])
            median = statistics.median(found["memcpy"]) / statistics.median(found[what])
            cells.append(f"{100 * least:.0f}, {100 * median:.0f}")
        rate = (args.mb << 20) // size * size / min(found["memcpy"]) / 1e9
        print(f"| {size:,} | {rate:.1f} | {' | '.join(cells)} | {goal} |", flush=True)


if __name__ == "__main__":
    main()
