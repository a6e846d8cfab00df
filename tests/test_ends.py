"""Threads and the end: submits that cannot be carried out, peers that hang, engines that close, processes that exit."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest
from engine_peer import GUARD, KINDS, NIXL_TIMEOUT, Together, make_pair, need, table_plan
from stepped import Stepped, until

from kvplan import Layout, Memory, PlanError, Region, TransferError, TransferTimeout, engines
from kvplan.engines.lanes import CALLS_PER_PEER
from kvplan.engines.outcome import Outcome


@pytest.fixture
def sides():
    sides = Together("local")
    yield sides
    sides.close()


# ---- time limits


@pytest.mark.parametrize("limit", [float("nan"), -1, "5", True])
def test_what_is_no_time_limit_is_refused(sides, limit):
    transfer = sides.engine.submit(sides.plan(1)[0], sides.peer)
    group = engines.TransferGroup([transfer])
    for use in (
        transfer.wait,
        transfer.exception,
        transfer.settle,
        group.wait,
        group.settle,
        engines.Quarantine().free,
        sides.engine.close,
        lambda timeout: sides.engine.wait_notice(b"x", timeout),
    ):
        with pytest.raises(ValueError, match="timeout"):
            use(limit)
    transfer.wait(10)


@pytest.mark.parametrize("limit", [None, float("inf"), 1e300])
def test_no_limit(sides, limit):
    transfer = sides.engine.submit(sides.plan(1)[0], sides.peer, notify=b"x")
    transfer.wait(limit)
    assert transfer.exception(limit) is None and transfer.settle(limit)
    sides.target.wait_notice(b"x", limit)
    sides.engine.close(limit)


# ---- submit


def test_what_changes_after_submit_is_not_sent(sides):
    plan, wanted = sides.plan(30)
    secret = np.full(64, 77, dtype=np.uint8)
    with sides.engine.held():
        transfers = [sides.engine.submit(plan, sides.peer) for _ in range(4)]
        plan.table[0] = secret.ctypes.data
        plan.table[1] = 4096
    for transfer in transfers:
        transfer.wait(20)
    np.testing.assert_array_equal(sides.dst, wanted)


@pytest.mark.parametrize("dtype, shape", [("int32", (3, 4)), ("int64", (4, 3)), ("int64", (3,)), ("float64", (3, 1))])
def test_a_table_of_another_form_is_refused(sides, dtype, shape):
    import torch

    plan = table_plan()
    plan.table = torch.zeros(shape, dtype=getattr(torch, dtype))
    with pytest.raises(PlanError, match="table is torch int64"):
        sides.engine.submit(plan, sides.peer)
    plan.table = np.zeros((3, 1), np.int64)
    with pytest.raises(PlanError, match="not ndarray"):
        sides.engine.submit(plan, sides.peer)


def test_submit_that_raises_for_want_of_a_thread_has_no_effect(sides, monkeypatch):
    plan, _ = sides.plan(5)
    later, wanted = sides.plan(5, seed=1)

    def none(self):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="nothing is submitted: can't start new thread"):
                sides.engine.submit(plan, sides.peer)
    assert not sides.engine._lanes.by_key and sides.engine.stats() == engines.Stats()
    sides.engine.submit(later, sides.peer).wait(10)
    np.testing.assert_array_equal(sides.dst, wanted)  # nothing of the other
    with monkeypatch.context() as patch:  # one that is served already needs no other thread
        patch.setattr(threading.Thread, "start", none)
        sides.engine.submit(later, sides.peer).wait(10)


def test_a_real_lack_of_threads():
    """In a process of its own, with no memory for a thread's stack."""
    code = """
import resource
from engine_peer import Together
sides = Together("local")
plan = sides.plan(5)[0]
size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
old = resource.getrlimit(resource.RLIMIT_AS)
resource.setrlimit(resource.RLIMIT_AS, (size + (2 << 20), old[1]))
try: sides.engine.submit(plan, sides.peer)
except RuntimeError as error: print("raises", error)
resource.setrlimit(resource.RLIMIT_AS, old)
other, wanted = sides.plan(5, seed=1)
sides.engine.submit(other, sides.peer).wait(10)
print("right", (sides.dst == wanted).all())
sides.close()
"""
    assert resource.RLIMIT_AS
    said = run(code)
    assert "nothing is submitted" in said and "right True" in said


# ---- peers that hang


class Hangs(engines.LocalEngine):
    """Calls to peers with "hung" in their name hang."""

    _stops_on_failure = False

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def _move(self, session, chunk, op):
        if "hung" in session:
            self.go.wait()
            return Outcome(-1)
        return super()._move(session, chunk, op)


def test_peers_that_hang_keep_no_other_waiting():
    sides = Together("local")
    sides.engine.close()
    engine = sides.engine = Hangs()
    engine.register(sides.layout)
    plan, wanted = sides.plan(3)
    before = threading.active_count()
    try:
        stuck = [engine.submit(plan, engines.Peer(f"hung{n}", sides.peer.layout)) for n in range(200) for _ in range(3)]
        engine.submit(plan, sides.peer).wait(20)
        np.testing.assert_array_equal(sides.dst, wanted)
        assert threading.active_count() - before <= 200 * CALLS_PER_PEER + 1
        stats = engine.stats()
        assert (stats.in_flight, stats.queued, stats.arrived) == (400, 200, 1)
        assert stats.peers["hung7"].in_flight == 2 and stats.peers["hung7"].queued == 1
    finally:
        engine.go.set()
    for transfer in stuck:
        assert transfer.exception(20).code == -1
    for n in range(200):
        engine.peer_ended(f"hung{n}")
    assert engine.stats().unsettled == 0
    until(lambda: not engine._lanes.by_key)
    sides.close()
    until(lambda: threading.active_count() <= before + 1)  # idle threads end with the engine


# ---- close


def test_close_starts_nothing_and_fails_what_is_queued():
    sides = Together("local")
    sides.engine.close()
    engine = sides.engine = Stepped()
    engine.register(sides.layout)
    begun = [engine.submit(sides.plan(10)[0], sides.peer, label="first")]  # two chunks, of which the engine takes one
    queued = [engine.submit(sides.plan(10)[0], sides.peer) for _ in range(3)]
    with pytest.raises(TransferTimeout, match="still at work after 0.05 s: transfer 'first' of 20.*close it again"):
        engine.close(0.05)
    for transfer in queued:
        with pytest.raises(TransferError, match="closed before it began.*never sent"):
            transfer.wait(0)
        assert transfer.settled
    with pytest.raises(RuntimeError, match="is closed"):
        engine.submit(sides.plan(1)[0], sides.peer)
    with pytest.raises(TransferTimeout):
        engine.close(0)
    engine.let_go()
    engine.close(10)
    for transfer in begun:
        assert transfer.exception(10).settled is True and transfer.arrived == 10
    engine.close(0)
    sides.target.close()


def test_close_lets_what_has_begun_come_to_its_end():
    sides = Together("local")
    sides.engine.close()
    engine = sides.engine = Stepped()
    engine.register(sides.layout)
    plan, wanted = sides.plan(20)
    transfer = engine.submit(plan, sides.peer)
    closing = threading.Thread(target=engine.close)
    closing.start()
    until(lambda: engine._closed)
    engine.let_go()
    closing.join(20)
    transfer.wait(0)
    np.testing.assert_array_equal(sides.dst, wanted)
    sides.target.close()


def test_close_behind_a_peer_that_hangs_takes_one_time_limit(tmp_path_factory):
    sides = make_pair("nixl", tmp_path_factory, max_in_flight=64)
    try:
        sides.engine.submit(sides.plan(1)[0], sides.peer).wait(20)
        sides.stop()
        sizes = len(sides.engine.sizes)
        transfers = [sides.engine.submit(sides.plan(64)[0], sides.peer) for _ in range(12)]
        sides.engine.close(NIXL_TIMEOUT * 5)  # one after the other they would take twelve limits
        assert all(transfer.done() for transfer in transfers)
        assert len(sides.engine.sizes) - sizes <= CALLS_PER_PEER
    finally:
        sides.go_on()
        sides.close()


# ---- the process ends


def run(code: str, *arguments: str, timeout: float = 60) -> str:
    path = os.pathsep.join([os.path.dirname(__file__), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


ENDS = """
import atexit, sys
kind, how = sys.argv[1:]
if how == "early": atexit.register(lambda: (sides.engine.close(), print("closed")))
from engine_peer import Together
sides = Together(kind)
if how == "late": atexit.register(lambda: (sides.engine.close(), print("closed")))
plan = sides.plan(4096)[0]
transfers = [sides.engine.submit(plan, sides.peer) for _ in range(6)]
print("main ends")
"""


@pytest.mark.parametrize("how", ["early", "late", "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_may_end_with_transfers_queued(kind, how):
    need(kind)
    said = run(ENDS, kind, how)
    assert "main ends" in said and ("closed" in said) is (how != "never")


def test_a_program_may_end_while_a_call_hangs():
    code = """
import threading
from engine_peer import Together
import kvplan.engines.lanes as lanes
lanes._EXIT_S = 0.2
sides = Together("local")
sides.engine.open.clear()
transfers = [sides.engine.submit(sides.plan(5)[0], sides.peer) for _ in range(3)]
print("main ends")
"""
    assert "main ends" in run(code)


# ---- what errors say


def test_local_says_that_the_peer_has_not_registered(sides):
    sides.tell("unregister")
    error = sides.engine.submit(sides.plan(3)[0], sides.peer).exception(10)
    assert f"nothing is registered with the peer, {sides.peer.session}" in str(error) and error.settled is True
    sides.tell("register")


@pytest.mark.parametrize("name", ["127.0.0.1:80", "decode-3:17000", "[fe80::1]:80", "", None])
def test_a_hostname_with_a_port_is_refused(name):
    with pytest.raises(ValueError, match="hostname"):
        engines.MooncakeEngine(name)
    from kvplan.engines.mooncake import _check_hostname

    for right in ("127.0.0.1", "decode-3", "fe80::1", "[fe80::1]", "::1"):
        _check_hostname(right)


def test_mooncake_names_the_region_that_it_refuses():
    need("mooncake")
    memory = np.zeros(1 << 16, dtype=np.uint8)
    with engines.MooncakeEngine() as engine:
        engine._engine.register_memory(memory.ctypes.data, len(memory))  # behind kvplan's back
        layout = Layout([Region("kv", 3, memory.ctypes.data, 64, 64)], page_size=16)
        with pytest.raises(RuntimeError, match=r"did not register 4096 bytes of DRAM at 0x.* \(region kv layer 3\): -"):
            engine.register(layout)
        engine._engine.unregister_memory(memory.ctypes.data)


def test_a_failure_names_regions_and_shortens_what_peers_say(sides):
    long = "local:" + "n" * 900
    plan = sides.plan(3)[0]
    error = sides.engine.submit(plan, engines.Peer(long, sides.peer.layout), label="request 9").exception(10)
    text = str(error)
    assert "transfer 'request 9' of 6 descriptors" in text and "goes from region kv layer 0, DRAM" in text
    assert "n" * 70 not in text
    dst = np.full(64, GUARD, np.uint8)
    named = Layout([Region("r" * 250, 0, dst.ctypes.data, 64, 1, memory=Memory.DRAM)], page_size=16)
    with pytest.raises(PlanError) as caught:
        sides.engine.submit(table_plan((sides.src.ctypes.data, 8, 8)), engines.Peer(sides.peer.session, named))
    assert len(str(caught.value)) < 400
    with pytest.raises(ValueError, match="label must be a string"):
        sides.engine.submit(plan, sides.peer, label=7)


def test_a_child_after_fork_ends_without_waiting_for_its_parents_calls():
    """No thread of the parent's engine is in the child, and its lock may have been held when it was made."""
    code = """
import os, sys
from engine_peer import Together
import kvplan.engines.lanes as lanes
lanes._EXIT_S = 1e6
sides = Together("local")
sides.engine.open.clear()
transfer = sides.engine.submit(sides.plan(5)[0], sides.peer)
with sides.engine._lock:
    child = os.fork()
if child == 0:
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
lanes._EXIT_S = 0.2
"""
    assert "child 7" in run(code)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_whatever_a_callback_raises_the_lane_goes_on(error):
    sides = Together("local")
    try:

        def raises(transfer):
            raise error

        for _ in range(6):  # more than a peer has threads
            transfer = sides.engine.submit(sides.plan(5)[0], sides.peer)
            transfer.add_done_callback(raises)
            transfer.wait(10)
        sides.engine.submit(sides.plan(5)[0], sides.peer).wait(10)
    finally:
        sides.engine.close(10)


def test_an_engine_is_its_processes_own():
    code = """
import os
from engine_peer import Together
sides = Together("local")
plan = sides.plan(5)[0]
child = os.fork()
if child == 0:
    try: sides.engine.submit(plan, sides.peer)
    except RuntimeError as error: os._exit(7 if "made in another process" in str(error) else 1)
    os._exit(0)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert "child 7" in run(code)


def test_nobody_waits_for_a_notice_of_a_closed_engine():
    sides = Together("local")
    threading.Timer(0.2, sides.engine.close).start()
    with pytest.raises(RuntimeError, match="is closed"):
        sides.engine.wait_notice(b"never", None)
