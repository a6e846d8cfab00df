"""NIXL's own: which kind of memory each descriptor goes under, its sessions, and what it needs to load."""

from __future__ import annotations

import base64
import sys

import numpy as np
import pytest
from engine_peer import GUARD, make_engine, make_pair, need

from kvplan import Layout, Memory, Region, TransferError, engines
from kvplan.engines import nixl_load, nixl_rows
from kvplan.engines.nixl_session import session_of


@pytest.fixture(scope="module")
def engine():
    need("nixl")
    with make_engine("nixl") as engine:
        yield engine


@pytest.mark.parametrize("draft", [False, True])
def test_two_spaces_of_two_memories_go_under_the_right_one(tmp_path_factory, monkeypatch, draft):
    """Host pages lie in DRAM 0, device pages in DRAM 1, which is to NIXL as another device is."""
    sides = make_pair("nixl", tmp_path_factory, draft=draft)
    given = []
    rows = nixl_rows._rows
    monkeypatch.setattr(nixl_rows, "_rows", lambda *arguments: given.append(rows(*arguments)) or given[-1])
    try:
        plan, wanted = sides.plan(300)
        sides.engine.submit(plan, sides.peer).wait(20)
        np.testing.assert_array_equal(sides.dst, wanted)  # the draft's pages too are what they were
        assert [len(part) for part in plan.segments] == [300, 300]  # one NIXL transfer each
        for segment, src, dst in zip(plan.segments, given[0::2], given[1::2], strict=True):
            assert set(src[:, 2]) == {0} and set(dst[:, 2]) == {segment.dst_memory.device}
            space = "host" if segment.dst_memory == Memory.DRAM else "device"
            region = next(r for r in sides.peer.layout.regions if r.space == space)
            assert (dst[:, 0] >= region.base).all() and (dst[:, 0] < region.base + region.span_bytes).all()
    finally:
        sides.close()


def test_a_descriptor_under_the_wrong_memory_is_refused_by_nixl(tmp_path_factory):
    """So what arrived in the test above went under the right one. The peer here declares its two memories swapped."""
    sides = make_pair("nixl", tmp_path_factory)
    try:
        swap = {Memory.DRAM: ["DRAM", 1], Memory("DRAM", 1): ["DRAM", 0]}
        told = sides.peer.layout.to_dict()
        for region, fields in zip(sides.peer.layout.regions, told["regions"], strict=True):
            fields["memory"] = swap[region.memory]
        truth = sides.peer
        sides.peer = engines.Peer(truth.session, Layout.from_dict(told))
        transfer = sides.engine.submit(sides.plan(20)[0], sides.peer)
        with pytest.raises(
            TransferError, match="NIXL_ERR_NOT_FOUND.*0 to 39 were never sent.*Nothing of this transfer"
        ) as caught:
            transfer.wait(20)
        assert caught.value.settled is True and transfer.settle(0) is True
        assert (sides.dst == GUARD).all()
        sides.peer = truth
        plan, wanted = sides.plan(20)
        sides.engine.submit(plan, sides.peer).wait(20)
        np.testing.assert_array_equal(sides.dst, wanted)
    finally:
        sides.close()


def test_a_longer_plan_goes_in_chunks_and_is_told_once(tmp_path_factory):
    sides = make_pair("nixl", tmp_path_factory, max_in_flight=64)
    try:
        plan, wanted = sides.plan(300)
        sides.engine.submit(plan, sides.peer, notify=b"all of it").wait(20)
        assert max(sides.engine.sizes) <= 64 and sum(sides.engine.sizes) == len(plan)
        sides.tell("notice all of it")
        np.testing.assert_array_equal(sides.dst, wanted)
    finally:
        sides.close()


def test_memory_that_nixl_refuses_leaves_an_engine_that_works(tmp_path_factory):
    """Without a GPU, device memory is refused, and the agent that refused it is not used any more."""
    sides = make_pair("nixl", tmp_path_factory)
    try:
        fake = Layout([Region("v", 0, sides.src.ctypes.data, 64, 4, memory=Memory.VRAM(0))], page_size=1)
        before = sides.engine.session
        with pytest.raises(RuntimeError, match="NIXL did not register 1 spans of memory.*VRAM"):
            sides.engine.register(fake)
        assert sides.engine.session != before
        plan, wanted = sides.plan(20)
        sides.engine.submit(plan, sides.peer).wait(20)
        np.testing.assert_array_equal(sides.dst, wanted)
    finally:
        sides.close()


# ---- sessions: what a peer says is checked before NIXL sees it


def parts(session: str) -> tuple[str, bytes]:
    """The agent's name and metadata."""
    return session.split(":")[1], base64.b64decode(session.split(":")[3])


def test_sessions_that_are_none_are_refused(engine):
    plan_layout = Layout([Region("kv", 0, 4096, 64, 4)], page_size=16)
    name, metadata = parts(engine.session)
    assert session_of(name, metadata) == engine.session
    assert f"nixl:{name}" in engine.session and repr(engine).endswith(f"('{name}')")
    for wrong, message in (
        ("", "is no session"),
        ("127.0.0.1:80", "is no session"),
        (engine.session[:-9], "damaged"),
        (engine.session[:-9] + "!" + engine.session[-8:], "is no session"),
        (engine.session.replace(name, "x" * 65), "is no session"),
        (session_of(name, metadata).replace(":", ":0", 1)[:-4] + "AAAA", "damaged"),
        (engine.session + "A" * (17 << 20), "17[0-9]* characters; at most"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(engine_plan(), engines.Peer(wrong, plan_layout))


def engine_plan():
    from engine_peer import table_plan

    return table_plan()


def test_a_session_under_another_name_is_refused(tmp_path_factory):
    """A peer cannot pass for another."""
    sides = make_pair("nixl", tmp_path_factory)
    try:
        plan, wanted = sides.plan(20)
        _, metadata = parts(sides.peer.session)
        with pytest.raises(ValueError, match="the session of NIXL agent kvplan-other holds the metadata of 'kvplan-"):
            sides.engine.submit(plan, engines.Peer(session_of("kvplan-other", metadata), sides.peer.layout))
        sides.engine.submit(plan, sides.peer).wait(20)
        np.testing.assert_array_equal(sides.dst, wanted)
    finally:
        sides.close()


# ---- what it needs


def test_missing_package_says_what_to_install(monkeypatch):
    for package in ("nixl", "nixl_cu12", "nixl_cu13"):
        monkeypatch.setitem(sys.modules, f"{package}._api", None)
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"kvplan\[nixl\].*kvplan\[nixl-cuda13\].*--no-deps nixl-cu12"):
        engines.NixlEngine()


def test_arguments(monkeypatch):
    need("nixl")
    for timeout in (0, -1, float("nan"), "1"):
        with pytest.raises(ValueError, match="timeout"):
            engines.NixlEngine(timeout=timeout)
    for timeout in (None, float("inf")):
        with engines.NixlEngine(timeout=timeout) as engine:
            assert engine.timeout is None
    with pytest.raises(RuntimeError, match="no back end 'NONE'"):
        engines.NixlEngine(backend="NONE")
    monkeypatch.setattr(nixl_load, "_has_rdma", lambda: False)
    for modules in ("", "all", "ib", "^cuda", "tcp,ib"):
        monkeypatch.setenv("UCX_MODULES", modules)
        with pytest.raises(RuntimeError, match=r"UCX_MODULES=\^ib"):
            engines.NixlEngine()
    assert all(map(nixl_load._leaves_out_ib, ("^ib", "^cuda,ib", "tcp")))
