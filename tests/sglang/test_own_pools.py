"""How much of SGLang's own pools and allocators runs on a CPU: all but the call that locks host pages for a GPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

CODE = """
import traceback
import two_processes
two_processes.manager("decode", two_processes.CASES["v4_own_pools"], 1, "MOONCAKE")
(decode,) = two_processes.OWN
assert type(decode.coordinator).__name__ == "HiSparseCoordinator" and decode.coordinator.mem_pool_host.pin_memory
try:
    decode.coordinator_as_it_is()
except RuntimeError as error:
    for frame in traceback.extract_tb(error.__traceback__):
        print(frame.filename.partition("/sglang/srt/")[2], frame.lineno, frame.name, frame.line)
"""


@pytest.mark.skipif(torch.cuda.is_available(), reason="with CUDA the coordinator is made")
def test_the_one_line_that_needs_cuda() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    of_sglang = [line for line in done.stdout.splitlines() if line.startswith(("managers/", "mem_cache/"))]
    assert of_sglang[-1] == "mem_cache/pool_host/common.py 147 _cuda_host_register cudart = torch.cuda.cudart()"
    assert of_sglang[0].startswith("managers/hisparse_coordinator.py 580 __init__")
