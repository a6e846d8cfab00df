"""Regions over tensors: what lies where is read off shapes and strides. Each function is also a method of Region."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import LayoutError, clipped, shown
from .region import Heads, Memory, Region

_AXES = ("pages", "tokens", "heads")


def from_tensor(tensor: torch.Tensor, name: str, layer: int, *, axes: str | None = None, **fields: Any) -> Region:
    """A region over `tensor`: address, sizes, strides, memory and allocation are read off it.

    The tensor must outlive the region.

    Args:
        tensor: on the CPU or a CUDA device. Any view: permuted, sliced, one plane of a larger tensor.
        name, layer: see `Region`.
        axes: names of the dimensions, separated by spaces: `pages`, and where they are there `tokens` and `heads`, in
            the order in which the tensor has them; any other name is for what one row (and head) holds, and must be
            contiguous. "pages tokens heads dim" is NHD, "pages heads tokens dim" is HND. Without `axes` the shape is
            [pages, ...], everything behind the first dimension must be contiguous, and pages move whole unless
            `row_bytes` is given; where the second of three or more dimensions is as long as a page has rows, it is the
            tokens.
        fields: further fields of `Region`. With a `heads` axis, `heads` defaults to all of them.

    Raises:
        LayoutError: this is no tensor, or it does not fit `axes` or `fields`. A pool of token slots is no tensor of
            pages: see `from_slots`.
    """
    what = f"region {clipped(str(name))} layer {shown(layer)}"
    _check_tensor(tensor, what)
    if tensor.dim() < 1 or tensor.numel() == 0:
        raise LayoutError(f"{what}: tensor of shape {tuple(tensor.shape)} holds no page")
    if axes is not None and not isinstance(axes, str):
        raise LayoutError(f"{what}: axes must be one string of names, not {shown(axes)}")
    measured = _measured(tensor, what)
    if axes is None:
        measured |= _without_axes(tensor, what, fields)
    else:
        measured |= _with_axes(tensor, what, axes.split(), fields)
    return Region(name, layer, **(measured | fields))


def from_planes(
    tensor: torch.Tensor, names: Sequence[str], layer: int, *, axes: str, **fields: Any
) -> tuple[Region, ...]:
    """Regions over the planes of one tensor, as K and V: one for each of `names`.

    Args:
        tensor: one of its dimensions counts the planes.
        names: what the planes hold, in order: ("k", "v").
        layer: see `Region`.
        axes: as for `from_tensor`, with the name `planes` for that dimension: "planes pages tokens heads dim".
        fields: further fields of `Region`, for all.

    Raises:
        LayoutError: as `from_tensor`; or there are not as many planes as names, or `names` is one string.
    """
    _check_tensor(tensor, f"planes of layer {shown(layer)}")
    words = axes.split() if isinstance(axes, str) else []
    if words.count("planes") != 1 or len(words) != tensor.dim():
        raise LayoutError(f"axes {shown(axes)} must name 'planes' once, and each of {tensor.dim()} dimensions")
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise LayoutError(f"names must be a list of names, one a plane, not {shown(names)}")
    at = words.index("planes")
    if tensor.shape[at] != len(names):
        raise LayoutError(f"the tensor of shape {tuple(tensor.shape)} has {tensor.shape[at]} planes, not {len(names)}")
    rest = " ".join(word for word in words if word != "planes")
    return tuple(
        from_tensor(tensor.select(at, number), name, layer, axes=rest, **fields) for number, name in enumerate(names)
    )


def from_slots(pool: torch.Tensor, page_size: int, name: str, layer: int, **fields: Any) -> Region:
    """A region over a pool of token slots, shape [slots, ...]: page p holds the slots from p * page_size on.

    Slots behind the last full page belong to no page.

    Args:
        pool: everything behind the first dimension must be contiguous: one row.
        page_size: slots a page.
        name, layer, fields: see `Region`. With `heads`, a row holds one head after another.

    Raises:
        LayoutError: this is no tensor; there are fewer slots than a page has; or the rows are not contiguous.
    """
    what = f"region {clipped(str(name))} layer {shown(layer)}"
    _check_tensor(pool, what)
    if not isinstance(page_size, int) or page_size < 1 or pool.dim() < 1 or pool.shape[0] < page_size:
        raise LayoutError(f"{what}: a pool of shape {tuple(pool.shape)} holds no page of {shown(page_size)} slots")
    if not pool[0].is_contiguous():
        raise LayoutError(f"{what}: a slot of the pool is not contiguous")
    row, pitch = pool[0].numel() * pool.element_size(), pool.stride(0) * pool.element_size()
    measured = {"page_bytes": row * page_size, "page_stride": pitch * page_size, "rows": page_size, "row_bytes": row}
    measured |= {"num_pages": pool.shape[0] // page_size} | ({"row_stride": pitch} if pitch != row else {})
    return Region(name, layer, **(_measured(pool, what) | measured | fields))


def _check_tensor(given: Any, what: str) -> None:
    if not isinstance(given, torch.Tensor):
        raise LayoutError(
            f"{what}: a torch tensor is needed, not {shown(given)}; give memory by its address to Region(...)"
        )
    if given.layout != torch.strided or given.is_nested:
        raise LayoutError(f"{what}: a dense tensor is needed, not one of layout {given.layout}")


def _measured(tensor: torch.Tensor, what: str) -> dict[str, Any]:
    if tensor.device.type not in ("cpu", "cuda"):
        raise LayoutError(f"{what}: tensor is on {tensor.device}, neither CPU nor CUDA")
    storage = tensor.untyped_storage()
    return {
        "base": tensor.data_ptr(),
        "memory": Memory.VRAM(tensor.device.index or 0) if tensor.device.type == "cuda" else Memory.DRAM,
        "allocation": (storage.data_ptr(), storage.nbytes()),
    }


def _without_axes(tensor: torch.Tensor, what: str, fields: dict[str, Any]) -> dict[str, Any]:
    if not tensor[0].is_contiguous():
        raise LayoutError(f"{what}: a page of the tensor is not contiguous; name its axes")
    page_bytes = tensor[0].numel() * tensor.element_size()
    stride = tensor.stride(0) * tensor.element_size() if tensor.shape[0] > 1 else page_bytes
    found: dict[str, Any] = {"page_bytes": page_bytes, "num_pages": tensor.shape[0], "page_stride": stride}
    if "row_bytes" not in fields and tensor.dim() > 1 and (tensor.dim() > 2 or tensor.element_size() > 1):
        found["shape"] = tuple(tensor.shape)
    return found


def _with_axes(tensor: torch.Tensor, what: str, words: list[str], fields: dict[str, Any]) -> dict[str, Any]:
    if len(words) != tensor.dim() or len(set(words)) != len(words) or "pages" not in words:
        raise LayoutError(
            f"{what}: axes {shown(' '.join(words))} must give 'pages' and the other dimensions of the tensor of shape "
            f"{tuple(tensor.shape)} a name each"
        )
    sizes = dict(zip(words, tensor.shape, strict=True))
    strides = {word: step * tensor.element_size() for word, step in zip(words, tensor.stride(), strict=True)}
    content = tensor
    for dim in sorted((words.index(word) for word in _AXES if word in words), reverse=True):
        content = content.select(dim, 0)
    if not content.is_contiguous():
        raise LayoutError(f"{what}: what one row and head holds, shape {tuple(content.shape)}, is not contiguous")
    head_bytes = content.numel() * tensor.element_size()
    heads = sizes.get("heads", 1)
    row_bytes, rows = heads * head_bytes, sizes.get("tokens", 1)
    found: dict[str, Any] = {"page_bytes": rows * row_bytes, "num_pages": sizes["pages"], "row_bytes": row_bytes}
    found["page_stride"] = strides["pages"] if sizes["pages"] > 1 else rows * row_bytes
    if "tokens" in words:
        found["rows"] = rows
    else:
        found["row_bytes"] = fields.get("row_bytes", 0)
        if heads > 1 and strides["heads"] != head_bytes and not found["row_bytes"]:
            raise LayoutError(
                f"{what}: the heads of the tensor of shape {tuple(tensor.shape)} lie {strides['heads']} bytes apart, "
                f"and have {head_bytes} bytes each. Name the axis of tokens too; or, where a page holds one row, pass "
                f"row_bytes={row_bytes}"
            )
    if "heads" in words:
        given = fields.get("heads")
        if isinstance(given, Heads) and given.stop - given.start != heads:
            raise LayoutError(f"{what}: the tensor of shape {tuple(tensor.shape)} has {heads} heads, not {given}")
        found |= {"heads": Heads(0, heads, heads)} if given is None else {}
        if strides.get("tokens", 0) < strides["heads"] and rows > 1 and heads > 1:
            found["order"] = "HND"
    if rows > 1:
        found["row_stride"] = strides["tokens"]
    if heads > 1:
        found["head_stride"] = strides["heads"]
    return found


Region.from_tensor = staticmethod(from_tensor)
Region.from_planes = staticmethod(from_planes)
Region.from_slots = staticmethod(from_slots)
