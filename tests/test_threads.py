"""Planning stays on the calling thread unless more are asked for, and goes on in a child after fork()."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvplan import Layout, Region, ops, pair

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def one_thread_after():
    yield
    ops.set_num_threads(1)


@pytest.mark.parametrize("threads", [0, -1, 1025, 1 << 70, True, 2.0, "2", None])
def test_refusals(threads):
    with pytest.raises(ValueError, match="must be an integer from 1 to 1024"):
        ops.set_num_threads(threads)
    assert ops.get_num_threads() == 1


def large():
    """(pairing, source, destination) whose table has 48 MB, in several segments of 25 entries, and the right table."""
    pages, entries = 20_000, 100
    layouts = [
        Layout([Region("kv", k, base + (k << 32), 64, 1 << 20) for k in range(entries)], page_size=4)
        for base in (1 << 40, 1 << 44)
    ]
    rng = np.random.default_rng(3)
    src, dst = rng.permutation(1 << 20)[:pages], 2 * rng.permutation(1 << 19)[:pages]
    starts = (np.arange(entries) << 32)[:, None]
    want = [((base << 40) + starts + 64 * ids).ravel() for base, ids in ((1, src), (16, dst))]
    return pair(*layouts), src, dst, np.stack([*want, np.full(pages * entries, 64)])


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_a_large_table_is_the_same_by_any_number_of_threads(threads):
    pairing, src, dst, want = large()
    ops.set_num_threads(threads)
    assert ops.get_num_threads() == threads
    for _ in range(5):
        assert np.array_equal(pairing.plan(src, dst).table.numpy(), want)


SCRIPT = """
import os, signal, sys, threading
sys.path.insert(0, "tests")
import numpy as np
import kvplan
from kvplan import ops
from test_threads import large

def tasks():
    return len(os.listdir("/proc/self/task"))

threads, busy = int(sys.argv[1]), sys.argv[2] == "busy"
pairing, src, dst, want = large()
before = tasks()
ops.set_num_threads(threads)
assert np.array_equal(pairing.plan(src, dst).table.numpy(), want)
assert tasks() - before == threads - 1, (before, tasks())
stop = threading.Event()

def go_on():
    while not stop.is_set():
        pairing.plan(src, dst)

others = [threading.Thread(target=go_on) for _ in range(2 * busy)]
for other in others:
    other.start()
for _ in range(4):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        right = np.array_equal(pairing.plan(src, dst).table.numpy(), want)
        grandchild = os.fork()
        if grandchild == 0:
            signal.alarm(60)
            os._exit(0 if np.array_equal(pairing.plan(src, dst).table.numpy(), want) else 1)
        os._exit(0 if right and os.waitpid(grandchild, 0)[1] == 0 else 1)
    status = os.waitpid(child, 0)[1]
    assert status == 0, status
stop.set()
for other in others:
    other.join()
assert np.array_equal(pairing.plan(src, dst).table.numpy(), want)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork()")
@pytest.mark.parametrize("state", ["idle", "busy"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_child_plans_after_fork(threads, state):
    """Also where other threads were planning as it was forked: they are not there, and their locks stay locked."""
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(threads), state]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
