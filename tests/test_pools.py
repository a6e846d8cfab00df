"""Each pool that docs/pools.md names, declared as it says, to each other one: every byte compared."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

import kvplan
from kvplan import Heads, Layout, Region, pair

PAGES, TOKENS, HEADS, DIM, LAYERS = 7, 4, 2, 3, 2
ALL = Heads(0, HEADS, HEADS)


def separate(order: str) -> tuple[list[Region], Callable[[int], torch.Tensor]]:
    """FlashInfer's pair of tensors."""
    shape = (PAGES, TOKENS, HEADS, DIM) if order == "NHD" else (PAGES, HEADS, TOKENS, DIM)
    axes = "pages tokens heads dim" if order == "NHD" else "pages heads tokens dim"
    pools = torch.zeros(2, LAYERS, *shape, dtype=torch.int32)
    regions = [
        Region.from_tensor(pools[plane, layer], name, layer, axes=axes)
        for layer in range(LAYERS)
        for plane, name in enumerate("kv")
    ]
    return regions, lambda layer: pools[:, layer] if order == "NHD" else pools[:, layer].transpose(2, 3)


def planes(axes: str) -> tuple[list[Region], Callable[[int], torch.Tensor]]:
    sizes = {"planes": 2, "pages": PAGES, "tokens": TOKENS, "heads": HEADS, "dim": DIM}
    words = axes.split()
    pools = [torch.zeros([sizes[word] for word in words], dtype=torch.int32) for _ in range(LAYERS)]
    regions = [
        region for layer in range(LAYERS) for region in Region.from_planes(pools[layer], ("k", "v"), layer, axes=axes)
    ]
    order = [words.index(word) for word in ("planes", "pages", "tokens", "heads", "dim")]
    return regions, lambda layer: pools[layer].permute(order)


def slots() -> tuple[list[Region], Callable[[int], torch.Tensor]]:
    """SGLang's pools of token slots."""
    pools = torch.zeros(2, LAYERS, PAGES * TOKENS + TOKENS - 1, HEADS, DIM, dtype=torch.int32)
    regions = [
        Region.from_slots(pools[plane, layer], TOKENS, name, layer, heads=ALL)
        for layer in range(LAYERS)
        for plane, name in enumerate("kv")
    ]
    return regions, lambda layer: pools[:, layer, : PAGES * TOKENS].unflatten(1, (PAGES, TOKENS))


def vllm(order: str) -> tuple[list[Region], Callable[[int], torch.Tensor]]:
    """K and V are halves of the content of a head: two views of the cache."""
    sizes = {"L": LAYERS, "B": PAGES, "H": HEADS, "N": TOKENS, "C": 2 * DIM}
    view = torch.zeros([sizes[axis] for axis in order], dtype=torch.int32).permute(
        [order.index(axis) for axis in "LBHNC"]
    )
    halves = view.unflatten(4, (2, DIM))
    regions = [
        Region.from_tensor(halves[layer, ..., plane, :], name, layer, axes="pages heads tokens dim")
        for layer in range(LAYERS)
        for plane, name in enumerate("kv")
    ]
    return regions, lambda layer: halves[layer].permute(3, 0, 2, 1, 4)


def tensorrt_llm() -> tuple[list[Region], Callable[[int], torch.Tensor]]:
    pool = torch.zeros(PAGES, LAYERS, 2, HEADS * TOKENS * DIM, dtype=torch.int32)
    views = [pool.unflatten(3, (HEADS, TOKENS, DIM))[:, layer] for layer in range(LAYERS)]
    axes = "pages planes heads tokens dim"
    regions = [
        region for layer, view in enumerate(views) for region in Region.from_planes(view, ("k", "v"), layer, axes=axes)
    ]
    return regions, lambda layer: views[layer].permute(1, 0, 3, 2, 4)


def by_address() -> tuple[list[Region], Callable[[int], torch.Tensor]]:
    pools = torch.zeros(2, LAYERS, PAGES, HEADS, TOKENS, DIM, dtype=torch.int32)
    head = DIM * 4
    regions = [
        Region(name, layer, pools[plane, layer].data_ptr(), TOKENS * HEADS * head, PAGES, rows=TOKENS,
               row_bytes=HEADS * head, order="HND", heads=ALL)
        for layer in range(LAYERS) for plane, name in enumerate("kv")
    ]  # fmt: skip
    return regions, lambda layer: pools[:, layer].transpose(2, 3)


POOLS = {
    "FlashInfer NHD": lambda: separate("NHD"),
    "FlashInfer HND": lambda: separate("HND"),
    "FlashInfer one tensor NHD": lambda: planes("pages planes tokens heads dim"),
    "FlashInfer one tensor HND": lambda: planes("pages planes heads tokens dim"),
    "SGLang slots": slots,
    **{f"vLLM {order}": lambda order=order: vllm(order)
       for order in ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")},
    "vLLM planes": lambda: planes("planes pages tokens heads dim"),
    "TensorRT-LLM": tensorrt_llm,
    "by address": by_address,
}  # fmt: skip


@pytest.mark.parametrize(("here", "there"), [*itertools.product(POOLS, POOLS)])
def test_every_pool_to_every_pool(here, there):
    (src_regions, src), (dst_regions, dst) = POOLS[here](), POOLS[there]()
    for layer in range(LAYERS):
        values = torch.arange(2 * PAGES * TOKENS * HEADS * DIM, dtype=torch.int32) + 1 + 100_000 * layer
        src(layer).copy_(values.reshape(src(layer).shape))
    pairing = pair(Layout(src_regions, page_size=TOKENS), Layout(dst_regions, page_size=TOKENS))
    src_pages, dst_pages = [5, 2, 3], [0, 6, 1]
    kvplan.execute(pairing.plan(src_pages, dst_pages))
    for layer in range(LAYERS):
        assert torch.equal(dst(layer)[:, dst_pages], src(layer)[:, src_pages])
        assert not dst(layer)[:, [page for page in range(PAGES) if page not in dst_pages]].any()


def test_latent_rows_of_token_slots():
    pools = [torch.arange(5 * TOKENS * 6).reshape(-1, 1, 6) * k for k in (1, 0)]
    sides = [Layout([Region.from_slots(pool, TOKENS, "mla_kv", 0)], page_size=TOKENS) for pool in pools]
    kvplan.execute(pair(*sides).plan([4, 1], [0, 2]))
    source, target = (pool.reshape(5, TOKENS, 6) for pool in pools)
    assert torch.equal(target[[0, 2]], source[[4, 1]]) and not target[[1, 3, 4]].any()
