"""The page lists and windows of requests: their form is checked, and they are gathered for one op call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import PlanError, listed, quoted, shown
from ..pairing import PairingTables
from .pages import PAGE_TYPES, as_pages
from .plan import Request

_WHOLE = (0, -1, -1)  # window: from token 0, both lists together, all that the source list covers
_ARRAYS = (np.ndarray, torch.Tensor, list)  # quick to check: these are no mappings


class PageLists:
    """The page lists and windows of requests to one peer.

    Attributes:
        lists: NumPy arrays, and tensors on `device`.
        device: the GPU that holds some of the lists, or None.
        windows: for each request, for each space, the seven numbers of struct Window; see `ops.plan`. Offsets count
            page ids of all lists, concatenated.
        requests: how many requests they are.
        size: page ids in all lists.
    """

    __slots__ = ("device", "lists", "pairing", "requests", "size", "windows")

    def __init__(self, pairing: PairingTables) -> None:
        self.pairing = pairing
        self.lists: list[Any] = []
        self.device: torch.device | None = None
        self.windows: list[int] = []
        self.requests = 0
        self.size = 0

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
        if type(dst_pages) is not dict:
            dst_pages = _one_space(pairing, dst_pages)
        if src_start == 0 and dst_start is None and num_tokens is None and src_start.__class__ is int:
            window = _WHOLE
        else:
            window = (
                _position(src_start, "src_start"),
                -1 if dst_start is None else _position(dst_start, "dst_start"),
                -1 if num_tokens is None else _position(num_tokens, "num_tokens"),
            )
        named = None if isinstance(src_pages, _ARRAYS) else _by_name(pairing, src_pages)
        if pairing.many_src_spaces:
            _check_one_numbering(pairing, named or ())
        if num_tokens is None and pairing.unequal_src_tokens:
            _check_one_meaning(pairing, named or ())
        if len(dst_pages) != len(pairing.space_names):
            _check_spaces(pairing, dst_pages, "dst_pages")
        shared = None  # offset and length of the source list that serves all spaces
        for space in pairing.space_names:
            try:
                pages = dst_pages[space]
            except KeyError:
                _check_spaces(pairing, dst_pages, "dst_pages")
                raise PlanError(
                    f"dst_pages lacks space {quoted(space)}, whose pages hold {pairing.destination(space)}"
                ) from None
            if named is not None and space in named:
                source, times = self._append(named[space], "src_pages", space), _WHOLE
            else:
                if shared is None:
                    shared = self._append(src_pages if named is None else _for_others(named, space), "src_pages")
                source, times = shared, window
            self.windows += source + self._append(pages, "dst_pages", space) + times
        self.requests += 1
        return self

    def _append(self, pages: Any, what: str, space: str | None = None) -> tuple[int, int]:
        """Offset and length of a list, which is kept."""
        if type(pages) is np.ndarray and pages.ndim == 1 and pages.dtype in PAGE_TYPES:
            array = pages  # by far the most common
        else:
            array = as_pages(pages, what if space is None else f"{what}[{quoted(space)}]", on_device=True)
            if isinstance(array, torch.Tensor):
                if self.device not in (None, array.device):
                    raise PlanError(f"{what} is on {array.device}, another list on {self.device}")
                self.device = array.device
        offset, count = self.size, len(array)
        self.lists.append(array)
        self.size = offset + count
        return offset, count


def request_at(pairing: PairingTables, ids: np.ndarray, windows: Sequence[int], number: int) -> Request:
    """Request `number` again, from the page concatenated ids of all lists and their windows."""
    src_pages: dict[str | None, np.ndarray] = {}
    dst_pages: dict[str, np.ndarray] = {}
    start, dst_start, num_tokens = _WHOLE
    names = pairing.space_names
    for k, space in enumerate(names, start=number * len(names)):
        src_offset, src_count, dst_offset, dst_count, *window = windows[7 * k : 7 * k + 7]
        source = ids[src_offset : src_offset + src_count]
        if tuple(window) == _WHOLE:
            src_pages[space] = source  # free of positions, or as good as: both lists start together at token 0
        else:
            src_pages[None] = source
            start, dst_start, num_tokens = window
        dst_pages[space] = ids[dst_offset : dst_offset + dst_count]
    given = [None if value < 0 else value for value in (dst_start, num_tokens)]
    return Request(src_pages, dst_pages, start, *given)


def _by_name(pairing: PairingTables, src_pages: Any) -> dict[Any, Any] | None:
    """Source lists by destination space, where they are given so."""
    if not isinstance(src_pages, Mapping):
        return None
    named = dict(src_pages)
    _check_spaces(pairing, named.keys() - {None}, "src_pages")
    return named


def _one_space(pairing: PairingTables, dst_pages: Any) -> dict[str, Any]:
    if isinstance(dst_pages, Mapping):
        return dict(dst_pages)
    spaces = pairing.dst.spaces
    if len(spaces) != 1:
        named = listed(spaces, show=quoted)
        raise PlanError(f"dst_pages is one list, but the destination has the spaces {named}: give a list for each")
    return {spaces[0]: dst_pages}


def _for_others(named: Mapping[Any, Any], space: str) -> Any:
    if None not in named:
        raise PlanError(f"src_pages lacks space {quoted(space)}, and gives no list for all others under None")
    return named[None]


def _check_spaces(pairing: PairingTables, given: Collection[Any], what: str) -> None:
    unknown = sorted(shown(space) for space in given if space not in pairing.dst_spaces)
    if unknown:
        named = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
        raise PlanError(
            f"{what} names {named}; the destination has the spaces {listed(pairing.dst.spaces, show=quoted)}"
        )


def _check_one_numbering(pairing: PairingTables, named: Any) -> None:
    numbered = {name: space for name, space in pairing.src_spaces.items() if name not in named}
    if len(set(numbered.values())) > 1:
        raise PlanError(
            f"a single source list was given, but these destination spaces read from different source spaces "
            f"({listed(f'{name} by {space}' for name, space in numbered.items())}): pass src_pages as "
            f"{{destination space: list}}"
        )


def _check_one_meaning(pairing: PairingTables, named: Any) -> None:
    tokens = {name: count for name, count in pairing.src_tokens.items() if name not in named}
    if len(set(tokens.values())) > 1:
        raise PlanError(
            f"a single source list was given, but a source page covers unequal numbers of tokens "
            f"({listed(f'{name}: {count}' for name, count in tokens.items())}): pass num_tokens, "
            f"or one list for each space"
        )


def _position(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise PlanError(f"{what} must be an integer, not {shown(value)}")
    if not 0 <= value < 1 << 62:
        raise PlanError(f"{what} is {shown(int(value))}; it must be 0 or more and below 2**62")
    return int(value)
