"""python -m bench: kvplan and its peers in one run, a table of ratios, and a plot."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

from bench import report

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / ".venv-peers/bin/python"


def child(command: list[str | Path]) -> str:
    """Standard output of a child; its progress goes to standard error. A failure ends the run."""
    done = subprocess.run([str(part) for part in command], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=ENV)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed with status {done.returncode}\n{done.stdout}")
    return done.stdout


# Some environments choose an old kernel for OpenBLAS; none of it is used here, and NumPy is to run as installed.
ENV = {key: value for key, value in os.environ.items() if not key.startswith("OPENBLAS_")}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "bench/out", help="folder for results.json and the plot")
    parser.add_argument("--no-peers", action="store_true", help="leave SGLang out even where it is installed")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    raw = args.out / "pytest-benchmark.json"
    print("== kvplan, NumPy and memset", file=sys.stderr)
    python = sys.executable
    child([python, "-m", "pytest", "bench", "--benchmark-only", "--benchmark-json", raw, "--benchmark-warmup=on",
           "-p", "no:cacheprovider"])  # fmt: skip
    memory = json.loads(child([python, "-m", "bench.memory"]))
    peers = []
    if PEERS.exists() and not args.no_peers:
        print("== SGLang", file=sys.stderr)
        peers = json.loads(child([PEERS, "bench/peers/sglang_planner.py"]).splitlines()[-1])
        peers += json.loads(child([PEERS, "bench/peers/sglang_rows.py"]).splitlines()[-1])
    else:
        print("== SGLang is not measured: 'make bench-peers' installs it", file=sys.stderr)
    results = report.collect(json.loads(raw.read_text()), peers, memory)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(report.text(results))
    report.plot(results, args.out / "plan_time.png")
    print(f"plot: {args.out / 'plan_time.png'}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
