"""From vLLM's words to a layout: a pure function of tensors and plain data. Nothing of vLLM is imported here."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

import torch

from kvplan import Heads, Layout, LayoutError, Region


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


def describe(
    groups: Sequence[Group], caches: Mapping[str, torch.Tensor], num_blocks: int, tp_rank: int, tp_size: int
) -> Described:
    """The layout of one rank's KV caches.

    Args:
        groups: the KV cache groups that are transferred, in vLLM's order.
        caches: for each layer vLLM's view of its cache, shape [kernel blocks, heads, tokens, content], of any strides.
            All six of vLLM's layouts are such views, of memory in another order.
        num_blocks: blocks in the tables, the null block 0 among them.
        tp_rank, tp_size: this rank of how many. Where there are fewer heads than ranks, neighbouring ranks hold the
            same head.

    Raises:
        LayoutError: a layer has no cache, or its shape does not fit what vLLM says of it.
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
                regions.append(_region(layer, cache, space, tp_rank, tp_size))
    page_size = groups[0].block_tokens if groups else 1
    return Described(Layout(regions, page_size=page_size), ratios)


def _region(layer: Layer, cache: torch.Tensor, space: str, tp_rank: int, tp_size: int) -> Region:
    heads, replica = _share(layer, tp_rank, tp_size)
    if cache.shape[1] != heads.stop - heads.start:
        raise LayoutError(
            f"layer {layer.name}: a KV cache of shape {tuple(cache.shape)} has {cache.shape[1]} heads, and vLLM says "
            f"{heads.stop - heads.start}"
        )
    numbers = re.search(r"(?:^|\.)(\d+)(?:\.|$)", layer.name)
    number, tokens = int(numbers[1]) if numbers else 0, cache.shape[2]
    if layer.rows:
        return Region.from_tensor(
            cache, layer.name, number, axes="pages heads tokens content", heads=heads, replica=replica, space=space,
            tokens=tokens, format=layer.format,
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


def _share(layer: Layer, tp_rank: int, tp_size: int) -> tuple[Heads, tuple[int, int]]:
    """The heads that a rank holds, and which of how many ranks with the same heads it is."""
    total = layer.total_heads
    if not 0 <= tp_rank < tp_size:
        raise LayoutError(f"TP rank {tp_rank} is not one of {tp_size}")
    if total >= tp_size:
        if total % tp_size or layer.heads != total // tp_size:
            raise LayoutError(f"layer {layer.name}: {layer.heads} heads a rank, of {total} heads over {tp_size} ranks")
        return Heads(tp_rank * layer.heads, (tp_rank + 1) * layer.heads, total), (0, 1)
    if tp_size % total or layer.heads != 1:
        raise LayoutError(f"layer {layer.name}: {layer.heads} heads a rank, of {total} heads over {tp_size} ranks")
    copies = tp_size // total
    return Heads(tp_rank // copies, tp_rank // copies + 1, total), (tp_rank % copies, copies)
