"""The pools of both sides, and the pattern that fills them.

The pattern gives every 8 bytes of every page of every region of either side a value of their own, so a page that lands
in the wrong place, in part or whole, cannot look right, and what lies in the wrong place tells where it came from.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import Heads, Layout, Memory, Region
from .allocator import PAGE

SOURCE, GUARD = 0, 1  # whose pattern: the prefill side's pages, or what the decode side's hold before anything arrives

# The pattern: word = mix(side, region, page, word index), a bijection.
_WORD_BITS, _PAGE_BITS, _REGION_BITS = 20, 28, 14  # of a key; the side is the bit above
_MASK = (1 << 64) - 1
_ODD, _ODD2 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # any odd factor is a bijection of 64-bit words
_UNDO, _UNDO2 = pow(_ODD, -1, 1 << 64), pow(_ODD2, -1, 1 << 64)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value  # torch multiplies signed words; the product wraps alike


def page_keys(side: int, region: int, pages: torch.Tensor) -> torch.Tensor:
    """What distinguishes the words of `pages` (int64 [P]) of region number `region`: int64 [P], for `pattern`."""
    head = (side << _REGION_BITS | region) << _PAGE_BITS
    return ((pages + head) << _WORD_BITS) * _signed(_ODD)


def pattern(keys: torch.Tensor, num_words: int) -> torch.Tensor:
    """The words of the pages with `keys` (int64 [P]): int64 [P, num_words], each value unlike any other page's."""
    index = torch.arange(num_words, device=keys.device) * _signed(_ODD)
    words = keys[:, None] + index  # (page part + word index) * _ODD, the product taken apart
    # A product's low bytes know nothing of its factor's high ones. Folded in twice, every byte depends on all of the
    # key: else two pages would have bytes in common, and the count of wrong bytes would be too low.
    words ^= (words >> 32) & 0xFFFFFFFF
    words *= _signed(_ODD2)
    words ^= (words >> 32) & 0xFFFFFFFF
    return words


def identify(word: int) -> tuple[int, int, int, int]:
    """The (side, region number, page, word index) whose pattern is `word`; arbitrary numbers if it is nobody's."""
    key = word & _MASK
    key = (key ^ key >> 32) * _UNDO2 & _MASK
    key = (key ^ key >> 32) * _UNDO & _MASK
    index, key = key & (1 << _WORD_BITS) - 1, key >> _WORD_BITS
    page, key = key & (1 << _PAGE_BITS) - 1, key >> _PAGE_BITS
    return key >> _REGION_BITS, key & (1 << _REGION_BITS) - 1, page, index


# With --tp: one rank of each side, of a model with grouped-query attention. A row of a page is what a token has there.
TP_HEADS, TP_HEAD_BYTES, TP_LAYERS = 8, 512, 2

DRAFT = ("draft_kv", 0)  # a region that a decode side with a draft model holds, and no prefill side


def pool_layout(
    place: int | Callable[[str, int, int], int],
    num_pages: int,
    num_host_pages: int | None = None,
    draft: bool = False,
    memory: Memory = Memory.DRAM,
) -> Layout:
    """The regions of one side; `place` as for `Layout.deepseek_v4`."""
    layout = Layout.deepseek_v4(place, num_pages=num_pages, num_host_pages=num_host_pages, memory=memory)
    if not draft:
        return layout
    page_bytes = layout.by_key["c4_kv", 2].page_bytes
    base = place if isinstance(place, int) else place(*DRAFT, page_bytes * num_pages)
    region = Region(*DRAFT, base, page_bytes, num_pages, row_bytes=0, memory=memory)
    return Layout([*layout.regions, region], page_size=layout.page_size)


def heads_layout(
    place: int | Callable[[str, int, int], int], num_pages: int, heads: Heads, memory: Memory = Memory.DRAM
) -> Layout:
    """The regions of one rank that holds some heads, K and V of each layer; `place` as for `Layout.mha`."""
    return Layout.mha(
        place,
        layers=TP_LAYERS,
        num_pages=num_pages,
        heads=heads,
        page_size=PAGE,
        head_bytes=TP_HEAD_BYTES,
        memory=memory,
    )


class Pools:
    """The memory of one side: one buffer a space, all of it covered by the regions of a DeepSeek-V4-Flash layout.

    `num_host_pages` makes it a decode side: C4 KV lies in the host buffer. The device buffer is CUDA memory where there
    is a GPU, else ordinary memory (and is declared as what it is). `draft` adds a region to which nothing is sent. With
    `heads`, the regions are those of a rank that holds these heads, all in one space.
    """

    def __init__(
        self, num_pages: int, num_host_pages: int | None = None, draft: bool = False, heads: Heads | None = None
    ) -> None:
        cuda = torch.cuda.is_available()
        memory = Memory.VRAM(0) if cuda else Memory.DRAM

        def layout(place: int | Callable[[str, int, int], int], memory: Memory = Memory.DRAM) -> Layout:
            if heads is not None:
                return heads_layout(place, num_pages, heads, memory)
            return pool_layout(place, num_pages, num_host_pages, draft, memory)

        self.heads = heads
        sizes = layout(4096)
        space_of = {region.key: region.space for region in sizes.regions}
        nbytes = dict.fromkeys(sizes.spaces, 0)
        for region in sizes.regions:
            nbytes[region.space] += region.page_bytes * region.num_pages
        self.buffers = {  # int64 words
            space: torch.zeros(size // 8, dtype=torch.int64, device="cuda:0" if cuda and space != "host" else "cpu")
            for space, size in nbytes.items()
        }
        taken = dict.fromkeys(sizes.spaces, 0)

        def place(name: str, layer: int, size: int) -> int:
            space = space_of[name, layer]
            taken[space] += size
            return self.buffers[space].data_ptr() + taken[space] - size

        self.layout = layout(place, memory)
        if taken != {space: buffer.nbytes for space, buffer in self.buffers.items()}:
            raise AssertionError("the regions do not cover the pools: a check of the regions would miss bytes")
        # The same on both sides, whatever their order, and whether or not there is a draft.
        self.number = {key: n for n, key in enumerate(sorted(space_of, key=lambda key: (key == DRAFT, key)))}

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def pages(self, region: Region) -> torch.Tensor:
        """The pages of `region`, a view: int64 [num_pages, page_bytes / 8]."""
        buffer = self.buffers[region.space]
        offset = (region.base - buffer.data_ptr()) // 8
        shape, stride = (region.num_pages, region.page_bytes // 8), (region.page_stride // 8, 1)  # type: ignore[operator]
        return buffer.as_strided(shape, stride, offset)

    def fill(self, side: int, pages: torch.Tensor | None = None) -> None:
        """Write the pattern of `side` into `pages` (int64, on the CPU) of every region; default all pages."""
        for region in self.layout.regions:
            view = self.pages(region)
            chosen = torch.arange(region.num_pages) if pages is None else pages
            for block in blocks(chosen, view.shape[1]):
                block = block.to(view.device)
                view[block] = pattern(page_keys(side, self.number[region.key], block), view.shape[1])
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # an engine does not wait for torch's stream


def blocks(values: torch.Tensor, num_words: int) -> tuple[torch.Tensor, ...]:
    """`values` (one a page) in parts of about 2 MB worth of pages, so that passes over a part stay in the cache."""
    return values.split(max(1, (1 << 18) // num_words))
