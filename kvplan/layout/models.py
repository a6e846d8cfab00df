"""Layouts of known models. Each constructor is also a method of Layout: `Layout.deepseek_v4(...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypeAlias

from ..errors import LayoutError
from .layout import Layout
from .region import ADDRESS_END, Heads, Interleave, Memory, Region, integer

Bases: TypeAlias = """(
    SupportsIndex
    | Sequence[SupportsIndex]
    | Mapping[tuple[str, int], SupportsIndex]
    | Callable[[str, int, int], SupportsIndex]
)"""
"""Where regions lie: an address from which they follow one another; a sequence of addresses, one a region, in the
layout's order; a mapping (name, layer) -> address; or a function (name, layer, nbytes) -> address that allocates. An
address is an int, or a NumPy integer, and not 0."""

_ALIGNMENT = 4096  # regions that follow one another start on a memory page, as allocators place them

DEEPSEEK_V4_FLASH_RATIOS: tuple[int, ...] = (0, 0, *(4 if layer % 2 == 0 else 128 for layer in range(2, 43)))
"""Compression of each of DeepSeek-V4-Flash's 43 layers (its config's `compress_ratios`): 21 layers of 4, 20 of 128."""

_V4_TOKENS = 256  # tokens a page
_V4_ROW = 584  # bytes of a C4 or C128 row: 448 fp8 + 64 bf16 values, 7 scales, 1 byte of padding
_V4_INDEXER_ROW = 132  # 128 fp8 values and one fp32 scale
_V4_PAD = 576  # C4 and C128 pages are padded to a multiple of this


class _Placer:
    """Turns `Bases` into addresses, region by region."""

    def __init__(self, bases: Bases) -> None:
        self.bases = bases
        self.given: list[Any] | None = None
        self.next = 0
        if isinstance(bases, Mapping) or callable(bases):
            return
        listed = bases.tolist() if hasattr(bases, "tolist") else bases  # of NumPy or torch
        if isinstance(listed, (list, tuple)):
            self.given = list(listed)
            return
        self.next = _address(bases, "bases")

    def __call__(self, name: str, layer: int, nbytes: int) -> int:
        what = f"region {name} layer {layer}: address"
        if isinstance(self.bases, Mapping):
            if (name, layer) not in self.bases:
                raise LayoutError(f"region {name} layer {layer}: no address given")
            return _address(self.bases[name, layer], what)
        if callable(self.bases):
            return _address(self.bases(name, layer, nbytes), what)
        if self.given is not None:
            self.next += 1
            return _address(self.given[self.next - 1], what) if self.next <= len(self.given) else 1
        base = self.next
        self.next = -(-(base + nbytes) // _ALIGNMENT) * _ALIGNMENT
        return base

    def check_count(self) -> None:
        """Raises LayoutError unless a sequence had exactly one address a region."""
        if self.given is not None and self.next != len(self.given):
            raise LayoutError(f"bases has {len(self.given)} addresses, and the layout has {self.next} regions")


def _address(value: Any, what: str) -> int:
    address = integer(value, what, 0, ADDRESS_END)
    if address == 0:
        raise LayoutError(f"{what} is 0, which is no memory")
    return address


def _page_bytes(rows: int, row_bytes: int, multiple: int) -> int:
    return -(-rows * row_bytes // multiple) * multiple


def deepseek_v4(
    bases: Bases,
    *,
    num_pages: int,
    num_host_pages: int | None = None,
    layers: Iterable[int] | None = None,
    ratios: Sequence[int] = DEEPSEEK_V4_FLASH_RATIOS,
    memory: Memory = Memory.DRAM,
    host_memory: Memory = Memory.DRAM,
    replica: tuple[int, int] = (0, 1),
) -> Layout:
    """DeepSeek-V4: `c4_kv` and `c4_indexer` for each layer of ratio 4, `c128_kv` for each layer of ratio 128.

    Pages cover 256 tokens: a C4 KV page 64 rows of 584 bytes padded to 37,440, a C4 indexer page 64 rows of 132 bytes
    (8,448), a C128 page 2 rows of 584 bytes padded to 1,728 (geometry as in SGLang's DeepSeek-V4 pool). The rows of a
    page are not separate, since scales lie after the values of the whole page: pages move whole.

    Args:
        bases: where the regions lie, in the order c4_kv, c4_indexer, c128_kv, each by layer.
        num_pages: pages of each region.
        num_host_pages: given on a decode side with HiSparse: C4 KV then lives in `host_memory`, in space "host", with
            this many pages.
        layers: the layers held, for a pipeline stage; default all.
        ratios: compression of every layer of the model: 0 (no compressed cache), 4 or 128. Default: Flash.
        memory: of everything else.
        replica: see `Layout`.
    """
    place = _Placer(bases)
    held = range(len(ratios)) if layers is None else sorted(set(layers))
    for layer in held:
        if not 0 <= layer < len(ratios) or ratios[layer] not in (0, 4, 128):
            raise LayoutError(f"layer {layer}: DeepSeek-V4 has {len(ratios)} layers here, of ratio 0, 4 or 128")
    regions = []
    for name, ratio, row_bytes, pad in (
        ("c4_kv", 4, _V4_ROW, _V4_PAD),
        ("c4_indexer", 4, _V4_INDEXER_ROW, 1),
        ("c128_kv", 128, _V4_ROW, _V4_PAD),
    ):
        on_host = name == "c4_kv" and num_host_pages is not None
        pages = num_host_pages if on_host and num_host_pages is not None else num_pages
        rows = _V4_TOKENS // ratio
        page_bytes = _page_bytes(rows, row_bytes, pad)
        for layer in held:
            if ratios[layer] == ratio:
                base = place(name, layer, page_bytes * pages)
                region = Region(
                    name,
                    layer,
                    base,
                    page_bytes,
                    pages,
                    rows=rows,
                    row_bytes=0,
                    space="host" if on_host else "device",
                    memory=host_memory if on_host else memory,
                )
                regions.append(region)
    place.check_count()
    return Layout(regions, page_size=_V4_TOKENS, replica=replica)


def _rows_layout(
    names: Sequence[str],
    bases: Bases,
    layers: int | Iterable[int],
    num_pages: int,
    page_size: int,
    row_bytes: int,
    space: str,
    memory: Memory,
    heads: Heads | None,
    interleave: Interleave | None,
    replica: tuple[int, int],
) -> Layout:
    """Layout of `names` x `layers`, a page being `page_size` rows of `row_bytes`."""
    place = _Placer(bases)
    tokens = page_size * (interleave.size if interleave else 1)
    held = range(layers) if isinstance(layers, int) else list(layers)
    regions = [
        Region(
            name,
            layer,
            place(name, layer, page_size * row_bytes * num_pages),
            page_size * row_bytes,
            num_pages,
            tokens=tokens,
            rows=page_size,
            row_bytes=row_bytes,
            space=space,
            memory=memory,
            heads=heads,
            interleave=interleave,
        )
        for name in names
        for layer in held
    ]
    place.check_count()
    return Layout(regions, page_size=page_size, replica=replica)


def mla(
    bases: Bases,
    *,
    layers: int | Iterable[int],
    num_pages: int,
    page_size: int = 64,
    row_bytes: int = 1152,
    name: str = "mla_kv",
    space: str = "device",
    memory: Memory = Memory.DRAM,
    interleave: Interleave | None = None,
    replica: tuple[int, int] = (0, 1),
) -> Layout:
    """Multi-head latent attention: one region a layer, one row a token.

    `row_bytes` defaults to DeepSeek-V3's (512 latent + 64 rope values) * 2 bytes. With an `interleave`, `page_size` is
    the rows a rank stores in a page, which then covers page_size * size tokens. A sequence of `bases` is by layer.
    """
    return _rows_layout(
        [name], bases, layers, num_pages, page_size, row_bytes, space, memory, None, interleave, replica
    )


def mha(
    bases: Bases,
    *,
    layers: int | Iterable[int],
    num_pages: int,
    heads: Heads,
    page_size: int = 64,
    head_bytes: int = 256,
    names: Sequence[str] = ("k", "v"),
    space: str = "device",
    memory: Memory = Memory.DRAM,
    interleave: Interleave | None = None,
    replica: tuple[int, int] = (0, 1),
) -> Layout:
    """Multi-head or grouped-query attention: a K and a V region a layer, a row being the heads held.

    `head_bytes` is head_dim * element size (default 128 * 2). `heads` says which KV heads of all this rank holds. A
    sequence of `bases` is K of each layer, then V of each layer.
    """
    row_bytes = (heads.stop - heads.start) * head_bytes
    return _rows_layout(
        names, bases, layers, num_pages, page_size, row_bytes, space, memory, heads, interleave, replica
    )


Layout.deepseek_v4 = staticmethod(deepseek_v4)
Layout.mla = staticmethod(mla)
Layout.mha = staticmethod(mha)
