"""The page lists and windows of requests: their form is checked, and they are gathered for one op call."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import PlanError, listed, quoted, shown
from ..pairing import PairingTables
from .pages import PAGE_TYPES, as_pages
from .plan import Request, Start

POSITIONS = ("src_start", "dst_start", "num_tokens")
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
        nulls: by the number of its window, the null page of a space; None where no request has one.
    """

    __slots__ = ("device", "lists", "nulls", "pairing", "requests", "size", "windows")

    def __init__(self, pairing: PairingTables) -> None:
        self.pairing = pairing
        self.lists: list[Any] = []
        self.device: torch.device | None = None
        self.windows: list[int] = []
        self.requests = 0
        self.size = 0
        self.nulls: dict[int, int] | None = None

    def add_all(self, requests: Iterable[Request]) -> PageLists:
        """Add the requests of a batch, and return this object. A PlanError says which request is at fault."""
        for number, request in enumerate(requests):
            if not isinstance(request, Request):
                raise TypeError(f"request {number} of the batch is a {type(request).__name__}, not a kvplan.Request")
            try:
                self.add(
                    request.src_pages, request.dst_pages, request.src_start, request.dst_start, request.num_tokens,
                    request.null_page,
                )  # fmt: skip
            except PlanError as error:
                raise PlanError(f"request {number}: {error}") from None
        return self

    def add(
        self,
        src_pages: Any,
        dst_pages: Any,
        src_start: Start,
        dst_start: Start | None,
        num_tokens: Start | None,
        null_page: int | Mapping[str, int] | None = None,
    ) -> PageLists:
        """Check the form of one request's arguments, add them, and return this object. The op checks their values."""
        pairing = self.pairing
        if type(dst_pages) is not dict:
            dst_pages = _one_space(pairing, dst_pages)
        positions = None  # those of each space, where they are given so
        if src_start == 0 and dst_start is None and num_tokens is None and src_start.__class__ is int:
            window = _WHOLE
        elif isinstance(src_start, dict) or isinstance(dst_start, dict) or isinstance(num_tokens, dict):
            positions = Positions(pairing, src_start, dst_start, num_tokens)
            window = positions.ints
        else:
            window = _window(src_start, dst_start, num_tokens)
        named = None if isinstance(src_pages, _ARRAYS) else _by_name(pairing, src_pages)
        if named is not None and window != _WHOLE and None not in named:
            _refuse_unused(window)
        if pairing.many_src_spaces:
            _check_one_numbering(pairing, named or ())
        if num_tokens is None and pairing.unequal_src_tokens:
            _check_one_meaning(pairing, named or ())
        if positions is not None:
            positions.check_others(named or ())
            if pairing.unequal_src_tokens:
                _check_one_meaning(pairing, {*(named or ()), *positions.counted()})
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
                source = self._append(named[space], "src_pages", space)
                times = _WHOLE if positions is None else positions.of_named(space)
            else:
                if shared is None:
                    shared = self._append(src_pages if named is None else _for_others(named, space), "src_pages")
                source, times = shared, window if positions is None else positions.of_other(space)
            self.windows += source + self._append(pages, "dst_pages", space) + times
        if null_page is not None:
            self._add_nulls(null_page)
        self.requests += 1
        return self

    def _add_nulls(self, null_page: Any) -> None:
        names = self.pairing.space_names
        if isinstance(null_page, Mapping):
            _check_spaces(self.pairing, null_page, "null_page")
        given = dict(null_page) if isinstance(null_page, Mapping) else dict.fromkeys(names, null_page)
        ids = {space: _null_id(page, space) for space, page in given.items()}
        first = self.requests * len(names)
        found = {first + k: ids[space] for k, space in enumerate(names) if space in ids}
        self.nulls = (self.nulls or {}) | found

    def as_given(self, facts: Sequence[int], pages: np.ndarray) -> tuple[Sequence[int], np.ndarray, Sequence[int]]:
        """Facts about a refusal, page ids and windows: what `refusal` takes."""
        return facts, pages, self.windows

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


class Positions:
    """Positions of one request of which some are given by destination space, under None for those not named.

    An int serves the lists that are not named, as without spaces.

    Attributes:
        ints: (src_start, dst_start, num_tokens), as in struct Window, of what is given as an int.

    Raises:
        PlanError: a position is no integer or out of range, or a space is unknown.
    """

    def __init__(self, pairing: PairingTables, *given: Start | None) -> None:
        self._pairing = pairing
        self._by_space: list[dict[str | None, int]] = []
        self.ints = _WHOLE
        for number, (what, value) in enumerate(zip(POSITIONS, given, strict=True)):
            by_space: dict[str | None, int] = {}
            if isinstance(value, dict):
                _check_spaces(pairing, value.keys() - {None}, what)
                for space, position in value.items():
                    if position is not None:
                        name = what if space is None else f"{what}[{quoted(space)}]"
                        by_space[space] = _position(position, name)
            elif value is not None:
                position = _position(value, what)
                by_space[None] = position
                self.ints = (*self.ints[:number], position, *self.ints[number + 1 :])  # type: ignore[assignment]
            self._by_space.append(by_space)

    def of_named(self, space: str) -> tuple[int, int, int]:
        """The window of a space whose source list is given by name: free of positions that do not name it."""
        starts, dst_starts, counts = self._by_space
        return starts.get(space, 0), dst_starts.get(space, -1), counts.get(space, -1)

    def of_other(self, space: str) -> tuple[int, int, int]:
        """The window of a space that the source list for all others serves."""
        window = (by_space.get(space, by_space.get(None, usual))
                  for by_space, usual in zip(self._by_space, _WHOLE, strict=True))  # fmt: skip
        return tuple(window)  # type: ignore[return-value]

    def counted(self) -> Iterable[str]:
        """Spaces for which num_tokens is given, where they are not named."""
        return (space for space in self._pairing.space_names if self.of_other(space)[2] >= 0)

    def check_others(self, named: Collection[Any]) -> None:
        """Refuse a list that serves several spaces and would begin at several tokens."""
        starts = {space: self.of_other(space)[0] for space in self._pairing.space_names if space not in named}
        if len(set(starts.values())) > 1:
            raise PlanError(
                f"a single source list was given, and src_start has it begin at different tokens "
                f"({listed(f'{space}: {start}' for space, start in starts.items())}): pass src_pages as "
                f"{{destination space: list}}"
            )


def request_at(
    pairing: PairingTables,
    ids: np.ndarray,
    windows: Sequence[int],
    number: int,
    nulls: Mapping[int, int] | None = None,
) -> Request:
    """Request `number` again, from the concatenated page ids of all lists, and their windows and null pages.

    Its lists are given by name.
    """
    src_pages: dict[str | None, np.ndarray] = {}
    dst_pages: dict[str, np.ndarray] = {}
    positions: tuple[dict[str | None, int], ...] = ({}, {}, {})
    names = pairing.space_names
    for k, space in enumerate(names, start=number * len(names)):
        src_offset, src_count, dst_offset, dst_count, *window = windows[7 * k : 7 * k + 7]
        src_pages[space] = ids[src_offset : src_offset + src_count]
        dst_pages[space] = ids[dst_offset : dst_offset + dst_count]
        for by_space, value, usual in zip(positions, window, _WHOLE, strict=True):
            if value != usual:
                by_space[space] = value
    start, dst_start, num_tokens = positions
    null_page = {space: nulls[k] for k, space in enumerate(names, start=number * len(names)) if nulls and k in nulls}
    return Request(src_pages, dst_pages, start or 0, dst_start or None, num_tokens or None, null_page or None)


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


def _null_id(page: Any, space: str) -> int:
    what = f"null_page[{quoted(space)}]"
    if isinstance(page, bool) or not isinstance(page, (int, np.integer)):
        raise PlanError(f"{what} must be a page id, an integer, not {shown(page)}")
    if not -(1 << 63) <= page < 1 << 63:
        raise PlanError(f"{what} is {shown(int(page))}; it must be a page id, which has 64 bits")
    return int(page)


def _refuse_unused(window: tuple[int, int, int]) -> None:
    """PlanError: ints are the positions of a list that several spaces may share, and there is none."""
    given = [f"{what} {value}" for what, value, usual in zip(POSITIONS, window, _WHOLE, strict=True) if value != usual]
    raise PlanError(
        f"{given[0]} belongs to no list: all lists in src_pages are given by name. Give positions by name too, as "
        f"{given[0].split()[0]}={{destination space: tokens}}"
    )


def _window(src_start: Any, dst_start: Any, num_tokens: Any) -> tuple[int, int, int]:
    return (
        _position(src_start, "src_start"),
        -1 if dst_start is None else _position(dst_start, "dst_start"),
        -1 if num_tokens is None else _position(num_tokens, "num_tokens"),
    )


def _position(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        form = "an integer" if "[" in what else "an integer, or a dict {destination space: integer}"
        raise PlanError(f"{what} must be {form}, not {shown(value)}")
    if not 0 <= value < 1 << 62:
        raise PlanError(f"{what} is {shown(int(value))}; it must be 0 or more and below 2**62")
    return int(value)
