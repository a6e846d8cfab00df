"""Mooncake's own: which of its calls are used, its limits, and what it needs to load."""

from __future__ import annotations

import sys
import time

import numpy as np
import pytest
from engine_peer import GUARD, PAGES, make_engine, make_pair, need

from kvplan import TransferError, engines
from kvplan.engines import mooncake


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
    sides = make_pair("mooncake", tmp_path_factory, calls="async")
    yield sides
    sides.close()


def test_asynchronous_calls(asynchronous):
    sides = asynchronous
    sides.dst[:] = GUARD
    plan, wanted = sides.plan(PAGES)
    sides.engine.submit(plan, sides.peer).wait(30)
    np.testing.assert_array_equal(sides.dst, wanted)


def test_asynchronous_calls_that_fail(asynchronous):
    sides = asynchronous
    sides.tell("unregister")
    try:
        with pytest.raises(TransferError) as caught:
            failed = sides.engine.submit(sides.plan(2)[0], sides.peer)
            failed.wait(20)
        assert caught.value.code == -1
    finally:
        sides.tell("register")
    dead = engines.Peer("127.0.0.1:1", sides.peer.layout)
    with pytest.raises(TransferError, match="no batch"):
        sides.engine.submit(sides.plan(2)[0], dead).wait(20)
    plan, _ = sides.plan(2)
    sides.engine.submit(plan, sides.peer, queue_behind=True).wait(20)
    assert failed.settled


def test_the_interpreter_runs_on_while_bytes_move(tmp_path_factory):
    sides = make_pair("mooncake", tmp_path_factory)
    try:
        sides.engine.submit(sides.plan(1)[0], sides.peer).wait(20)
        ticks = []
        transfer = sides.engine.submit(sides.plan(PAGES)[0], sides.peer)
        while not transfer.done():
            ticks.append(time.monotonic())
            time.sleep(0.001)
        # Were the lock held, there would be a tick before and one behind each call of 1024 descriptors, 8 in all.
        assert len(ticks) > 20
    finally:
        sides.close()


class ArraysEngine:
    """What Mooncake 0.3.14 and later offer in addition, as far as kvplan uses it: a recorder, for want of that version
    here. It shows which call is made, with what; not that the call does anything."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def initialize(self, *arguments) -> int:
        return 0

    def get_rpc_port(self) -> int:
        return 7

    def register_memory(self, base: int, nbytes: int) -> int:
        return 0

    def unregister_memory(self, base: int) -> int:
        return 0

    def _note(self, name: str, session: str, here: np.ndarray, there: np.ndarray, nbytes: np.ndarray) -> int:
        for array in (here, there, nbytes):
            assert isinstance(array, np.ndarray) and array.flags.c_contiguous and array.dtype.itemsize == 8
        self.calls.append((name, session, here.tolist(), there.tolist(), nbytes.tolist()))
        return 0 if "sync" in name and "async" not in name else 41

    def batch_transfer_sync_write_arrays(self, *arguments) -> int:
        return self._note("sync_write", *arguments)

    def batch_transfer_sync_read_arrays(self, *arguments) -> int:
        return self._note("sync_read", *arguments)

    def batch_transfer_async_write_arrays(self, *arguments) -> int:
        return self._note("async_write", *arguments)

    def batch_transfer_async_read_arrays(self, *arguments) -> int:
        return self._note("async_read", *arguments)

    def get_batch_transfer_status(self, batches: list[int]) -> int:
        self.calls.append(("status", batches))
        return 0


@pytest.mark.parametrize("calls", ["sync", "async"])
@pytest.mark.parametrize("op", ["write", "read"])
def test_a_version_that_takes_arrays_is_given_arrays(monkeypatch, tmp_path_factory, calls, op):
    recorder = ArraysEngine()
    monkeypatch.setattr(mooncake, "_transfer_engine", lambda: recorder)
    local = make_pair("local", tmp_path_factory)
    with engines.MooncakeEngine(calls=calls) as engine, local.engine:
        plan, _ = local.plan(40)
        here, there = (local.layout, local.peer.layout) if op == "write" else (local.peer.layout, local.layout)
        engine.register(here)
        engine.submit(plan, engines.Peer("127.0.0.1:8", there), op=op).wait(5)
    src, dst, nbytes = plan.lists()
    columns = (src, dst) if op == "write" else (dst, src)
    assert recorder.calls[0] == (f"{calls}_{op}", "127.0.0.1:8", *columns, nbytes)
    assert recorder.calls[1:] == ([("status", [41])] if calls == "async" else [])
    local.close()


def test_limits_and_arguments():
    need("mooncake")
    for limit in (0, 1025):
        with pytest.raises(ValueError, match=f"max_in_flight is {limit}"):
            engines.MooncakeEngine(max_in_flight=limit)
    with pytest.raises(ValueError, match="'sync' or 'async'"):
        engines.MooncakeEngine(calls="both")
    with make_engine("mooncake") as engine:
        assert engine.max_in_flight == 1024


def test_missing_package_or_library_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    with pytest.raises(ImportError, match=r"kvplan\[mooncake\].*kvplan\[mooncake-cuda13\].*kvplan\[mooncake-cpu\]"):
        engines.MooncakeEngine()
    for library, advice in (("libibverbs.so.1", "apt-get install libibverbs1"), ("libcuda.so.1", "mooncake-cpu")):
        package = tmp_path / library / "mooncake"
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
        (package / "engine.py").write_text(f"raise ImportError('{library}: cannot open shared object file')")
        monkeypatch.syspath_prepend(tmp_path / library)
        for name in ("mooncake", "mooncake.engine"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        with pytest.raises(ImportError, match=f"{library}.*{advice}"):
            engines.MooncakeEngine()


@pytest.mark.parametrize("protocol", ["TCP", "foo", ""])
def test_another_protocol_is_refused(protocol):
    """Mooncake would take it, and use TCP without the limit that TCP needs."""
    with pytest.raises(ValueError, match="must be 'tcp' or 'rdma'"):
        engines.MooncakeEngine("127.0.0.1", protocol=protocol)
