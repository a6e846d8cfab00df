"""Pull with NIXL: the decode side plans, and reads the pages from the prefill side. Every byte is checked."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection

import torch
from sides import started

import kvplan
from kvplan import Layout, Region
from kvplan.engines import NixlEngine, Peer

SOURCE, TARGET = [5, 6, 7, 2, 31], [8, 9, 10, 40, 0]


def whole() -> torch.Tensor:
    """The prefill side's pool: 32 pages of 512 words, none of them 0."""
    return torch.arange(1, 1 + 32 * 512).view(32, 512)


def decode(pipe: Connection) -> None:
    pool = torch.zeros(48, 512, dtype=torch.int64)
    layout = Layout([Region.from_tensor(pool, "kv", layer=0)], page_size=16)
    session, declared, their_pages = json.loads(pipe.recv())
    peer = Peer(session, Layout.from_dict(declared))
    with NixlEngine() as engine:
        engine.register(layout)
        plan = kvplan.pair(peer.layout, layout).plan(their_pages, TARGET)  # from there to here
        engine.submit(plan, peer, op="read", label="request 1").wait(timeout=30)
    pipe.send("all is here")  # prefill may free its pages
    expected = torch.zeros_like(pool)
    expected[TARGET] = whole()[SOURCE]
    assert torch.equal(pool, expected)


def main() -> None:
    pool = whole()
    layout = Layout([Region.from_tensor(pool, "kv", layer=0)], page_size=16)
    with started(decode) as pipe, NixlEngine() as engine:
        engine.register(layout)
        pipe.send(json.dumps([engine.session, layout.to_dict(), SOURCE]))
        assert pipe.recv() == "all is here"
    print("every byte is right")


if __name__ == "__main__":
    main()
