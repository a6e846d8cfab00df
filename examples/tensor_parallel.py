"""Tensor parallelism 2 -> 4 over Mooncake: two prefill ranks send their heads to four. Every byte is checked."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection

import torch
from sides import started

import kvplan
from kvplan import Heads, Layout, Region
from kvplan.engines import MooncakeEngine, Peer, TransferGroup

LAYERS, PAGES, PAGE, HEADS, DIM = 3, 32, 16, 8, 64
SOURCE, TARGET = [5, 6, 7, 19, 2], [30, 3, 4, 5, 11]


def rank_of(rank: int, size: int) -> tuple[list[torch.Tensor], Layout]:
    """The pools of one rank, [pages, tokens, heads, dim] a layer, and where they lie."""
    share = HEADS // size
    held = Heads(rank * share, (rank + 1) * share, HEADS)
    pools = [torch.zeros(PAGES, PAGE, share, DIM, dtype=torch.int32) for _ in range(LAYERS)]
    regions = [
        Region.from_tensor(pool, "k", layer, axes="pages tokens heads dim", heads=held)
        for layer, pool in enumerate(pools)
    ]
    return pools, Layout(regions, page_size=PAGE)


def whole(layer: int) -> torch.Tensor:
    """The cache of a layer as a single rank would hold it: every word has a value of its own, and none is 0."""
    count = PAGES * PAGE * HEADS * DIM
    return torch.arange(1 + layer * count, 1 + (layer + 1) * count, dtype=torch.int32).view(PAGES, PAGE, HEADS, DIM)


def decode(pipe: Connection) -> None:
    """All four decode ranks. Each has an engine, as if it were a process."""
    ranks = [rank_of(rank, 4) for rank in range(4)]
    engines = [MooncakeEngine("127.0.0.1") for _ in ranks]
    for engine, (_, layout) in zip(engines, ranks, strict=True):
        engine.register(layout)
    pipe.send(json.dumps([[e.session, layout.to_dict()] for e, (_, layout) in zip(engines, ranks, strict=True)]))
    assert pipe.recv() == "all has arrived"
    for rank, (pools, _) in enumerate(ranks):
        for layer, pool in enumerate(pools):
            expected = torch.zeros_like(pool)
            expected[TARGET] = whole(layer)[SOURCE][:, :, 2 * rank : 2 * rank + 2]
            assert torch.equal(pool, expected), f"decode rank {rank}, layer {layer}"
    for engine in engines:
        engine.close()


def main() -> None:
    with started(decode) as pipe:
        peers = [Peer(session, Layout.from_dict(layout)) for session, layout in json.loads(pipe.recv())]
        ranks = [rank_of(rank, 2) for rank in range(2)]
        for rank, (pools, _) in enumerate(ranks):
            for layer, pool in enumerate(pools):
                pool.copy_(whole(layer)[:, :, 4 * rank : 4 * rank + 4])
        cluster = kvplan.Cluster(prefill=[layout for _, layout in ranks], decode=[peer.layout for peer in peers])
        cluster.check()  # nothing is left out, nothing is sent twice
        for i, (_, layout) in enumerate(ranks):
            with MooncakeEngine("127.0.0.1") as engine:
                engine.register(layout)
                group = TransferGroup(label="request 1")
                for j, peer in enumerate(peers):
                    plan = cluster.pairing(i, j).plan(SOURCE, TARGET)  # empty where j has none of i's heads
                    print(f"prefill {i} -> decode {j}: {len(plan)} descriptors, {plan.total_bytes} bytes")
                    group.add(engine.submit(plan, peer))
                group.wait(timeout=30)
        pipe.send("all has arrived")
    print("every byte is right")


if __name__ == "__main__":
    main()
