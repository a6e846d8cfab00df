"""Planning as a server does it: now and then, and beside others that want the cores. Run by python -m bench."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from bench import inputs
from bench.test_plan import layout
from kvplan import pair

CORES = len(os.sched_getaffinity(0))
NEIGHBOURS = {"none": 0, "one a core": CORES, "two a core": 2 * CORES}
PAUSES = {"back to back": 0.0, "after 3 ms": 0.003}


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    """`count` processes that do nothing but count."""
    burn = "print(flush=True)\nwhile True: pass"
    running = [subprocess.Popen([sys.executable, "-c", burn], stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()  # it has begun
        yield
    finally:
        for process in running:
            process.kill()
        for process in running:
            process.communicate()


def rounds(benchmark, call: Callable[[], object], pause: str, what: str, case: str) -> None:
    """Single calls, each with a result that is gone before the next, and with a pause before it."""
    benchmark.extra_info.update(what=what, case=case, pause=pause)
    setup = (lambda: time.sleep(PAUSES[pause])) if PAUSES[pause] else None
    benchmark.pedantic(call, setup=setup, rounds=400, warmup_rounds=20)


@pytest.mark.parametrize("pause", PAUSES)
@pytest.mark.parametrize("case", NEIGHBOURS)
def test_beside_others(benchmark, case, pause):
    pairing = pair(layout(inputs.SRC_BASE, host=False), layout(inputs.DST_BASE, host=True))
    source, host, device = inputs.request(4096, "scattered")
    with neighbours(NEIGHBOURS[case]):
        rounds(benchmark, lambda: len(pairing.plan(source, {"host": host, "device": device})), pause, "busy", case)


@pytest.mark.parametrize("pause", PAUSES)
def test_memset(benchmark, pause):
    """As many bytes as the table has."""
    table = torch.zeros(3, 4096 * len(inputs.PAGE_BYTES), dtype=torch.int64)
    rounds(benchmark, lambda: ctypes.memset(table.data_ptr(), 0, table.nbytes), pause, "busy", "memset")
