"""What crashes an engine, or its peer, and cannot be reached through kvplan. Each in a process of its own.

The calls are those that docs/engines.md marks as a crash.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from engine_peer import APART, GUARD, KINDS, Pair, Together, make_engine, make_pair, need, processes, table_plan

from kvplan import Layout, Memory, PlanError, Region, TransferError, engines, pair
from kvplan.engines import nixl_load


def survives(function, *arguments) -> None:
    """Run `function` in a process; it must come to its end."""
    process = processes().Process(target=function, args=arguments, daemon=True)
    process.start()
    process.join(60)
    code = process.exitcode
    process.kill()
    assert code == 0, f"ended with {code}"


# ---- every engine: use before it is initialized, or after it is gone


def use_after_close(kind: str) -> None:
    sides = Together(kind)
    plan = sides.plan(5)[0]
    transfer = sides.engine.submit(plan, sides.peer)
    transfer.wait(20)
    gone = sides.engine.submit(plan, engines.Peer(sides.peer.session, sides.peer.layout))
    sides.engine.close()
    for use in (
        lambda: sides.engine.submit(plan, sides.peer),
        lambda: sides.engine.register(sides.layout),
        lambda: sides.engine.unregister(sides.layout),
    ):
        with pytest.raises(RuntimeError, match="is closed"):
            use()
    for one in (transfer, gone):
        one.wait(0)
        assert one.done() and one.settle(0)
        one.cancel()
    sides.close()


@pytest.mark.parametrize("kind", KINDS)
def test_use_after_close(kind):
    need(kind)
    survives(use_after_close, kind)


def lengths(kind: str) -> None:
    sides = Together(kind)
    src, dst = sides.src.ctypes.data, sides.peer.layout.by_key["kv", 0].base
    wide = Layout([Region("kv", 0, 0, (1 << 63) - 1, 2)], page_size=16)  # the peer claims all memory as its own
    for nbytes in (0, 1 << 63, (1 << 64) - 1, (1 << 64) - 64, len(sides.src)):
        for peer in (sides.peer, engines.Peer(sides.peer.session, wide)):
            with pytest.raises(PlanError):
                sides.engine.submit(table_plan((src, dst, nbytes)), peer)
    sides.engine.submit(table_plan(), sides.peer).wait(1)  # an empty list is not handed over either
    assert not sides.engine.sizes
    sides.close()


@pytest.mark.parametrize("kind", KINDS)
def test_lengths_that_are_none(kind):
    """NIXL crashes on a negative length, and others take 0 for success."""
    need(kind)
    survives(lengths, kind)


# ---- a peer that frees its memory


def freeing_peer(kind: str, connection) -> None:
    """Registers anonymous memory, and when told frees it, and registers other."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = libc.munmap.argtypes = None
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    size = 1 << 20
    engine = make_engine(kind)
    while True:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        base = libc.mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
        layout = Layout([Region("kv", 0, base, 4096, size // 4096)], page_size=16)
        engine.register(layout)
        connection.send((engine.session, layout.to_dict()))
        connection.recv()
        engine.unregister(layout)
        assert libc.munmap(base, size) == 0
        connection.send("freed")
        connection.recv()


@pytest.mark.parametrize("kind", APART)
def test_a_peer_may_free_what_it_has_unregistered(kind):
    """Over TCP, NIXL goes on writing to memory that is not registered any more, and ends the peer if it is freed."""
    need(kind)
    connection, its = processes().Pipe()
    peer = processes().Process(target=freeing_peer, args=(kind, its), daemon=True)
    peer.start()
    src = np.ones(1 << 20, dtype=np.uint8)
    mine = Layout([Region("kv", 0, src.ctypes.data, 4096, 256)], page_size=16)
    try:
        with make_engine(kind) as engine:
            engine.register(mine)
            for _ in range(1 if kind == "mooncake" else 3):  # it takes its time
                assert connection.poll(30)
                session, told = connection.recv()
                target = engines.Peer(session, Layout.from_dict(told))
                plan = pair(mine, target.layout).plan(range(256), range(255, -1, -1))
                engine.submit(plan, target).wait(20)
                stop = threading.Event()

                failures: list[TransferError] = []

                def send(plan=plan, target=target, stop=stop, failures=failures) -> None:
                    for part in itertools.cycle(plan.chunks(16)):
                        if stop.is_set():
                            return
                        try:
                            engine.submit(part, target).wait(20)
                        except TransferError as error:
                            failures.append(error)
                        except PlanError as error:
                            assert "is not settled" in str(error)  # this part has failed before
                            time.sleep(0.001)

                thread = threading.Thread(target=send)
                thread.start()
                time.sleep(0.05)
                connection.send("free")  # while pages are on their way
                assert connection.poll(30) and connection.recv() == "freed"
                time.sleep(0.2)
                stop.set()
                thread.join()
                assert failures and peer.is_alive()
                connection.send("go on")
    finally:
        peer.kill()
        peer.join()


# ---- Mooncake: the status of a batch that there is not, or is no more


def batches() -> None:
    with engines.MooncakeEngine(calls="async") as engine, engines.MooncakeEngine() as other:
        memory = np.zeros(4096, dtype=np.uint8)
        layout = Layout([Region("kv", 0, memory.ctypes.data, 64, 32)], page_size=16)
        source = np.ones(4096, dtype=np.uint8)
        mine = Layout([Region("kv", 0, source.ctypes.data, 64, 64)], page_size=16)
        engine.register(mine)
        other.register(layout)
        plan = pair(mine, layout).plan([1, 2], [3, 5])
        dead = engine.submit(plan, engines.Peer("127.0.0.1:1", layout))  # no batch: its number is 0
        for _ in range(3):
            with pytest.raises(TransferError):
                dead.wait(20)
            dead.done(), dead.settle(0.3)
        alive = engine.submit(plan, engines.Peer(other.session, layout))
        threads = [threading.Thread(target=alive.wait, args=(20,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        alive.wait(1), alive.done(), alive.settle(1)
        assert memory.sum() == 128


def test_mooncake_status_is_asked_for_once():
    need("mooncake")
    survives(batches)


# ---- NIXL


def released_handles(peer: int, session: str, layout: dict, file: str) -> None:
    dst = np.memmap(file, dtype=np.uint8, mode="r+")
    sides = Pair(make_engine("nixl", timeout=0.2))
    sides.dst, sides.peer = dst, engines.Peer(session, Layout.from_dict(layout))
    sides.engine.submit(sides.plan(5)[0], sides.peer).wait(20)
    os.kill(peer, signal.SIGSTOP)
    time.sleep(0.1)
    transfers = [sides.engine.submit(sides.plan(50, stop=2000)[0], sides.peer) for _ in range(4)]
    for transfer in transfers:
        with pytest.raises(TransferError, match=r"no answer within 0\.2 s"):
            transfer.wait(20)
        assert transfer.settle(0) is False
    assert len(sides.engine._open) == 4
    sides.engine.unregister(sides.layout)  # the agent goes, and with it the handles
    sides.src[:] = 250  # free to be used: none of this is sent
    for transfer in transfers:
        for _ in range(3):
            assert transfer.settle(0) is False
        assert "no longer knows of it" in transfer.unsettled
    os.kill(peer, signal.SIGCONT)
    time.sleep(0.5)
    assert 250 not in dst
    sides.engine.register(sides.layout)
    sides.src[:] = 7
    dst[:] = GUARD
    plan, wanted = sides.plan(10, first=2000)  # where the others, of which nothing is known, do not write
    sides.engine.submit(plan, sides.peer).wait(20)
    assert (dst == np.where(wanted != GUARD, 7, GUARD)).all()
    sides.close()


def test_nixl_handles_are_not_asked_after_they_are_released(tmp_path_factory):
    sides = make_pair("nixl", tmp_path_factory)
    try:
        peer = sides.peer
        survives(released_handles, sides.process.pid, peer.session, peer.layout.to_dict(), str(sides.file))
    finally:
        sides.close()


def refused_memory() -> None:
    with engines.NixlEngine() as engine:
        memory = np.zeros(4096, dtype=np.uint8)
        for _ in range(3):
            with contextlib.suppress(RuntimeError):  # where there is a GPU this address is not its memory either
                engine.register(Layout([Region("v", 0, memory.ctypes.data, 64, 4, memory=Memory.VRAM(0))], page_size=1))
        sides = Together("nixl")
        sides.engine.submit(sides.plan(5)[0], sides.peer).wait(20)
        sides.close()


def test_nixl_that_refused_device_memory_goes_on():
    need("nixl")
    survives(refused_memory)


def lying_sessions(seed: int) -> None:
    import base64
    import hashlib

    rng = random.Random(seed)
    sides = Together("nixl")
    plan = sides.plan(5)[0]
    name, metadata = sides.peer.session.split(":")[1], base64.b64decode(sides.peer.session.split(":")[3])
    for number in range(150):
        lie = bytearray(metadata)
        match number % 5:
            case 0:
                del lie[rng.randrange(len(lie)) :]
            case 1:
                for _ in range(rng.randrange(1, 4)):
                    lie[rng.randrange(len(lie))] = rng.randrange(256)
            case 2:
                lie = bytearray(rng.randbytes(rng.randrange(600)))
            case 3:
                at = rng.randrange(len(lie) - 8)
                lie[at : at + 8] = rng.choice([(1 << 64) - 1, 1 << 63, 1 << 31, 10**9]).to_bytes(8, "little")
            case 4:
                lie += rng.randbytes(50)
        digest = hashlib.sha256(lie).hexdigest()[:32]
        session = f"nixl:{name}:{digest}:{base64.b64encode(lie).decode()}"
        with contextlib.suppress(ValueError, TransferError):
            sides.engine.submit(plan, engines.Peer(session, sides.peer.layout)).wait(20)
    sides.target.unregister(sides.peer.layout)  # under its next name it is as good as any
    sides.tell("register")
    plan, wanted = sides.plan(10)
    sides.engine.submit(plan, sides.peer).wait(20)
    assert (sides.dst == wanted).all()
    sides.close()


@pytest.mark.parametrize("seed", [1, 2])
def test_nixl_metadata_that_lies(seed):
    need("nixl")
    survives(lying_sessions, seed)


def test_nixl_process_ends_well():
    """Without RDMA, UCX's module for it ends every process that used UCX with 139: so such a process is not begun."""
    need("nixl")
    if nixl_load._has_rdma():
        pytest.skip("there is an RDMA device")
    ucx = {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"}
    refused = "from kvplan import engines\ntry: engines.NixlEngine()\nexcept RuntimeError as error: print(error)"
    allowed = f"from kvplan import engines\nengine = engines.NixlEngine(ucx={ucx})\nprint(engine.session)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("UCX_")}
    programs = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=clean)
        for code in (refused, allowed)
    ]
    told = [program.communicate(timeout=60)[0] for program in programs]
    assert [program.returncode for program in programs] == [0, 0]
    assert "UCX_MODULES=^ib" in told[0] and "nixl:kvplan-" in told[1]
