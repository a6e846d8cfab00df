"""From vLLM's words to a layout: a pure function of tensors and plain data. Nothing of vLLM is imported here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import torch

from kvplan import Heads, Interleave, Layout, LayoutError, Region


@dataclasses.dataclass(frozen=True)
class Layer:
    """What vLLM says of the cache of one layer.

    Args:
        name: the layer's name in vLLM, for example "model.layers.3.self_attn.attn". Both sides must call it alike.
        heads: KV heads that this rank holds; 1 for a latent (MLA) cache.
        total_heads: KV heads of all ranks together, each counted once; 1 for a latent cache.
        format: what the bytes of a token and a head mean. Two sides whose formats differ are refused.
        rows: whether the bytes of one token and head lie side by side, as vLLM's view of the cache says. Where they do
            not, a block moves as whole heads, so both sides need blocks of the same size.
        backend: name of the attention back end; a part of the format where `rows` is False.
    """

    name: str
    heads: int
    total_heads: int
    format: str
    rows: bool = True
    backend: str = ""


@dataclasses.dataclass(frozen=True)
class Group:
    """Layers with one block table: a KV cache group.

    Args:
        block_tokens: tokens of one block in the table (a logical block).
        layers: its layers.
    """

    block_tokens: int
    layers: tuple[Layer, ...]


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Which rank of an engine this is.

    Args:
        tp_rank, tp_size: this tensor-parallel rank of how many. Where there are fewer heads than ranks, neighbouring
            ranks hold the same head.
        dcp_size: decode context parallelism. So many neighbouring TP ranks share the tokens of a head that all of them
            would hold; 1 where each holds all tokens. A block of the table then has `dcp_size` times the tokens of a
            block in memory.
        dcp_run: consecutive tokens that a rank holds (vLLM's cp_kv_cache_interleave_size).

    Raises:
        LayoutError: the rank is not one of `tp_size`; or dcp_size or dcp_run is below 1.
    """

    tp_rank: int
    tp_size: int
    dcp_size: int = 1
    dcp_run: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise LayoutError(f"TP rank {self.tp_rank} is not one of {self.tp_size}")
        if self.dcp_size < 1 or self.dcp_run < 1:
            raise LayoutError(f"{self.dcp_size} DCP ranks with runs of {self.dcp_run} tokens: both must be at least 1")


@dataclasses.dataclass(frozen=True)
class Described:
    """The cache of one rank.

    Attributes:
        layout: its regions. Group number g is numbered by the space "group g". A page is a kernel block.
        ratios: {space: kernel blocks in one block of the table}.
    """

    layout: Layout
    ratios: dict[str, int]


def space_of(group: int) -> str:
    """The index space of the KV cache group with this number."""
    return f"group {group}"


def describe(groups: Sequence[Group], caches: Mapping[str, torch.Tensor], num_blocks: int, ranks: Ranks) -> Described:
    """The layout of one rank's KV caches.

    A pipeline stage holds some layers. Its groups list these alone, and a group of which it holds none is empty: the
    numbers of groups are the same on all stages.

    Args:
        groups: the KV cache groups that are transferred, in vLLM's order.
        caches: for each layer vLLM's view of its cache, shape [kernel blocks, heads, tokens, content], of any strides.
            All six of vLLM's layouts are such views, of memory in another order.
        num_blocks: blocks in the tables, the null block 0 among them.
        ranks: which rank this is.

    Raises:
        LayoutError: a layer has no cache, or its shape does not fit what vLLM says of it; or the rank shares the tokens
            of a layer by blocks that cannot be shared.
    """
    regions: list[Region] = []
    ratios: dict[str, int] = {}
    for number, group in enumerate(groups):
        space = space_of(number)
        seen: set[tuple[int, tuple[int, ...]]] = set()  # layers that share a cache are one region
        for layer in group.layers:
            if layer.name not in caches:
                raise LayoutError(f"layer {layer.name} of {space} has no KV cache")
            cache = caches[layer.name]
            if cache.dim() != 4:
                raise LayoutError(
                    f"layer {layer.name}: its KV cache has shape {tuple(cache.shape)}, not [blocks, heads, tokens, "
                    f"content]"
                )
            ratio = cache.shape[0] // num_blocks
            if ratio * num_blocks != cache.shape[0] or ratio * cache.shape[2] != group.block_tokens:
                raise LayoutError(
                    f"layer {layer.name}: a KV cache of shape {tuple(cache.shape)} is not {num_blocks} blocks of "
                    f"{group.block_tokens} tokens"
                )
            if ratios.setdefault(space, ratio) != ratio:
                raise LayoutError(
                    f"layer {layer.name}: {ratio} kernel blocks a block, and {ratios[space]} in other layers of {space}"
                )
            place = (cache.data_ptr(), cache.stride())
            if place not in seen:
                seen.add(place)
                regions.append(_region(layer, cache, space, ranks))
    page_size = groups[0].block_tokens * ranks.dcp_size if groups else 1
    return Described(Layout(regions, page_size=page_size), ratios)


def _region(layer: Layer, cache: torch.Tensor, space: str, ranks: Ranks) -> Region:
    heads, replica, interleave = _share(layer, ranks)
    if cache.shape[1] != heads.stop - heads.start:
        raise LayoutError(
            f"layer {layer.name}: a KV cache of shape {tuple(cache.shape)} has {cache.shape[1]} heads, and vLLM says "
            f"{heads.stop - heads.start}"
        )
    numbers = re.search(r"(?:^|\.)(\d+)(?:\.|$)", layer.name)
    number, tokens = int(numbers[1]) if numbers else 0, cache.shape[2]
    if interleave is not None:
        if tokens % interleave.run:
            raise LayoutError(
                f"layer {layer.name}: kernel blocks of {tokens} tokens do not hold whole runs of {interleave.run} "
                f"tokens (cp_kv_cache_interleave_size)"
            )
        if not layer.rows:
            raise LayoutError(
                f"layer {layer.name}: {layer.backend} keeps the tokens of a block in an order of its own, so that "
                f"those of {interleave.size} DCP ranks cannot be told apart"
            )
    if layer.rows:
        return Region.from_tensor(
            cache, layer.name, number, axes="pages heads tokens content", heads=heads, replica=replica, space=space,
            tokens=tokens * ranks.dcp_size, interleave=interleave, format=layer.format,
        )  # fmt: skip
    content = cache.shape[3]
    if cache.stride(3) != 1 or (tokens > 1 and cache.stride(2) != content):
        raise LayoutError(
            f"layer {layer.name}: {layer.backend} keeps the tokens of a block in an order of its own, and the heads of "
            f"a block do not lie one behind another (strides {cache.stride()}): set VLLM_KV_CACHE_LAYOUT=LBHNC"
        )
    blocks = cache.as_strided((*cache.shape[:2], tokens * content), (cache.stride(0), cache.stride(1), 1))
    return Region.from_tensor(
        blocks, layer.name, number, axes="pages heads content", heads=heads, replica=replica, space=space,
        tokens=tokens, rows=1, row_bytes=cache.shape[1] * tokens * content * cache.element_size(),
        # The size comes first: messages show 64 characters of a format.
        format=f"blocks of {tokens} tokens as {layer.backend} stores them: {layer.format}",
    )  # fmt: skip


def _share(layer: Layer, ranks: Ranks) -> tuple[Heads, tuple[int, int], Interleave | None]:
    """The heads that a rank holds, which of how many ranks with the same bytes it is, and its share of the tokens."""
    total, size = layer.total_heads, ranks.tp_size
    copies = max(size // total, 1)  # ranks with the same heads
    if (size % total if total < size else total % size) or layer.heads != max(total // size, 1):
        raise LayoutError(f"layer {layer.name}: {layer.heads} heads a rank, of {total} heads over {size} ranks")
    if copies % ranks.dcp_size:
        raise LayoutError(
            f"layer {layer.name}: {ranks.dcp_size} DCP ranks cannot share the tokens of a head, which {copies} of "
            f"{size} TP ranks hold"
        )
    start, copy = ranks.tp_rank // copies * layer.heads, ranks.tp_rank % copies
    interleave = Interleave(ranks.dcp_size, copy % ranks.dcp_size, ranks.dcp_run) if ranks.dcp_size > 1 else None
    return Heads(start, start + layer.heads, total), (copy // ranks.dcp_size, copies // ranks.dcp_size), interleave
