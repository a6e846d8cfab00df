"""The two sides of a transfer, for tests of engines: prefill in the test's process, decode in this one or another.

As a program it is the decode side:

    python engine_peer.py FILE PAGE_SIZE

registers a layout over FILE, which the test can read as well. The first line of its input is a JSON list of `Region`
fields, bases relative to the file; it prints {"session", "layout"}. Each further line is a command, "unregister" or
"register". It ends when its input does, so it cannot outlive the test.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from kvplan import Layout, Memory, Plan, Region, Segment, engines, pair

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
DST_BYTES = (2 * PAGE + GAP) * PAGES + 2 * GAP


def layout_of(fields: list[dict], memory: np.ndarray, page_size: int = 16) -> Layout:
    return Layout([Region(**{**f, "base": memory.ctypes.data + f["base"]}) for f in fields], page_size=page_size)


def table_plan(*descriptors: tuple[int, int, int], src=Memory.DRAM, dst=Memory.DRAM) -> Plan:
    """A plan of these (src, dst, nbytes), as an engine might be handed by mistake."""
    table = torch.from_numpy(np.array(descriptors, dtype=np.uint64).reshape(-1, 3).T.copy().view(np.int64))
    return Plan(table, [Segment(src, dst, 0, len(descriptors))] if descriptors else [])


class Recorder:
    """Mixed into an engine: what it has been given, and the most descriptors that it held at once for a peer."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.sizes: list[int] = []
        self.now = self.most = 0
        self.counting = threading.Lock()

    def _write(self, session, chunk):
        with self.counting:
            self.sizes.append(len(chunk))
            self.now += len(chunk)
            self.most = max(self.most, self.now)
        try:
            return super()._write(session, chunk)
        finally:
            with self.counting:
                self.now -= len(chunk)


class RecordedLocal(Recorder, engines.LocalEngine):
    pass


class RecordedMooncake(Recorder, engines.MooncakeEngine):
    pass


class Pair:
    """A prefill side in this process (engine, src, layout) and a decode side (peer, dst)."""

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

    def close(self) -> None:
        self.engine.close()


class LocalPair(Pair):
    def __init__(self) -> None:
        super().__init__(RecordedLocal())
        self.dst = np.full(DST_BYTES, GUARD, dtype=np.uint8)
        self.target = engines.LocalEngine()
        layout = layout_of(DST_FIELDS, self.dst)
        self.target.register(layout)
        self.peer = engines.Peer(self.target.session, layout)

    def tell(self, command: str) -> None:
        getattr(self.target, command)(self.peer.layout)

    def close(self) -> None:
        super().close()
        self.target.close()


class MooncakePair(Pair):
    def __init__(self, folder: Path) -> None:
        super().__init__(RecordedMooncake())
        file = folder / "dst"
        file.write_bytes(bytes([GUARD]) * DST_BYTES)
        self.dst = np.memmap(file, dtype=np.uint8, mode="r+")
        self.log = (folder / "log").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(file), "16"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        try:
            told = self._exchange(json.dumps(DST_FIELDS))
            self.peer = engines.Peer(told["session"], Layout.from_dict(told["layout"]))
        except BaseException:
            self.close()
            raise

    def _exchange(self, line: str):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        while answer := self.process.stdout.readline():
            if answer.startswith(("{", '"')):  # the engine may print as well
                return json.loads(answer)
        self.log.seek(0)
        raise RuntimeError(f"the peer ended: {self.log.read()[-2000:]}")

    def tell(self, command: str) -> None:
        self._exchange(command)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.process.kill()
            self.process.communicate()
            self.log.close()


def make_pair(kind: str, factory: pytest.TempPathFactory) -> Pair:
    if kind == "local":
        return LocalPair()
    # Absent is a choice; installed but broken is a failure.
    if importlib.util.find_spec("mooncake") is None:
        pytest.skip("no Mooncake engine is installed")
    return MooncakePair(factory.mktemp("peer"))


def main() -> None:
    memory = np.memmap(sys.argv[1], dtype=np.uint8, mode="r+")
    layout = layout_of(json.loads(sys.stdin.readline()), memory, int(sys.argv[2]))
    with engines.MooncakeEngine() as engine:
        engine.register(layout)
        print(json.dumps({"session": engine.session, "layout": layout.to_dict()}), flush=True)
        for command in sys.stdin:
            getattr(engine, command.strip())(layout)
            print(json.dumps(command.strip()), flush=True)


if __name__ == "__main__":
    main()
