"""One transfer of each kind inside SGLang, where its environment is there; `make sglang` makes it and runs all."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("KVPLAN_SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
ONE_OF_EACH = [
    "test_equal.py", "test_misrouted.py", "test_two_processes.py::test_every_byte_arrives[v4]",
    "test_two_processes.py::test_every_byte_arrives[dcp_rank_1]",
    "test_two_processes.py::test_sglang_s_own_pools_states_and_preallocation",
    "test_ascend.py", "test_ascend_two_processes.py::test_every_byte_arrives[npu_v4-send_kvcache]",
    "test_real_servers.py::test_a_transfer_of_each_model[llama]",
    "test_real_servers.py::test_a_transfer_of_each_model[mla]",
]  # fmt: skip


@pytest.mark.slow
def test_one_transfer_of_each_kind_in_sglang() -> None:
    if not PYTHON.exists():
        pytest.skip(f"SGLANG IS NOT TESTED: {PYTHON} is missing; 'make sglang' sets it up (6 GB)")
    tests = [f"tests/sglang/{name}" for name in ONE_OF_EACH]
    command = [PYTHON, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout[-6000:]
