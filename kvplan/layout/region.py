"""Regions: where the pages of one buffer lie, what a page holds, and whose page ids address it."""

from __future__ import annotations

import dataclasses
import operator
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import LayoutError, clipped, shown

if TYPE_CHECKING:
    import torch

ADDRESS_END = 1 << 64  # addresses are unsigned 64-bit; some devices set bit 63
INT64_END = 1 << 63  # strides, sizes and page numbers travel as int64
_NAME_END = 257  # characters of a name, at most one less


def integer(value: Any, what: str, low: int, end: int) -> int:
    """`value` as an int in [low, end), or LayoutError naming `what`. Booleans and floats are refused, not rounded."""
    if isinstance(value, bool):
        raise LayoutError(f"{what} must be an integer, not {value!r}")
    try:
        number = operator.index(value)
    except TypeError:
        raise LayoutError(f"{what} must be an integer, not {shown(value)}") from None
    if not low <= number < end:
        raise LayoutError(f"{what} is {shown(number)}, outside {low} to {end - 1}")
    return number


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) < _NAME_END and value.isprintable()


@dataclasses.dataclass(frozen=True)
class Memory:
    """A kind of memory and its device number, in NIXL's words: `Memory.DRAM`, `Memory.VRAM(device)`."""

    kind: str
    device: int = 0
    DRAM: ClassVar[Memory]

    def __post_init__(self) -> None:
        if self.kind not in ("DRAM", "VRAM"):
            raise LayoutError(f"memory kind is {shown(self.kind)}; it must be 'DRAM' or 'VRAM'")
        object.__setattr__(self, "device", integer(self.device, f"{self.kind} device", 0, 1 << 31))

    @classmethod
    def VRAM(cls, device: int = 0) -> Memory:
        """Memory of the accelerator with this number."""
        return cls("VRAM", device)

    def __str__(self) -> str:
        return self.kind if self == Memory.DRAM else f"{self.kind}:{self.device}"


Memory.DRAM = Memory("DRAM", 0)


@dataclasses.dataclass(frozen=True)
class Heads:
    """KV heads [start, stop) of `total`: what a tensor-parallel rank holds of each row, one head after another."""

    start: int
    stop: int
    total: int

    def __post_init__(self) -> None:
        for field in ("start", "stop", "total"):
            object.__setattr__(self, field, integer(getattr(self, field), f"heads {field}", 0, INT64_END))
        if not self.start < self.stop <= self.total:
            raise LayoutError(f"heads {self.start} to {self.stop} of {self.total}: start < stop <= total must hold")


@dataclasses.dataclass(frozen=True)
class Interleave:
    """Decode context parallelism: this rank holds the rows whose position % size == rank."""

    size: int
    rank: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer(self.size, "interleave size", 1, 1 << 16))
        object.__setattr__(self, "rank", integer(self.rank, "interleave rank", 0, self.size))


@dataclasses.dataclass(frozen=True)
class Region:
    """One registered buffer of pages: page `p` lies at `base + p * page_stride` and takes `page_bytes`.

    Args:
        name, layer: what is stored. Regions of two layouts are paired by (name, layer), never by position. Names, of
            spaces too, have 1 to 256 characters, all printable: they stand in messages and logs.
        base: address of page 0, unsigned 64-bit.
        page_bytes: bytes of one page, padding included.
        num_pages: pages in the buffer; page ids are 0 to num_pages - 1. None where a peer does not say: `Layout` then
            bounds them by the next region, see there.
        page_stride: bytes from one page to the next; default `page_bytes`.
        tokens: tokens one page covers; default the layout's `page_size`. With an interleave it counts the tokens of
            all ranks (the virtual page).
        rows: rows one page stores; default tokens / interleave size. tokens / (rows * size) is the compression.
        row_bytes: bytes of one row. Default page_bytes / rows where that is exact. It must be given where a page ends
            in padding and rows are copied one by one. 0 says that a page has no separate rows (for example if scales
            are stored after all values of a page): such a page only moves whole.
        space: index space whose page numbers address this region.
        memory: `Memory.DRAM` or `Memory.VRAM(device)`.
        heads: KV heads held, of all; None means all of them.
        interleave: DCP share of the rows; None means all of them.

    Raises:
        LayoutError: a field is no integer, out of range, or contradicts another.
    """

    name: str
    layer: int
    base: int
    page_bytes: int
    num_pages: Any  # an int; None, if at all, only until a layout gives it a bound
    _: dataclasses.KW_ONLY
    page_stride: int | None = None
    tokens: int | None = None
    rows: int | None = None
    row_bytes: int | None = None
    space: str = "device"
    memory: Memory = Memory.DRAM
    heads: Heads | None = None
    interleave: Interleave | None = None

    def __post_init__(self) -> None:
        for field in ("name", "space"):
            if not _is_name(getattr(self, field)):
                raise LayoutError(
                    f"region {field} must be a non-empty string of at most {_NAME_END - 1} printable characters, not "
                    f"{shown(getattr(self, field))}"
                )
        for field, kind in (("memory", Memory), ("heads", Heads), ("interleave", Interleave)):
            value = getattr(self, field)
            if not isinstance(value, kind) and (value is not None or field == "memory"):
                names = ", ".join(f.name for f in dataclasses.fields(kind))
                raise LayoutError(
                    f"region {clipped(self.name)}: {field} must be a {kind.__name__}({names}), not {shown(value)}"
                )
        if self.page_stride is None:
            object.__setattr__(self, "page_stride", self.page_bytes)
        self._set("layer", -INT64_END)
        self._set("base", 0, ADDRESS_END)
        for field in ("page_bytes", "page_stride"):
            self._set(field, 1)
        for field in ("num_pages", "tokens", "rows"):
            if getattr(self, field) is not None:
                self._set(field, 1)
        if self.row_bytes is not None:
            self._set("row_bytes", 0)
        if self.page_stride < self.page_bytes:  # type: ignore[operator]
            raise LayoutError(f"{self}: page_stride {self.page_stride} is less than page_bytes {self.page_bytes}")
        if self.base + self.span_bytes > ADDRESS_END:
            raise LayoutError(f"{self}: base {self.base} + {self.span_bytes} bytes passes the end of 64-bit addresses")

    def _set(self, field: str, low: int, end: int = INT64_END) -> None:
        # `layer` comes first, and is no part of a message before it has been checked.
        what = f"region {clipped(self.name)}: layer" if field == "layer" else f"{self}: {field}"
        object.__setattr__(self, field, integer(getattr(self, field), what, low, end))

    def __str__(self) -> str:
        return f"region {clipped(self.name)} layer {self.layer}"

    @property
    def key(self) -> tuple[str, int]:
        """(name, layer), which pairs regions."""
        return (self.name, self.layer)

    @property
    def span_bytes(self) -> int:
        """Bytes from `base` to the end of the last page; of one page where `num_pages` is None."""
        return ((self.num_pages or 1) - 1) * self.page_stride + self.page_bytes  # type: ignore[operator]

    @property
    def compression(self) -> int:
        """Tokens that one row stands for. Only for a region taken from a layout, where defaults are filled in."""
        size = self.interleave.size if self.interleave else 1
        return self.tokens // (self.rows * size)  # type: ignore[operator]

    def resolved(self, page_size: int) -> Region:
        """This region with `tokens`, `rows` and `row_bytes` filled in, for a layout with `page_size` tokens a page."""
        size = self.interleave.size if self.interleave else 1
        tokens = page_size if self.tokens is None else self.tokens
        rows = tokens // size if self.rows is None else self.rows
        if rows < 1 or tokens % (rows * size):
            raise LayoutError(
                f"{self}: {tokens} tokens a page are no multiple of {max(rows, 1)} rows times interleave size {size}"
            )
        row_bytes = self.row_bytes
        if row_bytes is None:
            row_bytes = self.page_bytes // rows if self.page_bytes % rows == 0 else 0
        if rows * row_bytes > self.page_bytes:
            raise LayoutError(f"{self}: {rows} rows of {row_bytes} bytes exceed page_bytes {self.page_bytes}")
        if self.heads and row_bytes % (self.heads.stop - self.heads.start):
            raise LayoutError(f"{self}: row_bytes {row_bytes} are no multiple of the heads held ({self.heads})")
        share = self.interleave if size > 1 else None  # a share of one is the whole
        return dataclasses.replace(self, tokens=tokens, rows=rows, row_bytes=row_bytes, interleave=share)

    @classmethod
    def from_tensor(cls, tensor: torch.Tensor, name: str, layer: int, **fields: Any) -> Region:
        """A region over `tensor`, shape [pages, ...]: base, page_stride, page_bytes and memory are read off it.

        Everything behind the first dimension must be contiguous. `fields` are the further fields of `Region`.
        The tensor must outlive the region.
        """
        if tensor.dim() < 1 or tensor.numel() == 0:
            raise LayoutError(f"region {name} layer {layer}: tensor of shape {tuple(tensor.shape)} holds no page")
        if not tensor[0].is_contiguous():
            raise LayoutError(f"region {name} layer {layer}: a page of the tensor is not contiguous")
        item = tensor.element_size()
        if tensor.device.type not in ("cpu", "cuda"):
            raise LayoutError(f"region {name} layer {layer}: tensor is on {tensor.device}, neither CPU nor CUDA")
        cuda = tensor.device.type == "cuda"
        measured: dict[str, Any] = {
            "base": tensor.data_ptr(),
            "page_bytes": tensor[0].numel() * item,
            "num_pages": tensor.shape[0],
            "page_stride": tensor.stride(0) * item if tensor.shape[0] > 1 else tensor[0].numel() * item,
            "memory": Memory.VRAM(tensor.device.index or 0) if cuda else Memory.DRAM,
        }
        return cls(name, layer, **(measured | fields))
