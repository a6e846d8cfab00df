"""The decode process is killed. Its request fails, and prefill keeps the pages aside until nothing can read them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from multiprocessing.connection import Connection

import torch
from sides import started

import kvplan
from kvplan import Layout, Region, TransferError
from kvplan.engines import MooncakeEngine, Peer, Quarantine, TransferGroup

PAGES = [5, 6, 7, 2]


def declared() -> tuple[torch.Tensor, Layout]:
    pool = torch.arange(1, 1 + 16 * 4096).view(16, 4096)
    return pool, Layout([Region.from_tensor(pool, "kv", layer=0)], page_size=16)


def decode(pipe: Connection) -> None:
    pool, layout = declared()
    pool.zero_()
    with MooncakeEngine("127.0.0.1") as engine:
        engine.register(layout)
        pipe.send(json.dumps([engine.session, layout.to_dict(), os.getpid()]))
        assert pipe.recv() == "request 1 has arrived"
        expected = torch.zeros_like(pool)
        expected[[1, 2, 3, 9]] = declared()[0][PAGES]
        pipe.send("right" if torch.equal(pool, expected) else "wrong")
        pipe.recv()  # until it is killed


def main() -> None:
    pool, layout = declared()
    quarantine = Quarantine()
    # The decode side is killed below, so `started` finds that it has not ended well.
    with contextlib.suppress(SystemExit), started(decode) as pipe, MooncakeEngine("127.0.0.1") as engine:
        engine.register(layout)
        session, theirs, process = json.loads(pipe.recv())
        peer = Peer(session, Layout.from_dict(theirs))
        plan = kvplan.pair(layout, peer.layout).plan(PAGES, [1, 2, 3, 9])
        engine.submit(plan, peer, label="request 1").wait(timeout=30)
        pipe.send("request 1 has arrived")
        assert pipe.recv() == "right"

        os.kill(process, signal.SIGKILL)
        group = TransferGroup([engine.submit(plan, peer, label="request 2")], label="request 2")
        try:
            group.wait(timeout=30)
            raise AssertionError("a transfer to a process that was killed has arrived")
        except TransferError as error:
            print(f"request 2 failed: {error}")
        group.cancel()
        quarantine.add(group, PAGES)
        free = [page for pages in quarantine.free() for page in pages]
        print(f"free: {free}; aside: {group.unsettled or 'nothing'}")

        engine.peer_ended(session)  # your supervisor has seen the process end
        assert group.settle(timeout=30), group.unsettled
        free += [page for pages in quarantine.free() for page in pages]
        assert free == PAGES, free
        print(f"free: {free}")
    assert torch.equal(pool, declared()[0])
    print("every byte is right")


if __name__ == "__main__":
    main()
