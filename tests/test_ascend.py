"""Ascend's own: what memfabric_hybrid is called with. Beneath is a stand-in (memfabric.py); no NPU is near."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import memfabric
import numpy as np
import pytest
from engine_peer import SRC_FIELDS, Together, layout_of, make_engine, table_plan

from kvplan import Layout, Memory, Region, TransferError, engines


@pytest.fixture
def sides():
    memfabric.TransferEngine.batches.clear()
    sides = Together("ascend", draft=True)
    yield sides
    sides.close()


def test_two_spaces_with_strides_of_their_own(sides):
    plan, wanted = sides.plan(500)
    assert len(plan.segments) == 2
    sides.engine.submit(plan, sides.peer).wait(5)
    np.testing.assert_array_equal(sides.dst, wanted)


def test_a_layout_is_registered_in_one_batch(sides):
    assert [len(batch) for batch in memfabric.TransferEngine.batches] == [2, 3]


def test_a_peer_that_has_not_registered_is_an_error(sides):
    sides.tell("unregister")
    transfer = sides.engine.submit(sides.plan(5)[0], sides.peer)
    with pytest.raises(TransferError) as caught:
        transfer.wait(5)
    assert caught.value.code == -1 and caught.value.settled is False
    assert transfer.settle(0) is False and "does not say" in transfer.unsettled
    sides.tell("register")
    with pytest.raises(TransferError):
        sides.engine.submit(sides.plan(5)[0], engines.Peer("127.0.0.1:none", sides.peer.layout)).wait(5)


def test_initialize_is_checked(monkeypatch):
    monkeypatch.setattr(memfabric.TransferEngine, "no_driver", True)
    with pytest.raises(RuntimeError, match="did not initialize.*returned -1.*NPU"):
        make_engine("ascend")
    monkeypatch.setattr(memfabric.TransferEngine, "no_driver", False)
    for arguments, message in (
        (("tcp://x:1", "s", "prefill"), "role"),
        (("tcp://x:1", "", "Prefill"), "session"),
    ):
        with pytest.raises(ValueError, match=message):
            engines.AscendEngine(*arguments)
    with pytest.raises(ValueError, match="no data operation 'TCP'"):
        engines.AscendEngine("tcp://x:1", "s", "Decode", op="TCP")


def test_memory_of_another_device_is_refused(sides):
    other = Layout([Region("x", 0, 1 << 21, 64, 4, memory=Memory.VRAM(1))], page_size=1)
    with pytest.raises(RuntimeError, match="VRAM:1 0x200000 is not memory of this engine's device, 0"):
        sides.engine.register(other)


def test_mf_adapter_and_a_missing_package_are_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "mf_adapter", sys)
    with pytest.raises(ImportError, match="mf_adapter is loaded"):
        make_engine("ascend")
    monkeypatch.delitem(sys.modules, "mf_adapter")
    monkeypatch.setitem(sys.modules, "memfabric_hybrid", None)
    with pytest.raises(ImportError, match="pip install memfabric_hybrid"):
        make_engine("ascend")


# ---- the stand-in itself


def test_the_stand_in_checks_every_address(sides):
    engine, own = sides.engine._engine, layout_of(SRC_FIELDS, sides.src).by_key["kv", 0]
    there = sides.peer.layout.by_key["kv", 0]
    end_here, end_there = own.base + own.span_bytes * 2, there.base + there.span_bytes
    write = engine.batch_transfer_sync_write
    assert write(sides.peer.session, [own.base], [there.base], [64]) == 0
    for here, far, length in (
        (end_here - 63, there.base, 64),
        (own.base - 1, there.base, 64),
        (own.base, there.base - 1, 64),
        (own.base, end_there - 63, 64),
        (own.base, there.base, 0),
        (own.base, there.base, -1),
    ):
        assert write(sides.peer.session, [own.base, here], [there.base, far], [64, length]) == -1
    assert write(sides.peer.session, [own.base], [there.base], [64, 64]) == -1
    assert table_plan((own.base, there.base, 64)).lists() == ([own.base], [there.base], [64])


def test_the_stand_in_has_the_signatures_of_the_real_one():
    """Names and defaults, read off the real package's docstrings in a process of its own."""
    names = [name for name, _ in inspect.getmembers(memfabric.TransferEngine, inspect.isfunction) if name[0] != "_"]
    names.remove("holds")
    code = (
        "import json, memfabric_hybrid as m\n"
        f"print('RESULT' + json.dumps([{{n: getattr(m.TransferEngine, n).__doc__ for n in {names}}},\n"
        "                              list(m.TransDataOpType.__members__)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip("memfabric_hybrid is not installed")
    docs, operations = json.loads(done.stdout.partition("RESULT")[2])
    assert set(operations) == set(memfabric.TransDataOpType.__members__)
    for name in names:
        real = re.findall(r"(\w+): [^,()]*(?:\[[^]]*\])?", re.sub(r"\[[^()]*?\]\]?", "", docs[name].split("->")[0]))
        mine = list(inspect.signature(getattr(memfabric.TransferEngine, name)).parameters)
        assert real == mine, docs[name]


@pytest.mark.skipif(Path("/dev/davinci0").exists(), reason="there is an NPU")
def test_the_real_package_refuses_to_initialize_here():
    """Where it is installed and there is no NPU: the engine that failed is not used."""
    code = (
        "from kvplan import engines\n"
        "try: engines.AscendEngine('tcp://127.0.0.1:9', '127.0.0.1:1', 'Decode')\n"
        "except (RuntimeError, ImportError) as error: print('RESULT', type(error).__name__, error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert re.search("RESULT (RuntimeError memfabric did not init|ImportError AscendEngine needs)", done.stdout)
