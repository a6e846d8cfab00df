"""Fuzzes what comes from a peer for as long as wanted, from the root of the repository:

    python -m tests.fuzz --seconds 3600             all targets in turn
    python -m tests.fuzz --target layout --first 7 --count 1      input 7 again, with its traceback

Inputs that show a fault go to build/fuzz, a file each. Status 1 where there were any.
"""

from __future__ import annotations

import argparse
import collections
import random
import sys
import time
import traceback
import tracemalloc
from pathlib import Path

from .targets import TARGETS, Fault, attempt

OUT = Path("build") / "fuzz"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--count", type=int, help="inputs of each target, instead of a time")
    parser.add_argument("--first", type=int, help="number of the first input; drawn by default")
    parser.add_argument("--target", choices=[*TARGETS], action="append", help="default: all")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    first = random.SystemRandom().randrange(1 << 40) if args.first is None else args.first
    targets = args.target or [*TARGETS]
    print(f"inputs from number {first} on")
    tracemalloc.start()
    began = shown = time.monotonic()
    seen: collections.Counter[str] = collections.Counter()
    faults: collections.Counter[str] = collections.Counter()
    number = first
    while number - first < args.count if args.count else time.monotonic() - began < args.seconds:
        for target in targets:
            try:
                seen[f"{target} {attempt(target, number)}"] += 1
            except Fault as fault:
                kind = f"{target}: {fault!s:.60}"
                faults[kind] += 1
                if faults[kind] <= 5:
                    save(args.out, target, number, fault)
        number += 1
        if time.monotonic() - shown > 1 or number - first == args.count:
            shown = time.monotonic()
            rate = (number - first) * len(targets) / (shown - began)
            counts = ", ".join(f"{count} {what}" for what, count in sorted(seen.items()))
            print(
                f"\r{shown - began:.0f} s, {rate:.0f} inputs/s: {counts}; {faults.total()} faults ", end="", flush=True
            )
    print()
    for kind, count in faults.most_common():
        print(f"{count} times {kind}")
    return int(bool(faults))


def save(folder: Path, target: str, number: int, fault: Fault) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    told = "".join(traceback.format_exception(fault, limit=-12))
    again = f"python -m tests.fuzz --target {target} --first {number} --count 1"
    (folder / f"{target}-{number}.txt").write_text(f"{again}\n\n{told}", errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())
