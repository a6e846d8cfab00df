"""Token slots to page ids: the first stage."""

from __future__ import annotations

from typing import Any

import torch

from . import ops
from .errors import PlanError
from .plan import as_pages


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
        wanted = f"{int(array[page * page_size])} + {offset}" if offset else f"a multiple of {page_size}, 0 or more"
        raise PlanError(f"slot {array[position]} at position {position} breaks its page: it must be {wanted}")
    return pages
