"""The requests of the slow oracle: for each space its page lists and positions, and which tokens are sent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError
from .reference_pairs import Pair


@dataclass(frozen=True)
class Request:
    """The lists that one pair is addressed through, and what is sent of them. `exact`: both lists start together.

    Sent are the tokens from src_start on, `num_tokens` or what the source list covers, but for those before dst_start.
    """

    src_pages: list[int]
    dst_pages: list[int]
    src_start: int
    dst_start: int
    num_tokens: int | None
    exact: bool
    null: int | None = None  # the id that stands for no page

    def is_null(self, page: int) -> bool:
        return self.null is not None and page == self.null


def requests_of(
    pairs: list[Pair],
    dst_layout: Any,
    src_pages: Any,
    dst_pages: Any,
    src_start: Any = 0,
    dst_start: Any = None,
    num_tokens: Any = None,
    null_page: Any = None,
) -> dict[str, Request]:
    """For each destination space that is written, its lists and positions."""
    spaces = {region.space for region in dst_layout.regions}
    src_lists, dst_lists = _by_space(src_pages, dst_pages, spaces)

    requests = {}
    for pair in pairs:
        space = pair.dst.space
        if space not in dst_lists:
            raise PlanError(f"{pair} needs destination pages of space {space!r}, and none are given")
        if space not in src_lists and None not in src_lists:
            raise PlanError(f"{pair} needs source pages for space {space!r}, and none are given")
        named = space in src_lists
        start, begin, count = (
            _position_for(space, named, given, usual)
            for given, usual in ((src_start, 0), (dst_start, None), (num_tokens, None))
        )
        pages = src_lists[space] if named else src_lists[None]
        exact = begin is None
        null = null_page.get(space) if isinstance(null_page, Mapping) else null_page
        requests[space] = Request(pages, dst_lists[space], start, start if exact else begin, count, exact, null)
    for space in null_page if isinstance(null_page, Mapping) else ():
        if space not in spaces:
            raise PlanError(f"null_page names {space!r}, and there are the spaces {sorted(spaces)}")
    if None not in src_lists:
        for given, usual in ((src_start, 0), (dst_start, None), (num_tokens, None)):
            if not isinstance(given, Mapping) and given != usual:
                raise PlanError(f"position {given} belongs to no list: all source lists are named")
    for mine in (space for space in requests if space not in src_lists):
        for other in (space for space in requests if space not in src_lists):
            if requests[mine].src_start != requests[other].src_start:
                raise PlanError(f"the one source list of {mine!r} and {other!r} cannot begin at two tokens")

    return requests


def _by_space(
    src_pages: Any, dst_pages: Any, spaces: set[str]
) -> tuple[dict[str | None, list[int]], dict[str, list[int]]]:
    """Page lists keyed by destination space; the source list that serves every space not named has the key None."""
    if not isinstance(src_pages, Mapping):
        src_pages = {None: src_pages}
    if not isinstance(dst_pages, Mapping):
        if len(spaces) != 1:
            raise PlanError(f"destination pages must be given by space: {sorted(spaces)}")
        dst_pages = dict.fromkeys(spaces, dst_pages)
    for space in [*src_pages, *dst_pages]:
        if space is not None and space not in spaces:
            raise PlanError(f"the destination has no space {space!r}, only {sorted(spaces)}")
    return (
        {space: [int(page) for page in pages] for space, pages in src_pages.items()},
        {space: [int(page) for page in pages] for space, pages in dst_pages.items()},
    )


def _position_for(space: str, named: bool, given: Any, usual: Any) -> Any:
    """What holds for a space of a position that is given: a number for all that is not named, or one for each space."""
    if not isinstance(given, Mapping):
        return usual if named else given
    if given.get(space) is not None:
        return given[space]
    return given[None] if not named and given.get(None) is not None else usual


def num_sent(pair: Pair, request: Request) -> int:
    return len(request.src_pages) * pair.src.tokens if request.num_tokens is None else request.num_tokens


def tokens_sent(pair: Pair, request: Request) -> range:
    return range(max(request.src_start, request.dst_start), request.src_start + num_sent(pair, request))


def null_at(pair: Pair, request: Request, token: int) -> tuple[tuple[bool, int], tuple[bool, int]]:
    """For each side: whether the page that holds the token is the null page, and its position."""
    src_at = (token - request.src_start) // pair.src.tokens
    dst_at = (token - request.dst_start) // pair.dst.tokens
    return (
        (request.is_null(request.src_pages[src_at]), src_at),
        (request.is_null(request.dst_pages[dst_at]), dst_at),
    )
