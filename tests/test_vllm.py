"""One transfer between real vLLM engines, where their environment is there; `make vllm` makes it and runs all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("KVPLAN_VLLM_PYTHON", ROOT / ".venv-vllm/bin/python"))
ONE = ["test_channel.py", "test_real_engines.py::TestOnePair::test_tokens_are_equal[nixl]"]


@pytest.mark.slow
def test_one_transfer_in_vllm() -> None:
    if not PYTHON.exists():
        pytest.skip(f"VLLM IS NOT TESTED: {PYTHON} is missing; 'make vllm' sets it up (4 GB)")
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(f"tests/vllm/{name}" for name in ONE)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
