"""The two sides of a transfer, for tests of engines: prefill in the test's process, decode in this one or another.

In another process (`serve`), the decode side registers a layout over a file, which the test can read as well. It is
forked from a server that has imported everything, so it starts at once; and it ends when the test's end of its
connection is closed, so it cannot outlive the test.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
import time
from pathlib import Path

import memfabric
import numpy as np
import pytest
import torch

from kvplan import Layout, Memory, Plan, Region, Segment, engines, pair

os.environ.setdefault("MC_TRANSFER_TIMEOUT", "5")  # seconds until Mooncake gives up on a peer that hangs; its least
# These tests are about TCP over loopback, whatever devices there are.
os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", UCX_MODULES="^ib")
memfabric.install()

PACKAGES = {"local": (), "mooncake": ("mooncake",), "nixl": ("nixl", "nixl_cu12", "nixl_cu13"), "ascend": ()}
KINDS = list(engines.KINDS)
APART = ["mooncake", "nixl"]  # whose decode side is another process
NIXL_TIMEOUT = 2.0

GUARD = 0xEE
PAGE, PAGES, GAP = 64, 4096, 64  # bytes, pages, bytes between the pages of the region "gappy"
SRC_FIELDS = [
    {"name": "kv", "layer": 0, "base": 0, "page_bytes": PAGE, "num_pages": PAGES},
    {"name": "gappy", "layer": 0, "base": PAGE * PAGES, "page_bytes": PAGE, "num_pages": PAGES},
]
DST_FIELDS = [
    {"name": "gappy", "layer": 0, "base": 0, "page_bytes": PAGE, "num_pages": PAGES, "page_stride": PAGE + GAP},
    # nothing registered for GAP bytes before and behind it
    {"name": "kv", "layer": 0, "base": (PAGE + GAP) * PAGES + GAP, "page_bytes": PAGE, "num_pages": PAGES},
]
DST_FIELDS[1]["space"] = "host"
DST_FIELDS[0]["memory"] = ("DRAM", 1)  # stands for a device: for NIXL as unlike DRAM 0 as VRAM would be
DRAFT = {"name": "draft", "layer": 0, "base": (2 * PAGE + GAP) * PAGES + 2 * GAP, "page_bytes": PAGE, "num_pages": 9}
DRAFT["memory"] = ("DRAM", 1)
DST_BYTES = DRAFT["base"] + 9 * PAGE + GAP


def layout_of(fields: list[dict], memory: np.ndarray, page_size: int = 16) -> Layout:
    start = memory.ctypes.data
    rows = [{**f, "base": start + f["base"], "memory": Memory(*f.get("memory", ("DRAM", 0)))} for f in fields]
    return Layout([Region(**row) for row in rows], page_size=page_size)


def table_plan(*descriptors: tuple[int, int, int], src=Memory.DRAM, dst=Memory.DRAM) -> Plan:
    """A plan of these (src, dst, nbytes), as an engine might be handed by mistake."""
    table = torch.from_numpy(np.array(descriptors, dtype=np.uint64).reshape(-1, 3).T.copy().view(np.int64))
    return Plan(table, [Segment(src, dst, 0, len(descriptors))] if descriptors else [])


_numbers = itertools.count()


def make_engine(kind: str, role: str = "Decode", **arguments) -> engines.Engine:
    """A real engine that notes what it is given, and can be held (`Recorder`)."""
    if kind == "ascend":
        arguments = {"store_url": "tcp://127.0.0.1:9", "session": f"127.0.0.1:{next(_numbers)}", "role": role}
    if kind == "nixl":
        arguments.setdefault("timeout", NIXL_TIMEOUT)
    cls = engines.KINDS[kind]
    return type(f"Recorded{cls.__name__}", (Recorder, cls), {})(**arguments)


class Recorder:
    """Mixed into an engine: what it has been given, and the most descriptors that it held at once for a peer."""

    def __init__(self, *args, **kwargs) -> None:
        self.sizes: list[int] = []
        self.now = self.most = 0
        self.counting = threading.Lock()
        self.open = threading.Event()
        self.open.set()
        super().__init__(*args, **kwargs)

    @contextlib.contextmanager
    def held(self):
        """Calls of the engine wait at its door for as long."""
        self.open.clear()
        try:
            yield
        finally:
            self.open.set()

    def _move(self, session, chunk, op):
        with self.counting:
            self.sizes.append(len(chunk))
            self.now += len(chunk)
            self.most = max(self.most, self.now)
        self.open.wait()
        try:
            return super()._move(session, chunk, op)
        finally:
            with self.counting:
                self.now -= len(chunk)


class Pair:
    """A prefill side in this process (engine, src, layout) and a decode side (peer, dst)."""

    dst: np.ndarray
    peer: engines.Peer

    def __init__(self, engine: engines.Engine) -> None:
        self.engine = engine
        self.src = np.random.default_rng(5).integers(1, 200, 2 * PAGE * PAGES, dtype=np.uint8)
        self.layout = layout_of(SRC_FIELDS, self.src)
        engine.register(self.layout)

    def plan(self, count: int, seed: int = 0, first: int = 0, stop: int = PAGES) -> tuple[Plan, np.ndarray]:
        """`count` pages of both regions to random pages in [first, stop): the plan, and what dst must become."""
        rng = np.random.default_rng(seed)
        src_pages = rng.permutation(PAGES)[:count]
        host, device = (rng.permutation(np.arange(first, stop))[:count] for _ in range(2))
        wanted = self.dst.copy()
        src = self.src.reshape(2, PAGES, PAGE)
        wanted[: (PAGE + GAP) * PAGES].reshape(PAGES, PAGE + GAP)[device, :PAGE] = src[1, src_pages]
        start = DST_FIELDS[1]["base"]
        wanted[start : start + PAGE * PAGES].reshape(PAGES, PAGE)[host] = src[0, src_pages]
        pairing = pair(self.layout, self.peer.layout)
        return pairing.plan(src_pages, {"host": host, "device": device}), wanted

    def tell(self, command: str) -> None:
        """Have the decode side do something; `peer` is what it declares then."""
        raise NotImplementedError

    def close(self) -> None:
        self.engine.close()


class Together(Pair):
    """Both sides in this process."""

    def __init__(self, kind: str, draft: bool = False, **arguments) -> None:
        super().__init__(make_engine(kind, "Prefill", **arguments))
        self.dst = np.full(DST_BYTES, GUARD, dtype=np.uint8)
        self.target = make_engine(kind)
        layout = layout_of([*DST_FIELDS, DRAFT] if draft else DST_FIELDS, self.dst)
        self.target.register(layout)
        self.peer = engines.Peer(self.target.session, layout)

    def tell(self, command: str) -> None:
        obey(command, self.target, self.peer.layout)
        self.peer = engines.Peer(self.target.session, self.peer.layout)

    def close(self) -> None:
        super().close()
        self.target.close()


class Apart(Pair):
    """The decode side in a process of its own."""

    def __init__(self, kind: str, folder: Path, draft: bool = False, engine=None, **arguments) -> None:
        super().__init__(engine or make_engine(kind, **arguments))
        self.kind, self.folder, self.draft = kind, folder, draft
        self.file = folder / "dst"
        self.file.write_bytes(bytes([GUARD]) * DST_BYTES)
        self.dst = np.memmap(self.file, dtype=np.uint8, mode="r+")
        self.start()

    def start(self) -> None:
        """Start the decode side; again, once it has been killed."""
        self.connection, its = processes().Pipe()
        fields = [*DST_FIELDS, DRAFT] if self.draft else DST_FIELDS
        self.process = processes().Process(target=serve, args=(self.kind, self.file, fields, its), daemon=True)
        self.process.start()
        its.close()
        self._hear()

    def tell(self, command: str) -> None:
        self.connection.send(command)
        self._hear()

    def _hear(self) -> None:
        if not self.connection.poll(60):
            raise RuntimeError("the peer does not answer")
        session, layout = self.connection.recv()
        self.peer = engines.Peer(session, Layout.from_dict(layout))

    def stop(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)
        tasks = Path(f"/proc/{self.process.pid}/task")
        while not all((task / "stat").read_text().rsplit(")", 1)[1].split()[0] == "T" for task in tasks.iterdir()):
            time.sleep(0.001)  # it acts for a moment longer

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def close(self) -> None:
        self.kill()  # first, so that no call hangs
        self.connection.close()
        super().close()


def processes():
    """Where decode sides are forked from: a process in which this module is loaded, and nothing runs."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["engine_peer"])
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *([path] if path else [])])
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        if path:
            os.environ["PYTHONPATH"] = path
    return context


def need(kind: str) -> None:
    """Skip the test where this engine is not installed. Absent is a choice; installed but broken is a failure."""
    if PACKAGES[kind] and not any(importlib.util.find_spec(package) for package in PACKAGES[kind]):
        pytest.skip(f"no {kind} engine is installed")


def make_pair(kind: str, factory: pytest.TempPathFactory, **arguments) -> Pair:
    need(kind)
    return Apart(kind, factory.mktemp("peer"), **arguments) if kind in APART else Together(kind, **arguments)


def obey(command: str, engine: engines.Engine, layout: Layout) -> None:
    if command.startswith("notice "):
        engine.wait_notice(command.removeprefix("notice ").encode(), 20)
    else:
        getattr(engine, command)(layout)


def serve(kind: str, file: Path, fields: list[dict], connection) -> None:
    """The decode side: says what it has registered, then does as it is told, until nobody tells it anything."""
    memory = np.memmap(file, dtype=np.uint8, mode="r+")
    layout = layout_of(fields, memory)
    with make_engine(kind) as engine:
        engine.register(layout)
        with contextlib.suppress(EOFError):
            while True:
                connection.send((engine.session, layout.to_dict()))
                obey(connection.recv(), engine, layout)
