"""python -m bench.gpu: the goals, what was reached, and by which back end; each back end in a process of its own."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

BACKENDS = ("cuda", "cupy", "triton")


def machine() -> str:
    """Card, driver and versions."""
    import torch

    no_gpu = "no GPU: a try on CPU tensors, figures mean nothing"
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else no_gpu
    versions = [f"torch {torch.__version__}", f"CUDA {torch.version.cuda}"]
    for module in ("triton", "cupy"):
        if importlib.util.find_spec(module) is not None:
            versions.append(f"{module} {importlib.import_module(module).__version__}")
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(asked, capture_output=True, text=True, timeout=20).stdout.split("\n")[0]
        versions.append(f"driver {driver}")
    except (OSError, subprocess.TimeoutExpired):
        pass
    return f"{card}; {', '.join(versions)}; {datetime.date.today().isoformat()}"


def child(args: argparse.Namespace) -> int:
    """Measures with the back end of this process; one JSON object a line, as soon as it is known."""
    from bench.gpu import rows
    from kvplan.ops import backend

    print(json.dumps({"machine": machine(), "backend": backend.chosen()[1].name}), flush=True)
    for row in rows.measure(args.parts, time.monotonic() + args.seconds):
        print(json.dumps(dataclasses.asdict(row) | {"met": row.met}), flush=True)
    return 0


def run(name: str, args: argparse.Namespace, seconds: float) -> dict[str, Any]:
    """Rows of one back end, also where it did not come to its end."""
    command = [sys.executable, "-m", "bench.gpu", "--child", "--seconds", str(seconds), "--parts", *args.parts]
    # Python finds modules where this process did.
    env = {**os.environ, "KVPLAN_BACKEND": name, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if name == "none":
        del env["KVPLAN_BACKEND"]
    print(f"== {name}", file=sys.stderr, flush=True)
    found: dict[str, Any] = {"rows": [], "failure": None}
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=seconds + 40)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        found["failure"] = "out of time"
    for line in output.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            if "what" in record:
                found["rows"].append(record)
            else:
                found |= record
    if process.returncode and not found["failure"]:
        found["failure"] = (errors.strip().splitlines() or [f"status {process.returncode}"])[-1]
        print(errors[-3000:], file=sys.stderr)
    return found


def text(results: dict[str, Any]) -> str:
    """One table: goal, what each back end reached, whether it is met."""
    names = list(results)
    lines = [next((found["machine"] for found in results.values() if "machine" in found), ""), ""]
    lines += ["| | goal | " + " | ".join(names) + " | met |", "|---|---|" + "---|" * (len(names) + 1)]
    order: dict[str, None] = {}
    for found in results.values():
        order.update(dict.fromkeys(row["what"] for row in found["rows"]))
    for what in order:
        rows = {name: next((r for r in found["rows"] if r["what"] == what), None) for name, found in results.items()}
        some = next(row for row in rows.values() if row is not None)
        goal = "" if some["limit"] is None else f"{'≥' if some['least'] else '≤'} {some['limit']:g} {some['unit']}"
        cells = [_cell(row) for row in rows.values()]
        first = rows[names[0]]
        met = "" if first is None or first["met"] is None else "yes" if first["met"] else "NO"
        lines.append(f"| {what} | {goal} | {' | '.join(cells)} | {met} |")
    for name, found in results.items():
        if found["failure"]:
            lines.append(f"\n{name} did not come to its end: {found['failure']}")
    return "\n".join(lines)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or math.isnan(row["value"]):
        return "-"
    figure = f"{row['value']:.2f}" if row["unit"] in ("×", "TB/s") else f"{row['value']:.1f}"
    return f"{figure} {row['unit']}" + (f" ({row['note']})" if row["note"] else "")


def main() -> int:
    from kvplan.ops import kernels

    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parts = ["planning", "batch", "host", "copies", "pinned"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--backends", nargs="+", default=None, help="default: all that are here")
    parser.add_argument("--seconds", type=float, default=90.0, help="for all of it")
    parser.add_argument("--out", type=Path, help="file for the figures as JSON")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    import torch

    here = {"cuda": kernels.FATBIN.exists(), "cupy": bool(importlib.util.find_spec("cupy")),
            "triton": bool(importlib.util.find_spec("triton"))}  # fmt: skip
    names = args.backends or [name for name in BACKENDS if here[name]]
    if not torch.cuda.is_available():
        names = ["none"]
    results = {}
    until = time.monotonic() + args.seconds
    for number, name in enumerate(names):
        results[name] = run(name, args, max(until - time.monotonic(), 1.0) / (len(names) - number))
    print(text(results))
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(found["failure"] for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
