"""Each program in examples/ runs as a user would run it, and says that every byte is right."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from engine_peer import need

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "sides.py")
ENGINE = {"pull_nixl": "nixl", "tensor_parallel": "mooncake", "two_spaces": "mooncake", "batch": "mooncake"}
ENGINE["failure"] = "mooncake"
LAST = {"check_cluster": "to decode rank 7"}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_ends_well(path, tmp_path):
    if path.stem in ENGINE:
        need(ENGINE[path.stem])
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line and line[0] not in "IWE"]
    assert lines[-1].endswith(LAST.get(path.stem, "every byte is right")), done.stdout[-2000:]


def test_examples_are_short_enough_to_read():
    assert len(EXAMPLES) >= 7
    for path in EXAMPLES:
        assert len(path.read_text().splitlines()) <= 90, path.name
