"""The page lists and windows of requests: their form is checked, and they are gathered for one op call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from ..errors import PlanError, shown
from ..pairing import PairingTables
from .pages import as_pages
from .plan import Request


class PageLists:
    """The page lists and windows of requests to one peer.

    Attributes:
        lists: NumPy arrays, and tensors on `device`.
        device: the GPU that holds some of the lists, or None.
        windows: for each request, for each space, the seven numbers of struct Window; see `ops.plan`. Offsets count
            page ids of all lists behind one another.
        requests: how many requests they are.
    """

    def __init__(self, pairing: PairingTables) -> None:
        self.pairing = pairing
        self.lists: list[Any] = []
        self.device: torch.device | None = None
        self.windows: list[int] = []
        self.requests = 0
        self._size = 0  # page ids in all lists

    def add_all(self, requests: Iterable[Request]) -> PageLists:
        """Add the requests of a batch, and return this object. A PlanError says which request is at fault."""
        for number, request in enumerate(requests):
            if not isinstance(request, Request):
                raise TypeError(f"request {number} of the batch is a {type(request).__name__}, not a kvplan.Request")
            try:
                self.add(request.src_pages, request.dst_pages, request.src_start, request.dst_start, request.num_tokens)
            except PlanError as error:
                raise PlanError(f"request {number}: {error}") from None
        return self

    def add(
        self, src_pages: Any, dst_pages: Any, src_start: int, dst_start: int | None, num_tokens: int | None
    ) -> PageLists:
        """Check the form of one request's arguments, add them, and return this object. The op checks their values."""
        pairing = self.pairing
        if not isinstance(dst_pages, dict):
            dst_pages = _one_space(pairing, dst_pages)
        if not dst_pages.keys() <= pairing.dst_spaces:
            raise _unknown_space(pairing, dst_pages, "dst_pages")
        window = (
            _position(src_start, "src_start"),
            -1 if dst_start is None else _position(dst_start, "dst_start"),
            -1 if num_tokens is None else _position(num_tokens, "num_tokens"),
        )
        named = dict(src_pages) if isinstance(src_pages, Mapping) else None
        if named is not None and not named.keys() - {None} <= pairing.dst_spaces:
            raise _unknown_space(pairing, named, "src_pages")
        if pairing.many_src_spaces:
            _check_one_numbering(pairing, named or ())
        if num_tokens is None and pairing.unequal_src_tokens:
            _check_one_meaning(pairing, named or ())
        shared = None  # offset and length of the source list that serves all spaces
        for space in pairing.space_names:
            if space not in dst_pages:
                raise PlanError(f"dst_pages lacks space {space!r}, whose pages hold {pairing.destination(space)}")
            if named is not None and space in named:
                source, times = self._append(named[space], f"src_pages[{space!r}]"), (0, -1, -1)
            else:
                if shared is None:
                    shared = self._append(_for_others(named, space) if named is not None else src_pages, "src_pages")
                source, times = shared, window
            self.windows += source + self._append(dst_pages[space], f"dst_pages[{space!r}]") + times
        self.requests += 1
        return self

    def _append(self, pages: Any, what: str) -> tuple[int, int]:
        """Offset and length of a list, which is kept."""
        array = as_pages(pages, what, on_device=True)
        if isinstance(array, torch.Tensor):
            if self.device not in (None, array.device):
                raise PlanError(f"{what} is on {array.device}, another list on {self.device}")
            self.device = array.device
        offset, count = self._size, len(array)
        self.lists.append(array)
        self._size += count
        return offset, count


def _one_space(pairing: PairingTables, dst_pages: Any) -> dict[str, Any]:
    if isinstance(dst_pages, Mapping):
        return dict(dst_pages)
    spaces = pairing.dst.spaces
    if len(spaces) != 1:
        raise PlanError(f"dst_pages is one list, but the destination has the spaces {spaces}: give a list for each")
    return {spaces[0]: dst_pages}


def _for_others(named: Mapping[Any, Any], space: str) -> Any:
    if None not in named:
        raise PlanError(f"src_pages lacks space {space!r}, and gives no list for all others under None")
    return named[None]


def _unknown_space(pairing: PairingTables, given: Mapping[Any, Any], what: str) -> PlanError:
    unknown = sorted(shown(space) for space in given if space not in pairing.dst_spaces)
    named = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    return PlanError(f"{what} names {named}; the destination has the spaces {pairing.dst.spaces}")


def _check_one_numbering(pairing: PairingTables, named: Any) -> None:
    numbered = {name: space for name, space in pairing.src_spaces.items() if name not in named}
    if len(set(numbered.values())) > 1:
        raise PlanError(
            f"one source list serves destination spaces whose source pages are numbered by different spaces "
            f"({numbered}): give src_pages by name"
        )


def _check_one_meaning(pairing: PairingTables, named: Any) -> None:
    tokens = {name: count for name, count in pairing.src_tokens.items() if name not in named}
    if len(set(tokens.values())) > 1:
        raise PlanError(
            f"one source list serves spaces whose source pages cover unequal numbers of tokens ({tokens}): give "
            f"num_tokens, or the lists by name"
        )


def _position(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise PlanError(f"{what} must be an integer, not {shown(value)}")
    if not 0 <= value < 1 << 62:
        raise PlanError(f"{what} is {shown(int(value))}; it must be 0 or more and below 2**62")
    return int(value)
