"""python -m bench.gpu: the goals, what was reached, and by which back end; each back end in a process of its own.

Rows are printed as they come. The table and results.json are in the folder of --out, whole after each row.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from bench.gpu.children import PARTS, measure
from bench.gpu.report import Report

BACKENDS = ("cuda", "cupy", "triton")


def machine(rehearse: bool) -> str:
    """Card, driver and versions."""
    import torch

    if rehearse:
        return f"REHEARSAL without a GPU: figures mean nothing; torch {torch.__version__}"
    card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no GPU: figures mean nothing"
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
    """Measures with one back end; one JSON object a line, as soon as it is known."""

    def tell(record: dict[str, object]) -> None:
        print(json.dumps(record), flush=True)

    tell({"machine": machine(args.rehearse)})
    if args.rehearse:
        from bench.gpu import stand_in

        stand_in.use(args.child)
    else:
        from kvplan.ops import backend

        assert backend.chosen()[1].name == args.child or args.child == "cpu", backend.chosen()
    from bench.gpu import rows

    failed = False
    for found in rows.measure(args.parts, args.until):
        if isinstance(found, rows.Row):
            tell(dataclasses.asdict(found) | {"met": found.met})
        else:
            failed |= found[1].startswith("failed")
            tell({"part": found[0], "state": found[1]})
    return int(failed)


def environment(name: str) -> dict[str, str]:
    """Python finds modules where this process did."""
    kept = {key: value for key, value in os.environ.items() if key != "KVPLAN_BACKEND"}
    forced = {"KVPLAN_BACKEND": name} if name in BACKENDS else {}
    return {**kept, **forced, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--backends", nargs="+", choices=(*BACKENDS, "cpu"), help="default: all that are here")
    parser.add_argument("--seconds", type=float, default=90.0, help="for all of it")
    parser.add_argument("--out", type=Path, default=Path("build/gpu"), help="folder for table.md and results.json")
    parser.add_argument("--rehearse", action="store_true", help="no GPU: over an emulator or CPU tensors")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(args)
    import torch

    from kvplan.ops import kernels

    here = {"cuda": args.rehearse or kernels.FATBIN.exists(), "cupy": bool(importlib.util.find_spec("cupy")),
            "triton": bool(importlib.util.find_spec("triton"))}  # fmt: skip
    names = args.backends or [name for name in BACKENDS if here[name]]
    if not torch.cuda.is_available() and not args.rehearse:
        names = ["cpu"]
    report = Report(args.out)
    until = time.monotonic() + args.seconds
    results = []
    for number, name in enumerate(names):
        now = time.monotonic()
        end = now + max(until - now, 1.0) / (len(names) - number)
        env = environment("cpu" if args.rehearse else name)
        results.append(measure(report, name, args.parts, end, until + 60, env, rehearse=args.rehearse))
    print(report.text())
    return int(any(result != "passed" for result in results))


if __name__ == "__main__":
    sys.exit(main())
