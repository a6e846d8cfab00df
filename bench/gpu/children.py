"""Processes with a deadline, whose lines are read as they come. Needs neither torch nor kvplan."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.gpu.report import BEGUN, NOT_BEGUN, Figures, Report

PARTS = ("planning", "batch", "host", "copies", "pinned", "execute", "packing", "beside")  # the most telling first
CORE = PARTS[:5]
GRACE = 60.0  # seconds in which a part that has begun may end
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def stream(
    command: Sequence[str | Path],
    log: Path,
    until: float,
    env: dict[str, str],
    each: Callable[[str], None] = lambda line: None,
) -> int | None:
    """Run a command with all its output in `log`; give `each` the lines as they come.

    Args:
        until: when it is killed, on the clock of time.monotonic, which all processes of a machine share.

    Returns:
        int | None: its status; None where it was killed.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    libc = ctypes.CDLL(None)
    with log.open("wb") as written, log.open("rb") as read:
        # A session of its own, so that all it started ends with it.
        process = subprocess.Popen(
            [str(part) for part in command], stdout=written, stderr=subprocess.STDOUT, env=env, start_new_session=True,
            preexec_fn=lambda: libc.prctl(_DIES_WITH_PARENT, signal.SIGKILL),
        )  # fmt: skip
        rest = b""
        try:
            while True:
                status = process.poll()  # asked before reading: what is read then is all there is
                *lines, rest = (rest + read.read()).split(b"\n")
                for line in lines:
                    each(line.decode(errors="replace"))
                if status is not None:
                    return status
                if time.monotonic() >= until:
                    return None
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def measure(
    report: Report,
    name: str,
    parts: Sequence[str],
    until: float,
    deadline: float,
    env: dict[str, str],
    *,
    rehearse: bool = False,
) -> str:
    """The benchmark of one back end; each row is printed, and in the report, as soon as it is known.

    Args:
        until: no part begins later.
        deadline: the process is killed then, or GRACE behind `until`.

    Returns:
        str: "passed", "failed" or "out of time".
    """
    found = report.figures[name] = Figures(dict.fromkeys(parts, NOT_BEGUN))

    def take(line: str) -> None:
        if not line.startswith('{"'):
            return
        record = json.loads(line)
        if "what" in record:
            found.rows.append(record)
            print(
                f"  {name}: {record['what'].strip()}: {record['value']:.2f} {record['unit']} {record['note']}",
                flush=True,
            )
        elif "part" in record:
            found.parts[record["part"]] = record["state"]
        else:
            found.machine = record["machine"]
        report.write()

    report.write()
    command = [sys.executable, "-m", "bench.gpu", "--child", name, "--until", str(until), "--parts", *parts]
    log = report.folder / f"benchmark-{name}.log"
    status = stream(command + ["--rehearse"] * rehearse, log, min(until + GRACE, deadline), env, take)
    unfinished = [part for part, state in found.parts.items() if state in (BEGUN, NOT_BEGUN)]
    if status is None:
        found.failure = "out of time"
    elif status:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        found.failure = (lines or [f"status {status}"])[-1]
    report.write()
    wrong = [state for state in found.parts.values() if state.startswith("failed")]
    return (
        "out of time"
        if status is None
        else "failed"
        if status or wrong or not found.rows
        else ("out of time" if unfinished else "passed")
    )
