"""KV caches as vLLM lays them out in memory, with known bytes; and what must arrive. Nothing of vLLM is imported."""

from __future__ import annotations

import dataclasses

import torch

from kvplan.integrations.vllm.words import Described, Group, Layer, Ranks, describe

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
    """All ranks of one engine.

    Args:
        order: a name in ORDERS.
        tp: tensor-parallel ranks.
        block: tokens of a block of one rank. With decode context parallelism a block of the table has `dcp` times as
            many.
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
    stages: tuple[int, ...] = ()  # layers of each pipeline stage; by default one stage has all
    dcp: int = 1
    run: int = 1

    def __post_init__(self) -> None:
        kernel = self.kernel or self.block
        self.heads = max(1, self.total // self.tp)
        self.span = self.block * self.dcp  # tokens of a block of the table
        self.stages = self.stages or (self.layers,)
        self.held: list[tuple[int, range]] = []  # by rank: its TP rank, and the numbers of its layers
        self.caches: list[list[torch.Tensor]] = []  # by rank, by layer that it holds
        self.described: list[Described] = []
        first = 0
        for stage in self.stages:
            for tp_rank in range(self.tp):
                self.held.append((tp_rank, range(first, first + stage)))
                self._add(kernel, *self.held[-1])
            first += stage

    def _add(self, kernel: int, tp_rank: int, numbers: range) -> None:
        sizes = (len(numbers), self.blocks * (self.block // kernel), self.heads, kernel, CONTENT)
        order = ORDERS[self.order]
        memory = torch.full([sizes[axis] for axis in order], 0xEE, dtype=torch.uint8)
        caches = list(memory.permute([order.index(axis) for axis in range(5)]))
        self.caches.append(caches)
        words = [
            Layer(f"model.layers.{number}.attn", self.heads, self.total, "uint8", not self.opaque, "OWN_ORDER")
            for number in numbers
        ]
        named = {layer.name: cache for layer, cache in zip(words, caches, strict=True)}
        ranks = Ranks(tp_rank, self.tp, self.dcp, self.run)
        self.described.append(describe([Group(self.block, tuple(words))], named, self.blocks, ranks))

    def mine(self, rank: int, tokens: range) -> torch.Tensor:
        """The tokens that a rank holds: of those with its heads, each `dcp`-th run."""
        token = torch.tensor(tokens)
        return token[token // self.run % self.dcp == self.held[rank][0] % self.dcp]

    def places(self, rank: int, table: list[int], tokens: range) -> tuple[torch.Tensor, slice, torch.Tensor]:
        """Where in the caches of a rank the rows of a request with this block table lie.

        vLLM writes a block of a rank from its beginning: the tokens that it holds of `span` lie side by side.
        """
        kernel, token = self.caches[rank][0].shape[2], self.mine(rank, tokens)
        round_ = self.run * self.dcp
        inside = token % self.span
        row = inside // round_ * self.run + inside % self.run
        blocks = torch.tensor(table)[token // self.span] * (self.block // kernel)
        return blocks + row // kernel, slice(None), row % kernel

    def values(self, rank: int, layer: int, tokens: range) -> torch.Tensor:
        """What the rows hold, [tokens, heads, content]: each token and head of each layer is unlike all others."""
        token = self.mine(rank, tokens)[:, None].expand(-1, self.heads)
        head = torch.arange(self.heads)[None].expand_as(token) + self.held[rank][0] * self.total // self.tp
        number = torch.full_like(token, self.held[rank][1][layer])
        words = [number, head, token % 256, token // 256, *torch.full((4, *token.shape), 7)]
        return torch.stack(words, 2).to(torch.uint8)


def fill(side: Side, table: list[int], tokens: range) -> None:
    """Write what prefill would."""
    for rank in range(len(side.caches)):
        for layer, cache in enumerate(side.caches[rank]):
            cache[side.places(rank, table, tokens)] = side.values(rank, layer, tokens)


def wrong(side: Side, table: list[int], tokens: range) -> int:
    """How many rows of a request, of each head, are not what they must be."""
    return sum(
        int((cache[side.places(rank, table, tokens)] != side.values(rank, layer, tokens)).any(2).sum())
        for rank in range(len(side.caches))
        for layer, cache in enumerate(side.caches[rank])
    )
