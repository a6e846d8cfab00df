"""tools/gpu_check.py, rehearsed without a GPU: whatever ends it, a readable table names what did not run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))

from bench.gpu.children import PARTS, stream  # noqa: E402  (found by the path above)

CHECK = [sys.executable, str(ROOT / "tools" / "gpu_check.py"), "--rehearse", "--backends", "cpu"]


def left_in(folder: Path) -> tuple[str, dict]:
    return (folder / "table.md").read_text(), json.loads((folder / "results.json").read_text())


def well_formed(table: str) -> None:
    """Each line of a table has as many cells as its head."""
    width = 0
    for line in table.splitlines():
        if not line.startswith("|"):
            width = 0
        else:
            width = width or line.count("|")
            assert line.count("|") == width, line


def test_killed_in_the_middle_it_leaves_a_table(tmp_path: Path) -> None:
    process = subprocess.Popen([*CHECK, "--minutes", "3", "--out", str(tmp_path)], stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None:
            seen = tmp_path / "results.json"
            found = json.loads(seen.read_text()) if seen.exists() else {"figures": {}}
            if found["figures"] and len(found["figures"]["cpu"]["rows"]) >= 2:
                break
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -9, "it ended before it was killed"
    table, results = left_in(tmp_path)
    well_formed(table)
    figures = results["figures"]["cpu"]
    assert len(figures["rows"]) >= 2 and all(row["what"] in table for row in figures["rows"])
    unfinished = [part for part, state in figures["parts"].items() if state != "measured"]
    assert "beside" in unfinished and all(f"{part} (" in table for part in unfinished)
    states = {step["name"]: step["result"] for step in results["steps"]}
    assert states["benchmark: cpu"] == "begun" and states["memcheck: cpu"] == "not begun"
    assert all(f"| {name} | {state} |" in table for name, state in states.items())


def test_a_deadline_ends_it_and_names_what_did_not_run(tmp_path: Path) -> None:
    done = subprocess.run([*CHECK, "--minutes", "0.2", "--out", str(tmp_path)], capture_output=True, text=True)
    table, results = left_in(tmp_path)
    well_formed(table)
    assert table.strip() in done.stdout
    assert set(results["figures"]["cpu"]["parts"]) == set(PARTS)
    states = {step["name"]: step["result"] for step in results["steps"]}
    assert {"not begun", "begun"}.isdisjoint(states.values()) and "tests: cpu" in states
    assert done.returncode == ("out of time" in states.values() or "failed" in states.values())
    assert "failed" not in states.values(), done.stdout


def test_a_step_out_of_time_ends_with_all_that_it_started(tmp_path: Path) -> None:
    import os

    seen: list[str] = []
    sleeper = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    until = time.monotonic() + 2
    command = [sys.executable, "-c", sleeper]
    assert stream(command, tmp_path / "log", until, dict(os.environ), seen.append) is None
    status = Path(f"/proc/{int(seen[0])}/stat")
    for _ in range(100):
        if not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] == "Z":
            break
        time.sleep(0.05)
    else:
        pytest.fail("it goes on")


def test_lines_without_an_end_are_kept_and_a_status_is_told(tmp_path: Path) -> None:
    seen: list[str] = []
    code = "import sys; print('a'); sys.stdout.write('half'); sys.stdout.flush(); sys.exit(3)"
    assert stream([sys.executable, "-c", code], tmp_path / "log", time.monotonic() + 60, {}, seen.append) == 3
    assert seen == ["a"] and (tmp_path / "log").read_text() == "a\nhalf"
