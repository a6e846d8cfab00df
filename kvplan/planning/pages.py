"""Page ids: from token slots, the first stage; and from whatever holds them."""

from __future__ import annotations

from array import array as packed
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor

from .. import ops
from ..errors import PlanError, shown
from .dlpack import from_dlpack


def page_ids(slots: Any, page_size: int) -> torch.Tensor:
    """Page ids of a request, from the slot of each of its tokens.

    Args:
        slots: int32 or int64 [T]; slot s lies in page s // page_size (a row of SGLang's `req_to_token`, vLLM's slot
            mapping).
        page_size: tokens a page.

    Returns:
        int64 [ceil(T / page_size)]; the last page may be partly filled.

    Raises:
        PlanError: the slots of a page are not consecutive, or do not begin at its start. Names position and slot.
    """
    array = as_pages(slots, "slots")
    pages, bad = ops.page_indices(torch.tensor(array), page_size)
    position = int(bad)
    if position >= 0:
        page, offset = divmod(position, page_size)
        wanted = int(array[page * page_size]) + offset if offset else f"a multiple of {page_size}, 0 or more"
        raise PlanError(
            f"slot {array[position]} at position {position} is invalid: expected {wanted}. The slots of one page must "
            f"be consecutive and start at a page boundary"
        )
    return pages


NO_PAGES = np.empty(0, np.int64)
PAGE_TYPES = (np.dtype(np.int64), np.dtype(np.int32))


def as_pages(pages: Any, what: str, *, on_device: bool = False) -> Any:
    """`pages` as a 1-D int32 or int64 NumPy array, without a copy where it is one.

    Args:
        pages: a NumPy array, a torch tensor, anything with DLPack, or a sequence of integers.
        what: how messages call it.
        on_device: ids on a GPU become a tensor there. Without it they are refused.

    Raises:
        PlanError: `pages` is no list of page ids. No other error is raised.
    """
    array: Any
    if isinstance(pages, np.ndarray):
        array = pages
    elif isinstance(pages, torch.Tensor):
        array = _from_tensor(pages, what, on_device)
    elif hasattr(pages, "__dlpack__"):
        array = _from_dlpack(pages, what, on_device)
    else:
        array = _from_sequence(pages, what)
    if isinstance(array, torch.Tensor):
        return array
    if isinstance(array, np.ma.MaskedArray):
        raise PlanError(f"{what} is a masked array; a page list has no masked ids: pass pages.compressed()")
    if array.dtype not in PAGE_TYPES or array.ndim != 1:
        if array.dtype.kind not in "iu" or array.ndim != 1:
            raise PlanError(f"{what} must be a list of page ids, integers [P], not {array.dtype} {list(array.shape)}")
        if array.dtype == np.uint64 and array.size and array.max() >= 1 << 63:
            raise PlanError(f"{what}: page id {array.max()} at position {array.argmax()} is out of range")
        array = array.astype(np.int64)
    return array


def _from_tensor(pages: torch.Tensor, what: str, on_device: bool) -> np.ndarray | torch.Tensor:
    kind, device = f"{pages.dtype} {list(pages.shape)}", pages.device.type
    if pages.layout is not torch.strided or pages.is_quantized:
        raise PlanError(f"{what} must be a dense tensor, not {pages.layout} {kind}")
    if pages.is_floating_point() or pages.is_complex() or pages.dtype is torch.bool or pages.dim() != 1:
        raise PlanError(f"{what} must be a list of page ids, integers [P], not {kind}")
    if isinstance(pages, FakeTensor):
        raise PlanError(f"{what} holds no page ids: it is a fake tensor {kind}")
    if device == "cpu":
        try:
            return pages.resolve_neg().numpy()
        except (RuntimeError, TypeError) as error:  # a subclass that keeps its data elsewhere
            raise PlanError(f"{what} is a {type(pages).__name__} that gives no array: {error}") from None
    if not on_device:
        raise PlanError(f"{what} is on {pages.device}; it must be on the CPU here: pass {what}.cpu()")
    if device == "meta":
        raise PlanError(f"{what} holds no page ids: it is a meta tensor {kind}")
    if pages.dtype not in (torch.int32, torch.int64):
        raise PlanError(f"{what} must be a list of page ids, int32 or int64 [P] on a GPU, not {kind}")
    return pages.resolve_neg()


def _from_dlpack(pages: Any, what: str, on_device: bool) -> np.ndarray | torch.Tensor:
    try:
        array = from_dlpack(pages)
    except Exception as error:  # whatever the other library raises
        raise PlanError(f"{what} is a {type(pages).__name__} that gives no array by DLPack: {error!r}") from None
    return _from_tensor(array, what, on_device) if isinstance(array, torch.Tensor) else array


# What JSON has beside numbers. NumPy would make strings of all ids, as long as the longest, where one is a string.
_BOOLS = (bool, np.bool_)
_NO_IDS = frozenset({*_BOOLS, type(None), str, bytes, list, tuple, dict})


def _from_sequence(pages: Any, what: str) -> np.ndarray:
    if isinstance(pages, (list, tuple)):
        try:
            ids = np.array(packed("q", pages), np.int64)  # integers, and nothing else
        except Exception:  # also what a type of the caller's raises
            _refuse_no_ids(pages, what)
        else:
            # A bool passes for 0 or 1, and so only these need a look.
            if any(isinstance(pages[place], _BOOLS) for place in np.flatnonzero(ids.view(np.uint64) <= 1)):
                _refuse_no_ids(pages, what)
            return ids
    try:
        ids = np.asarray(pages)
    except Exception as error:  # whatever a type of the caller's raises
        raise PlanError(f"{what} is no list of page ids: {error!r}") from None
    return NO_PAGES if ids.size == 0 and ids.ndim == 1 else ids


def _refuse_no_ids(pages: Sequence[Any], what: str) -> None:
    """PlanError for the first that is no number at all, or that no 64 bits hold."""
    for place, page in enumerate(pages):
        if type(page) in _NO_IDS:
            raise PlanError(
                f"{what} is no list of page ids, which are integers: at position {place} is {shown(page)} "
                f"({type(page).__name__})"
            )
        if isinstance(page, int) and not -(1 << 63) <= page < 1 << 63:
            raise PlanError(f"{what}: page id {shown(page)} at position {place} is out of range")
