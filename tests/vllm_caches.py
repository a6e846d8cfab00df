"""KV caches as vLLM lays them out in memory, with known bytes; and what must arrive. Nothing of vLLM is imported."""

from __future__ import annotations

import dataclasses

import torch

from kvplan.integrations.vllm.words import Described, Group, Layer, describe

# vLLM's names of layouts, and the order in memory of its axes [L, B, H, N, C].
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "LHBNC": (0, 2, 1, 3, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
    "BHLNC": (1, 2, 0, 3, 4),
}
CONTENT = 8  # bytes of one token and head


@dataclasses.dataclass
class Side:
    """All TP ranks of one engine.

    Args:
        order: a name in ORDERS.
        tp: ranks.
        block: tokens a block.
        total: KV heads of all ranks together; 1 for a latent cache, which every rank holds.
        kernel: tokens of a kernel block, of which a block may have several.
        opaque: the back end orders the tokens of a block in its own way.
    """

    order: str
    tp: int
    block: int
    total: int
    kernel: int | None = None
    opaque: bool = False
    layers: int = 2
    blocks: int = 24

    def __post_init__(self) -> None:
        kernel = self.kernel or self.block
        self.heads = max(1, self.total // self.tp)
        sizes = (self.layers, self.blocks * (self.block // kernel), self.heads, kernel, CONTENT)
        order = ORDERS[self.order]
        self.caches: list[list[torch.Tensor]] = []  # by rank, by layer
        self.described: list[Described] = []
        for rank in range(self.tp):
            memory = torch.full([sizes[axis] for axis in order], 0xEE, dtype=torch.uint8)
            view = memory.permute([order.index(axis) for axis in range(5)])
            caches = list(view)
            self.caches.append(caches)
            words = [
                Layer(f"model.layers.{number}.attn", self.heads, self.total, "uint8", not self.opaque, "OWN_ORDER")
                for number in range(self.layers)
            ]
            named = {layer.name: cache for layer, cache in zip(words, caches, strict=True)}
            group = Group(self.block, tuple(words))
            self.described.append(describe([group], named, self.blocks, rank, self.tp))

    def places(self, rank: int, table: list[int], tokens: range) -> tuple[torch.Tensor, slice, torch.Tensor]:
        """Where in the caches of a rank the rows of a request with this block table lie."""
        kernel, token = self.caches[rank][0].shape[2], torch.tensor(tokens)
        blocks = torch.tensor(table)[token // self.block] * (self.block // kernel)
        return blocks + token % self.block // kernel, slice(None), token % kernel

    def values(self, rank: int, layer: int, tokens: range) -> torch.Tensor:
        """What the rows hold, [tokens, heads, content]: each token and head of each layer is unlike all others."""
        token = torch.tensor(tokens)[:, None].expand(-1, self.heads)
        head = torch.arange(self.heads)[None].expand_as(token) + rank * self.total // self.tp
        words = [torch.full_like(token, layer), head, token % 256, token // 256, *torch.full((4, *token.shape), 7)]
        return torch.stack(words, 2).to(torch.uint8)


def fill(side: Side, table: list[int], tokens: range) -> None:
    """Write what prefill would."""
    for rank in range(side.tp):
        for layer, cache in enumerate(side.caches[rank]):
            cache[side.places(rank, table, tokens)] = side.values(rank, layer, tokens)


def wrong(side: Side, table: list[int], tokens: range) -> int:
    """How many rows of a request, of each head, are not what they must be."""
    return sum(
        int((cache[side.places(rank, table, tokens)] != side.values(rank, layer, tokens)).any(2).sum())
        for rank in range(side.tp)
        for layer, cache in enumerate(side.caches[rank])
    )
