"""Regions: where the pages of one buffer lie, what a page holds, and whose page ids address it."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from ..errors import LayoutError, clipped, shown

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
    """Context parallelism: this rank holds the tokens at the positions p with (p // run) % size == rank.

    `run` is how many consecutive tokens a rank holds, 1 by default. A page holds whole runs.
    """

    size: int
    rank: int
    run: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", integer(self.size, "interleave size", 1, 1 << 16))
        object.__setattr__(self, "rank", integer(self.rank, "interleave rank", 0, self.size))
        object.__setattr__(self, "run", integer(self.run, "interleave run", 1, INT64_END))


def replica_of(value: Any, what: str) -> tuple[int, int]:
    """A checked (index, count)."""
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
        raise LayoutError(f"{what} must be (index, count), not {shown(value)}")
    count = integer(value[1], f"{what} count", 1, 1 << 31)
    return integer(value[0], f"{what} index", 0, count), count


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
        row_bytes: bytes of one row, all heads held together. It has no default: a pairing that copies rows one by one
            refuses a region without it. 0 says that a page has no separate rows (for example if scales are stored
            after all values of a page): such a page only moves whole.
        space: index space whose page numbers address this region.
        memory: `Memory.DRAM` or `Memory.VRAM(device)`.
        heads: KV heads held, of all; None means all of them.
        interleave: context-parallel share of the tokens; None means all of them.
        order: "NHD" where the tokens of a page are its outer axis, "HND" where the heads are.
        row_stride, head_stride: bytes from one token's row to the next within a page, and from one head to the next.
            By default rows and heads lie side by side in the given order. Where they lie apart, page_bytes counts the
            bytes of the rows alone: rows * row_bytes. A head may lie further away than the next page.
        format: what the bytes mean, in any words ("bf16", "fp8_e4m3"). `kvplan.pair` refuses two that differ; None
            goes with all.
        replica: (index, count): `count` source ranks hold these same bytes, and this one is number `index`. Default:
            the layout's.
        allocation: (base, bytes) of the memory that the region is a part of: engines register it whole, once.
        shape: of the tensor it was made from, where that must agree with the page size. Filled in by `from_tensor`.

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
    order: str = "NHD"
    row_stride: int | None = None
    head_stride: int | None = None
    format: str | None = None
    replica: tuple[int, int] | None = None
    allocation: tuple[int, int] | None = dataclasses.field(default=None, compare=False, repr=False)
    shape: tuple[int, ...] | None = dataclasses.field(default=None, compare=False, repr=False)

    # Made from tensors; defined in tensors.py.
    from_tensor: ClassVar[Callable[..., Region]]
    from_planes: ClassVar[Callable[..., tuple[Region, ...]]]
    from_slots: ClassVar[Callable[..., Region]]

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
        if self.order not in ("NHD", "HND"):
            raise LayoutError(f"{self}: order must be 'NHD' or 'HND', not {shown(self.order)}")
        for field in ("row_stride", "head_stride"):
            if getattr(self, field) is not None:
                self._set(field, 1)
        if self.format is not None and not _is_name(self.format):
            raise LayoutError(f"{self}: format must be a string of printable characters, not {shown(self.format)}")
        if self.replica is not None:
            object.__setattr__(self, "replica", replica_of(self.replica, f"{self}: replica"))
        if self.allocation is not None:
            self._check_allocation()
        apart = self.row_stride is not None or self.head_stride is not None
        if self.page_stride < self.page_bytes and not apart:  # type: ignore[operator]
            raise LayoutError(f"{self}: page_stride {self.page_stride} is less than page_bytes {self.page_bytes}")
        if self.base + self.span_bytes > ADDRESS_END:
            raise LayoutError(f"{self}: base {self.base} + {self.span_bytes} bytes passes the end of 64-bit addresses")

    def _set(self, field: str, low: int, end: int = INT64_END) -> None:
        # `layer` comes first, and is no part of a message before it has been checked.
        what = f"region {clipped(self.name)}: layer" if field == "layer" else f"{self}: {field}"
        object.__setattr__(self, field, integer(getattr(self, field), what, low, end))

    def _check_allocation(self) -> None:
        if not isinstance(self.allocation, Sequence) or len(self.allocation) != 2:
            raise LayoutError(f"{self}: allocation must be (base, bytes), not {shown(self.allocation)}")
        base = integer(self.allocation[0], f"{self}: allocation base", 0, ADDRESS_END)
        nbytes = integer(self.allocation[1], f"{self}: allocation bytes", 1, ADDRESS_END - base + 1)
        object.__setattr__(self, "allocation", (base, nbytes))

    def __str__(self) -> str:
        return f"region {clipped(self.name)} layer {self.layer}"

    @property
    def key(self) -> tuple[str, int]:
        """(name, layer), which pairs regions."""
        return (self.name, self.layer)

    @property
    def span_bytes(self) -> int:
        """Bytes from `base` to the end of the last page; of one page where `num_pages` is None."""
        return ((self.num_pages or 1) - 1) * self.page_stride + self.page_span  # type: ignore[operator]

    @property
    def page_span(self) -> int:
        """Bytes from the first to the last byte of a page."""
        if (self.row_stride is None and self.head_stride is None) or not self.rows or not self.row_bytes:
            return self.page_bytes
        last = (self.rows - 1) * self.row_pitch + (self.num_heads - 1) * self.head_pitch + self.head_bytes
        return last if self.scattered else self.page_bytes

    @property
    def compression(self) -> int:
        """Tokens that one row stands for. Only for a region taken from a layout, where defaults are filled in."""
        size = self.interleave.size if self.interleave else 1
        return self.tokens // (self.rows * size)  # type: ignore[operator]

    @property
    def num_heads(self) -> int:
        """Heads held: 1 where no heads are told apart."""
        return self.heads.stop - self.heads.start if self.heads else 1

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of one row, 0 where rows cannot be told apart."""
        return (self.row_bytes or 0) // self.num_heads

    @property
    def row_pitch(self) -> int:
        """Bytes from one row of a page to the next: `row_stride`, or what `order` says."""
        if self.row_stride is not None:
            return self.row_stride
        return self.head_bytes if self.order == "HND" else self.row_bytes or 0

    @property
    def head_pitch(self) -> int:
        """Bytes from one head to the next: `head_stride`, or what `order` says."""
        if self.head_stride is not None:
            return self.head_stride
        return self.rows * self.row_pitch if self.order == "HND" else self.head_bytes  # type: ignore[operator]

    @property
    def has_rows(self) -> bool:
        """Whether rows, and the heads of a row, can be told apart. For a region taken from a layout."""
        return bool(self.row_bytes) and (self.order == "NHD" or self.heads is not None)

    @property
    def run_rows(self) -> int:
        """Consecutive rows that a rank holds: the interleave's run. For a region taken from a layout."""
        return max(self.interleave.run // self.compression, 1) if self.interleave else 1

    @property
    def scattered(self) -> bool:
        """Whether the rows of a page do not fill one block of memory. For a region taken from a layout."""
        if self.row_stride is None and self.head_stride is None:
            return False
        extent = self.head_bytes
        for count, stride in self.axes():
            if stride != extent:
                return True
            extent *= count
        return False

    def axes(self, *further: tuple[int, int]) -> list[tuple[int, int]]:
        """(count, stride) of rows, heads and further axes where there are several; the smallest stride first."""
        axes = [(self.rows, self.row_pitch), (self.num_heads, self.head_pitch), *further]
        return sorted(((count, stride) for count, stride in axes if count > 1), key=lambda axis: axis[1])  # type: ignore

    def resolved(self, page_size: int) -> Region:
        """This region with `tokens`, `rows` and `row_bytes` filled in, for a layout with `page_size` tokens a page.

        `row_stride` and `head_stride` stay None where they are what `order` says: see `row_pitch` and `head_pitch`.
        """
        size = self.interleave.size if self.interleave else 1
        tokens = page_size if self.tokens is None else self.tokens
        rows = tokens // size if self.rows is None else self.rows
        if rows < 1 or tokens % (rows * size):
            raise LayoutError(
                f"{self}: {tokens} tokens a page are no multiple of {max(rows, 1)} rows times interleave size {size}"
            )
        row_bytes = self._row_bytes_of_shape(rows) if self.row_bytes is None else self.row_bytes
        if rows * row_bytes > self.page_bytes:
            raise LayoutError(f"{self}: {rows} rows of {row_bytes} bytes exceed page_bytes {self.page_bytes}")
        if row_bytes % self.num_heads:
            raise LayoutError(f"{self}: row_bytes {row_bytes} are no multiple of the heads held ({self.heads})")
        filled: dict[str, Any] = {"tokens": tokens, "rows": rows, "row_bytes": row_bytes}
        filled["interleave"] = self._resolved_interleave(rows, tokens // (rows * size))
        if self.row_stride is None and self.head_stride is None:
            return dataclasses.replace(self, **filled)
        return dataclasses.replace(self, **filled)._checked_strides()

    def _row_bytes_of_shape(self, rows: int) -> int:
        """Of a tensor [pages, rows, ...]; 0, for unknown, of any other."""
        if self.shape is None or len(self.shape) < 3:
            return 0
        if self.shape[1] != rows:
            raise LayoutError(
                f"{self}: the tensor of shape {self.shape} has {self.shape[1]} at dimension 1, and a page stores "
                f"{rows} rows. Name its axes; make a pool of token slots a region by Region.from_slots; or give "
                f"row_bytes=0 where pages move whole"
            )
        return self.page_bytes // rows

    def _resolved_interleave(self, rows: int, compression: int) -> Interleave | None:
        """None for a share of one, which is the whole; run 1 where a run is one row."""
        if self.interleave is None or self.interleave.size == 1:
            return None
        run = self.interleave.run
        if (compression % run and run % compression) or rows % max(run // compression, 1):
            raise LayoutError(
                f"{self}: an interleave run of {run} tokens must be whole rows and divide a page, which stores {rows} "
                f"rows of {compression} tokens"
            )
        return dataclasses.replace(self.interleave, run=run if run > compression else 1)

    def _checked_strides(self) -> Region:
        """This region, strides left out that say what `order` says, or nothing."""
        if not self.row_bytes:
            raise LayoutError(f"{self}: row_stride and head_stride need row_bytes")
        if self.heads is None and (self.head_stride is not None or self.order == "HND"):
            raise LayoutError(f"{self}: head_stride, and strides of order 'HND', need heads")
        head_major = self.order == "HND"
        row_pitch = self.head_bytes if head_major else self.row_bytes
        # A page of one row has no stride of rows, and a row of one head no stride of heads.
        row_stride = self.row_pitch if self.row_pitch != row_pitch and self.rows != 1 else None
        # In order "HND" a stride of rows moves the heads apart too.
        head_pitch = self.rows * (row_stride or row_pitch) if head_major else self.head_bytes  # type: ignore[operator]
        head_stride = self.head_pitch if self.head_pitch != head_pitch and self.num_heads > 1 else None
        if (row_stride, head_stride) != (self.row_stride, self.head_stride):
            return dataclasses.replace(self, row_stride=row_stride, head_stride=head_stride)._checked_axes()
        return self._checked_axes()

    def _checked_axes(self) -> Region:
        """This region. No two rows or heads may share a byte."""
        if self.row_stride is None and self.head_stride is None:
            return self
        if self.scattered and self.page_bytes != self.rows * self.row_bytes:  # type: ignore[operator]
            raise LayoutError(
                f"{self}: page_bytes is {self.page_bytes}; where rows lie apart it counts {self.rows} rows of "
                f"{self.row_bytes} bytes alone"
            )
        if self.base + self.span_bytes > ADDRESS_END:
            raise LayoutError(f"{self}: base {self.base} + {self.span_bytes} bytes passes the end of 64-bit addresses")
        extent = self.head_bytes
        pages: int = ADDRESS_END if self.num_pages is None else self.num_pages
        for count, stride in self.axes((pages, self.page_stride)):  # type: ignore[arg-type]
            if stride < extent:
                raise LayoutError(
                    f"{self}: its own bytes overlap: page_stride {self.page_stride}, row_stride {self.row_pitch}, "
                    f"head_stride {self.head_pitch}, {self.num_heads} heads of {self.head_bytes} bytes"
                )
            extent = (count - 1) * stride + extent
        if not self.scattered and self.page_stride < self.page_bytes:  # type: ignore[operator]
            raise LayoutError(f"{self}: page_stride {self.page_stride} is less than page_bytes {self.page_bytes}")
        return self
