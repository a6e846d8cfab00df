"""Two index spaces, chunk by chunk, over Mooncake: DeepSeek-V4's C4 KV goes to host pages, the rest to device pages."""

from __future__ import annotations

import json
from multiprocessing.connection import Connection

import torch
from sides import started

import kvplan
from kvplan import Layout
from kvplan.engines import MooncakeEngine, Peer, TransferGroup

PAGE, PAGES = 256, 24  # tokens a page; pages of each pool
SOURCE, HOST, DEVICE = [3, 9, 4, 5, 17, 2], [11, 12, 1, 20, 7, 8], [0, 1, 22, 6, 5, 13]
TOKENS = 6 * PAGE - 100  # the last page is partly filled


def pools_of(**pages: int) -> tuple[dict, Layout]:
    """A pool [pages, bytes] for each region of 4 layers of DeepSeek-V4 and the layout of them all."""
    sizes = Layout.deepseek_v4(4096, layers=range(2, 6), **pages)
    pools = {r.key: torch.zeros(r.num_pages, r.page_stride, dtype=torch.uint8) for r in sizes.regions}
    places = {key: pool.data_ptr() for key, pool in pools.items()}
    return pools, Layout.deepseek_v4(places, layers=range(2, 6), **pages)


def fill(pools: dict) -> None:
    """The same bytes on both sides, so that each can check; none is 0."""
    for number, key in enumerate(sorted(pools)):
        random = torch.Generator().manual_seed(number)
        pools[key].copy_(torch.randint(1, 256, pools[key].shape, dtype=torch.uint8, generator=random))


def decode(pipe: Connection) -> None:
    pools, layout = pools_of(num_pages=PAGES, num_host_pages=PAGES)
    with MooncakeEngine("127.0.0.1") as engine:
        engine.register(layout)
        pipe.send(json.dumps([engine.session, layout.to_dict(), {"host": HOST, "device": DEVICE}]))
        assert pipe.recv() == "all has arrived"
    sent, _ = pools_of(num_pages=PAGES)
    fill(sent)
    for region in layout.regions:
        due, size = (HOST if region.space == "host" else DEVICE), region.page_bytes
        expected = torch.zeros_like(pools[region.key])
        expected[due, :size] = sent[region.key][SOURCE, :size]  # a page moves without its padding
        assert torch.equal(pools[region.key], expected), f"{region.name} layer {region.layer}"


def main() -> None:
    pools, layout = pools_of(num_pages=PAGES)
    fill(pools)
    with started(decode) as pipe, MooncakeEngine("127.0.0.1") as engine:
        engine.register(layout)
        session, declared, their_pages = json.loads(pipe.recv())
        peer = Peer(session, Layout.from_dict(declared))
        pairing = kvplan.pair(layout, peer.layout)
        group = TransferGroup(label="request 1")
        for start in range(0, TOKENS, 2 * PAGE):  # two pages a chunk, as prefill computes them
            tokens = min(2 * PAGE, TOKENS - start)
            chunk = SOURCE[start // PAGE : start // PAGE + 2]
            plan = pairing.plan(chunk, their_pages, src_start=start, dst_start=0, num_tokens=tokens)
            print(f"tokens {start} to {start + tokens - 1}: {len(plan)} descriptors")
            group.add(engine.submit(plan, peer, label="request 1"))
        group.wait(timeout=30)
        pipe.send("all has arrived")
    print("every byte is right")


if __name__ == "__main__":
    main()
