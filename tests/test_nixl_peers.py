"""What a NIXL peer may send: forged, repeated and contradictory sessions, and notices that nobody collects.

Forgeries are tried in processes of their own, since NIXL and UCX end theirs on them.
"""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from engine_peer import Together, make_engine, make_pair, need, processes
from nixl_forgery import address_of, everywhere, forged, lengths, parts, spoiled, with_address

from kvplan import Layout, Memory, Region, TransferError, engines, pair
from kvplan.engines import nixl_address, nixl_metadata, nixl_peers, nixl_session
from kvplan.engines.nixl_session import session_of


@pytest.fixture(scope="module")
def agent():
    """A real engine, with two kinds of devices registered."""
    need("nixl")
    memory = np.zeros(1 << 16, np.uint8)
    with make_engine("nixl") as engine:
        regions = [Region("kv", k, memory.ctypes.data + 4096 * k, 64, 8, memory=Memory("DRAM", k)) for k in range(2)]
        engine.register(Layout(regions, page_size=4))
        yield engine


def survives(function, *arguments) -> None:
    process = processes().Process(target=function, args=arguments, daemon=True)
    process.start()
    process.join(120)
    code = process.exitcode
    process.kill()
    assert code == 0, f"ended with {code}"


# ---- sessions are read before NIXL reads them


def test_what_an_agent_says_is_read_as_it_is(agent):
    name, data = parts(agent.session)
    metadata = nixl_metadata.parse(data, "UCX")
    assert (metadata.name, metadata.backend, metadata.num_regions) == (name, "UCX", 2)
    assert metadata.address == data[address_of(data)]
    rows = [(base, nbytes, memory.device) for memory, base, nbytes in sorted(agent._spans.all, key=lambda s: s[1])]
    assert sorted(map(tuple, metadata.regions["DRAM"].tolist())) == rows
    again = metadata.under(name)
    at = address_of(data)
    assert again[: at.start + 1] == data[: at.start + 1] and again[at.start + 9 :] == data[at.start + 9 :]
    other = nixl_metadata.parse(metadata.under("other"), "UCX")
    assert other.name == "other" and other.address[1:9] != metadata.address[1:9]
    assert other.address[9:] == metadata.address[9:]


SETTINGS = [
    {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"},
    {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "all"},
    {"UCX_TLS": "all", "UCX_NET_DEVICES": "all"},
    {"UCX_TLS": "all", "UCX_NET_DEVICES": "all", "UCX_ADDRESS_VERSION": "v2"},
    {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_ADDRESS_DEBUG_INFO": "y"},
]
HONEST = """
import numpy as np
from kvplan import Layout, Memory, Region, engines, pair
from kvplan.engines import nixl_session
src = np.ones(64, np.uint8)
mine = Layout([Region("kv", 0, src.ctypes.data, 64, 1)], page_size=4)
memory = np.zeros(128 * 500, np.uint8)
regions = [
    Region("kv", k, memory.ctypes.data + 128 * k, 64, 1, memory=Memory("DRAM", k % 3)) for k in range(500)
]
with engines.NixlEngine() as engine, engines.NixlEngine() as peer:
    engine.register(mine)
    done = 0
    for count in (0, 1, 2, 61, 500):
        if regions[done:count]:
            peer.register(Layout(regions[done:count], page_size=4))
        done = count
        assert nixl_session.parse(peer.session, "UCX").num_regions == count
        for region in regions[:count][-1:]:
            theirs = Layout([Region("kv", 0, region.base, 64, 1, memory=region.memory)], page_size=4)
            engine.submit(pair(mine, theirs).plan([0], [0]), engines.Peer(peer.session, theirs)).wait(20)
            assert memory[128 * count - 128 : 128 * count - 64].all()
"""


@pytest.mark.slow
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: " ".join(settings.values()))
def test_honest_sessions_are_taken(settings):
    """From 0 to 500 regions, over every transport that this machine has, in both forms of UCX's addresses."""
    need("nixl")
    done = subprocess.run(
        [sys.executable, "-c", HONEST], env={**os.environ, **settings}, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_forgeries_are_refused_or_differ_in_content_alone(agent):
    """Each change that the form does not allow is refused, in words; and what is not refused is read in full."""
    name, data = parts(agent.session)
    taken = 0
    for lie in (*everywhere(data), *lengths(data)):
        try:
            metadata = nixl_metadata.parse(lie, "UCX")
        except ValueError as error:
            assert "byte " in str(error) and len(str(error)) < 300 and str(error).isprintable()
        else:
            taken += lie != data
            # What may differ: the name, values within the address and keys, and where regions lie.
            assert len(lie) == len(data) and metadata.num_regions == 2
            assert nixl_metadata.parse(metadata.under(name), "UCX").regions.keys() <= {"DRAM", "VRAM"}
    assert taken


def test_what_ends_nixl_or_ucx_is_refused(agent):
    _, data = parts(agent.session)
    at = address_of(data)
    address, kind, key = data[at], data.index(b"SDList|t") + 16, len(data) - 10
    v2 = bytes.fromhex("71020102030405060708008e") + address[11:25] + bytes.fromhex("cf190c015a0180008b0082bd05")
    nixl_metadata.parse(with_address(data, v2), "UCX")
    for lie, message in (
        (data[:kind] + b"\x05" + data[kind + 1 :], "memory of kind 5"),
        (data[:key] + b"\x01" + data[key + 1 :], "bytes are wanted, "),  # a key of domain 56, which is not there
        (data[: key + 8] + b"\x0b" + data[key + 9 :], "memory of type 11"),
        (data.replace(b"|n\x08", b"|n\x09"), "8 bytes|9 bytes"),
        (with_address(data, address[:-1]), "bytes are wanted, 0 are left"),
        (with_address(data, address + b"\0"), "1 bytes behind its end"),
        (with_address(data, b"\x22" + address[1:]), "version 2; it is 0 or 1"),
        (with_address(data, b"\x10" + address[1:]), "flags 0x1;"),
        (with_address(data, address[:9] + b"\xff" + address[10:]), "memory domain 127"),
        (with_address(data, address[:10] + b"\x06" + address[11:17] + address[25:]), "TCP address of 6 bytes"),
        (with_address(data, address[:12] + b"\x03" + address[13:]), "no TCP address"),
        (with_address(data, address[:27] + b"\0\0\xc0\x7f" + address[31:]), "overhead nan"),
        (with_address(data, address[:31] + b"\0\0\0\0" + address[35:]), "bandwidth 0.0"),
        (with_address(data, address[:43] + b"\x80" + address[46:]), "TCP port of 0 bytes"),
        (with_address(data, address[:43] + b"\xc2" + address[44:]), "an endpoint's address"),
        (with_address(data, v2[:32] + b"\x02\0" + v2[34:]), "messages of 128 bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            nixl_metadata.parse(lie, "UCX")


@pytest.mark.parametrize("shared", [0x538D, 0xD3A7, 0x83DD], ids=["sysv", "posix", "xpmem"])
@pytest.mark.parametrize("version", [0, 1])
def test_shared_memory_is_left_out(shared, version):
    """UCX maps what an address says of it, and ends the process where that is not there."""
    attributes = bytes.fromhex("0c015a0080008b00" if version else "17b751389763344bd7e0373700132300")
    attributes = attributes.ljust(8 if version else 16, b"\0")
    header = (b"\x71\x02" if version else b"\x20") + bytes(8)

    def device(name: int, last: int, address: bytes, own: bytes) -> bytes:
        transport = name.to_bytes(2, "little") + attributes + bytes([0x80 | len(own)]) + own
        return bytes([1, last | len(address)]) + address + transport

    tcp, mapped = (0x19CF, b"\0\2\x7f\0\0\1", b"\x12\x34"), (shared, bytes(8), bytes(8))
    for order in ((tcp, mapped), (mapped, tcp), (mapped, tcp, mapped)):
        address = header + b"".join(
            device(name, 0x80 * (k == len(order) - 1), *rest) for k, (name, *rest) in enumerate(order)
        )
        assert nixl_address.check(address) == {tcp}
        alone = header[:-8] + b"\7" * 8 + device(tcp[0], 0x80, *tcp[1:])
        assert nixl_address.under(address, b"\7" * 8) == alone
    with pytest.raises(ValueError, match="no transport but shared memory"):
        nixl_address.check(header + device(shared, 0x80, *mapped[1:]))
    both = device(tcp[0], 0x80, *tcp[1:])
    both = both[:-3] + bytes([2]) + both[-2:] + shared.to_bytes(2, "little") + attributes + b"\x88" + bytes(8)
    with pytest.raises(ValueError, match="shared memory and another transport"):
        nixl_address.check(header + both)


def test_regions_are_bounded(agent):
    _, data = parts(agent.session)
    at = data.index(b"|n\x08") + 10
    region = data[at + 9 : at + 9 + 42]
    head = data[: data.index(b"|n\x08") + 2]

    def of(count: int, said: int) -> bytes:
        return head + (8).to_bytes(8, "little") + said.to_bytes(8, "little") + b"|" + region * count

    most = nixl_metadata.MAX_REGIONS
    assert nixl_metadata.parse(of(most, most), "UCX").num_regions == most == 65_536
    for count, said in ((most + 1, most + 1), (2, (1 << 64) - 1), (2, 1 << 63), (0, 0)):
        with pytest.raises(ValueError, match=f"{said} regions of one kind; 1 to 65536 in all"):
            nixl_metadata.parse(of(count, said), "UCX")
    with pytest.raises(ValueError, match="are wanted"):
        nixl_metadata.parse(of(2, 3), "UCX")


def forgeries(seed: int) -> None:
    rng = random.Random(seed)
    sides = Together("nixl", timeout=0.3)
    plan, wanted = sides.plan(5)
    honest = sides.peer
    _, metadata = parts(honest.session)
    begun, tried = time.monotonic(), 0
    while time.monotonic() < begun + 15:
        session = forged(honest.session, spoiled(rng, metadata))
        try:
            nixl_session.parse(session, "UCX")
        except ValueError:
            with pytest.raises(ValueError):
                sides.engine.submit(plan, engines.Peer(session, honest.layout))
            continue
        tried += 1
        with contextlib.suppress(TransferError):  # a place where nobody is
            sides.engine.submit(plan, engines.Peer(session, honest.layout)).wait(20)
        sides.engine.peer_ended(session)  # what failed on its way to the honest peer's own address is settled by that
    assert tried > 20
    sides.engine.timeout = 20
    sides.engine.submit(plan, honest).wait(20)
    assert (sides.dst == wanted).all()
    sides.close()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_forgeries_that_can_be_read_are_survived(seed):
    need("nixl")
    survives(forgeries, seed)


def overwritten(first: int, step: int) -> None:
    """Eight bytes of ones, or of zeros, at each offset: a session is refused, or its transfer fails or arrives."""
    sides = Together("nixl", timeout=0.3)
    plan = sides.plan(5)[0]
    _, metadata = parts(sides.peer.session)
    for pattern in (b"\xff" * 8, b"\0" * 8):
        for at in range(first, len(metadata), step):
            lie = metadata[:at] + pattern + metadata[at + 8 :]
            with contextlib.suppress(ValueError, TransferError):
                peer = engines.Peer(forged(sides.peer.session, lie), sides.peer.layout)
                sides.engine.submit(plan, peer).wait(20)
    sides.close()


@pytest.mark.parametrize("first", [0, 1])
def test_eight_bytes_overwritten_anywhere(first):
    need("nixl")
    survives(overwritten, first, 2)


# ---- peers that pass for others


def lies(sides) -> dict[str, str]:
    """Sessions made of an honest peer's."""
    name, data = parts(sides.peer.session)
    metadata = nixl_metadata.parse(data, "UCX")
    address = metadata.address
    port = address[:44] + (9).to_bytes(2, "big") + address[46:]  # nobody listens there
    moved = bytearray(data)
    moved[data.index(b"|n\x08") + 27] ^= 1  # the first region lies elsewhere
    return {
        "another name": session_of("kvplan-other", metadata.under("kvplan-other")),
        "no regions": session_of(name, data[: data.index(b"nixlSecElms") + 19] + bytes(8) + b"|"),
        "another place": session_of(name, with_address(data, port)),
        "another place, another name": session_of("kvplan-x", with_address(metadata.under("kvplan-x"), port)),
        "another region": session_of(name, bytes(moved)),
    }


def test_no_session_ends_the_transfers_of_another(tmp_path_factory):
    """Made of the victim's own metadata, under its name or another, while its transfers are under way and before."""
    sides = make_pair("nixl", tmp_path_factory)
    try:
        for early in (False, True):
            for what, session in lies(sides).items():
                plan, _ = sides.plan(4000, seed=len(what))
                if not early:
                    sides.engine.submit(sides.plan(1)[0], sides.peer).wait(20)
                    running = [sides.engine.submit(plan, sides.peer) for _ in range(3)]
                with contextlib.suppress(TransferError):
                    sides.engine.submit(sides.plan(1)[0], engines.Peer(session, sides.peer.layout)).wait(20)
                if early:
                    running = [sides.engine.submit(plan, sides.peer)]
                for transfer in running:
                    transfer.wait(20)
                sides.engine.submit(plan, sides.peer).wait(20)
                np.testing.assert_array_equal(sides.dst, sides.plan(4000, seed=len(what))[1], what)
            sides.tell("unregister")
            sides.tell("register")  # a new agent, that this engine does not know
    finally:
        sides.close()


def test_a_session_that_leads_back_here_is_refused(tmp_path_factory):
    """UCX would write here what is to go to the peer: over TCP wherever it is declared to lie."""
    sides = make_pair("nixl", tmp_path_factory)
    try:
        name, data = parts(sides.peer.session)
        own = nixl_metadata.parse(parts(sides.engine.session)[1], "UCX").address
        slower = own[:31] + b"\0" + own[32:]  # another bandwidth
        for address in (own, own[:1] + bytes(8) + own[9:], slower):
            session = session_of(name, with_address(data, address))
            with pytest.raises(ValueError, match=f"session of {name} leads to this engine itself"):
                sides.engine.submit(sides.plan(1)[0], engines.Peer(session, sides.peer.layout))
        with pytest.raises(ValueError, match="leads to this engine itself"):
            sides.engine.submit(sides.plan(1)[0], engines.Peer(sides.engine.session, sides.peer.layout))
    finally:
        sides.close()


def test_metadata_under_another_name_is_refused_at_once(tmp_path_factory):
    sides = make_pair("nixl", tmp_path_factory)
    try:
        _, data = parts(sides.peer.session)
        with pytest.raises(ValueError, match="session of NIXL agent kvplan-dead holds the metadata of 'kvplan-"):
            sides.engine.submit(sides.plan(1)[0], engines.Peer(session_of("kvplan-dead", data), sides.peer.layout))
    finally:
        sides.close()


def test_sessions_that_are_known_are_bounded(tmp_path_factory, monkeypatch):
    """The least used go first, and none that is in use."""
    monkeypatch.setattr(nixl_peers, "MAX_LOADED", 3)
    sides = make_pair("nixl", tmp_path_factory)
    try:
        _, data = parts(sides.peer.session)
        metadata = nixl_metadata.parse(data, "UCX")
        names = [f"kvplan-{k}" for k in range(6)]
        plan, wanted = sides.plan(20)
        for name in names:
            session = session_of(name, metadata.under(name))
            sides.engine.submit(plan, engines.Peer(session, sides.peer.layout)).wait(20)
            sides.engine.submit(plan, sides.peer).wait(20)
        loaded = [peer.metadata.name for peer in sides.engine._peers._loaded.values()]
        assert loaded == ["kvplan-4", "kvplan-5", metadata.name]
        with sides.engine._connected(sides.peer.session) as held:
            for name in names:
                with sides.engine._connected(session_of(name, metadata.under(name))):
                    pass
            assert held in sides.engine._peers._loaded.values() and len(sides.engine._peers._loaded) == 3
        np.testing.assert_array_equal(sides.dst, wanted)
    finally:
        sides.close()


# ---- what is asked after a call was given up


def test_many_threads_ask_what_became_of_a_transfer(tmp_path_factory):
    sides = make_pair("nixl", tmp_path_factory, timeout=0.3)
    try:
        sides.engine.submit(sides.plan(1)[0], sides.peer).wait(20)
        plan, wanted = sides.plan(4000)
        sides.stop()
        transfer = sides.engine.submit(plan, sides.peer)
        with pytest.raises(TransferError, match=r"no answer within 0\.3 s"):
            transfer.wait(20)
        finished = transfer._finished
        assert finished is not None and finished() is False
        answers: list[object] = []

        def ask() -> None:
            try:
                while not finished():
                    time.sleep(0.001)
                answers.extend(finished() for _ in range(50))
            except BaseException as error:
                answers.append(error)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        sides.go_on()
        for thread in threads:
            thread.join(30)
        assert answers == [True] * 400 and not sides.engine._open
        np.testing.assert_array_equal(sides.dst, wanted)
        sides.engine.unregister(sides.layout) if not sides.engine._under_way() else None
        assert finished() is True  # the answer stays when the agent has gone
    finally:
        sides.close()


# ---- refusals name what they refuse


def test_refusals_name_the_region(tmp_path_factory):
    sides = make_pair("nixl", tmp_path_factory)
    try:
        region = sides.peer.layout.regions[0]
        told = sides.peer.layout.to_dict()
        told["regions"][0]["memory"] = ["DRAM", 7]
        other = engines.Peer(sides.peer.session, Layout.from_dict(told))
        honest, sides.peer = sides.peer, other
        transfer = sides.engine.submit(sides.plan(3)[0], other)
        name = honest.session.split(":")[1]
        with pytest.raises(TransferError, match=f"NIXL_ERR_NOT_FOUND.*of region '{region.name}'.*registered by {name}"):
            transfer.wait(20)
        fake = Layout(
            [Region("gpu", k, sides.src.ctypes.data, 64, 4, memory=Memory.VRAM(k)) for k in range(2)], page_size=1
        )
        with pytest.raises(
            RuntimeError, match="2 spans of memory, VRAM:0 0x.*'gpu' of layer 0, region 'gpu' of layer 1"
        ):
            sides.engine.register(fake)
    finally:
        sides.close()


def test_what_a_peer_calls_itself_is_shortened(agent):
    plan = pair(*[Layout([Region("kv", 0, 4096, 64, 4)], page_size=4)] * 2).plan([0], [0])
    for session in ("nixl:" + "x" * 100_000, "x" * 100_000, "nixl:" + "x" * 60 + ":\n" * 1000):
        peer = engines.Peer(session, Layout([], page_size=4))
        assert len(repr(peer)) < 300 and repr(peer).isprintable()
        assert len(agent._peer_name(session)) <= 64
        with pytest.raises(ValueError) as caught:
            agent.submit(plan, peer)
        assert len(str(caught.value)) < 300


# ---- notices that nobody collects


def flood(session: str, layout: dict, seconds: float) -> None:
    """Sends notices that are too long, and others, for as long."""
    memory = np.zeros(64, np.uint8)
    mine = Layout([Region("kv", 0, memory.ctypes.data, 64, 1)], page_size=4)
    engine = make_engine("nixl")
    engine.register(mine)
    until, number = time.monotonic() + seconds, 0
    with engine._connected(session) as peer:
        while time.monotonic() < until:
            for _ in range(20):
                number += 1
                engine._agent.send_notif(peer.alias, b"x" * 100_000)
                engine._agent.send_notif(peer.alias, b"%1000d" % number)
            time.sleep(0.005)
        time.sleep(0.5)
    engine.close()


def test_notices_that_nobody_collects_do_not_pile_up():
    """Neither in NIXL nor here; and what an honest peer has said is still there."""
    need("nixl")
    memory = np.zeros(4096, np.uint8)
    layout = Layout([Region("kv", 0, memory.ctypes.data, 64, 8)], page_size=4)
    with make_engine("nixl") as engine:
        engine.register(layout)
        with make_engine("nixl") as friend:
            friend._tell(engine.session, b"honest")
            process = processes().Process(target=flood, args=(engine.session, layout.to_dict(), 4.0), daemon=True)
            process.start()
            process.join(60)
            assert process.exitcode == 0
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline and not engine._notices._kept:
                time.sleep(0.05)
            time.sleep(0.5)
            assert not engine._agent.get_new_notifs()  # they have been taken from NIXL
            assert engine._notices._nbytes <= 16 << 20 and engine._notices._kept > 10
            assert all(len(notice) <= 1024 for s in engine._notices._senders.values() for notice in s.counts)
            engine.wait_notice(b"honest", 5)


def test_notices_outlive_the_agent_that_heard_them(tmp_path_factory):
    need("nixl")
    memory = np.zeros(4096, np.uint8)
    layout = Layout([Region("kv", 0, memory.ctypes.data, 64, 8)], page_size=4)
    with make_engine("nixl") as engine, make_engine("nixl") as friend:
        engine._stop_looking()  # so that they are with NIXL when its agent ends
        engine.register(layout)
        friend._tell(engine.session, b"early")
        time.sleep(0.5)
        engine.unregister(layout)
        engine.wait_notice(b"early", 5)


ENDS = """
import gc
import threading
from kvplan import engines
engine = engines.NixlEngine()
looks = [t for t in threading.enumerate() if t.name.endswith("-notices")]
assert len(looks) == 1
if {close}: engine.close()
elif {drop}:
    del engine
    gc.collect()
    looks[0].join(20)
print("alive" if looks[0].is_alive() else "ended")
"""


@pytest.mark.parametrize(("close", "drop", "left"), [(1, 0, "ended"), (0, 1, "ended"), (0, 0, "alive")])
def test_the_thread_that_collects_ends_with_its_engine(close, drop, left):
    """And keeps neither the engine nor the process alive."""
    need("nixl")
    code = ENDS.format(close=close, drop=drop)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.splitlines()[-1] == left
