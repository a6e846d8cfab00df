"""200 requests from a table of token slots, planned in one call and sent over Mooncake. Every byte is checked."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection

import torch
from sides import started

import kvplan
from kvplan import Layout, Region, Request
from kvplan.engines import MooncakeEngine, Peer

REQUESTS, PAGE, MOST = 200, 16, 96  # requests; tokens a page; tokens of the longest
PAGES = REQUESTS * MOST // PAGE
random = torch.Generator().manual_seed(7)
LENGTHS = torch.randint(1, MOST + 1, (REQUESTS,), generator=random)


def whole() -> torch.Tensor:
    """The prefill side's pool, a row of 32 words a slot, none of them 0."""
    return torch.arange(1, 1 + PAGES * PAGE * 32).view(PAGES * PAGE, 32)


def slot_table() -> torch.Tensor:
    """int64 [REQUESTS, MOST]: where each token lies, as SGLang's req_to_token says. Pages are scattered."""
    pages = torch.randperm(PAGES, generator=torch.Generator().manual_seed(8)).view(REQUESTS, -1)
    return (pages[:, :, None] * PAGE + torch.arange(PAGE)).view(REQUESTS, MOST)


def targets() -> list[list[int]]:
    """The decode side's pages, as many as each request needs."""
    free = iter(torch.randperm(PAGES, generator=torch.Generator().manual_seed(9)).tolist())
    return [[next(free) for _ in range(-(-length // PAGE))] for length in LENGTHS.tolist()]


def decode(pipe: Connection) -> None:
    pool = torch.zeros(PAGES * PAGE, 32, dtype=torch.int64)
    layout = Layout([Region.from_slots(pool, PAGE, "kv", layer=0)], page_size=PAGE)
    with MooncakeEngine("127.0.0.1") as engine:
        engine.register(layout)
        pipe.send(json.dumps([engine.session, layout.to_dict(), targets()]))
        assert pipe.recv() == "all has arrived"
    expected = torch.zeros_like(pool).view(PAGES, PAGE, 32)
    for slots, pages in zip(slot_table(), targets(), strict=True):
        expected[pages] = whole()[slots[: len(pages) * PAGE]].view(-1, PAGE, 32)  # the last page moves whole
    assert torch.equal(pool.view(PAGES, PAGE, 32), expected)


def main() -> None:
    pool = whole()
    layout = Layout([Region.from_slots(pool, PAGE, "kv", layer=0)], page_size=PAGE)
    with started(decode) as pipe, MooncakeEngine("127.0.0.1") as engine:
        engine.register(layout)
        session, declared, their_pages = json.loads(pipe.recv())
        peer = Peer(session, Layout.from_dict(declared))
        pages, bad = kvplan.ops.page_indices(slot_table(), PAGE, torch.arange(REQUESTS), LENGTHS)
        assert (bad == -1).all(), f"row {bad.ne(-1).nonzero()[0].item()} is no list of whole pages"
        counts = (LENGTHS + PAGE - 1) // PAGE
        requests = [Request(pages[k, : counts[k]], their_pages[k]) for k in range(REQUESTS)]
        plan = kvplan.pair(layout, peer.layout).plan_batch(requests)  # one call; no two requests may write one page
        print(f"{REQUESTS} requests: {len(plan)} descriptors, {plan.total_bytes} bytes")
        engine.submit(plan, peer).wait(timeout=30)  # or plan.request(k), one by one
        pipe.send("all has arrived")
    print("every byte is right")


if __name__ == "__main__":
    main()
