"""Null pages, the slots of a table that hold no page, as in vLLM's window caches: left out before planning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .. import ops
from ..errors import PlanError, quoted
from ..pairing import PairingTables
from .pages import NO_PAGES
from .refusal import refusal
from .requests import PageLists

_Stretches = list[tuple[int, int]]  # of tokens: first, and the one after the last


class ShortLists(PageLists):
    """Requests whose null pages are left out.

    What is left of a list is a shorter list: on both sides the same tokens are gone, and they are whole pages there.
    The lists as they were given stand first in `lists`, so that all other windows stay as they are.
    """

    __slots__ = ("_given", "_kept")

    def __init__(self, given: PageLists) -> None:
        super().__init__(given.pairing)
        self.lists = [np.concatenate((NO_PAGES, *given.lists))]
        self.size, self.requests = given.size, given.requests
        self._given = given
        self._kept: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by window: positions of what is left of each list
        _, status = ops.prepare(self.pairing.tables, given.windows, given.size)
        facts = status.tolist()
        if facts[0]:
            raise refusal(self.pairing, facts, self.lists[0], given.windows)
        spaces = len(self.pairing.space_names)
        for number in range(self.requests * spaces):
            window = given.windows[7 * number : 7 * number + 7]
            null = (given.nulls or {}).get(number)
            if null is not None:
                try:
                    window = self._shortened(number, window, null)
                except PlanError as error:
                    alone = self.requests == 1
                    raise error if alone else PlanError(f"request {number // spaces}: {error}") from None
            self.windows += window

    def _shortened(self, number: int, window: list[int], null: int) -> list[int]:
        """The window without null pages, whose lists are appended.

        Raises:
            PlanError: a token that is sent lies in the null page of one side alone.
        """
        src_offset, src_count, dst_offset, dst_count, src_start, dst_start, num_tokens = window
        src = self.lists[0][src_offset : src_offset + src_count]
        dst = self.lists[0][dst_offset : dst_offset + dst_count]
        if not ((src == null).any() or (dst == null).any()):
            return window
        space = number % len(self.pairing.space_names)
        _, src_tokens, _, _, dst_tokens, *_ = self.pairing.spaces[space].tolist()
        dst_start = src_start if dst_start < 0 else dst_start
        end = src_start + (src_count * src_tokens if num_tokens < 0 else num_tokens)
        sent = max(src_start, dst_start), end
        gone = _null_tokens(src, null, src_start, src_tokens, *sent)
        there = _null_tokens(dst, null, dst_start, dst_tokens, *sent)
        if gone != there:
            token, of_source = _first_difference(gone, there, end)
            places = (token - src_start) // src_tokens, (token - dst_start) // dst_tokens
            raise _one_sided(
                self.pairing, space, null, token, of_source, places, (int(src[places[0]]), int(dst[places[1]]))
            )
        kept_src, kept_dst = np.flatnonzero(src != null), np.flatnonzero(dst != null)
        first = gone[0][1] if gone and gone[0][0] == sent[0] else sent[0]  # the first token that is still sent
        if first >= end:
            kept_src, where = kept_src[:0], [0, 0, 0]
        else:
            # Pages that are kept before that of `first` lie right before it now.
            src_page, dst_page = (first - src_start) // src_tokens, (first - dst_start) // dst_tokens
            src_start += (src_page - int((kept_src < src_page).sum())) * src_tokens
            dst_start += (dst_page - int((kept_dst < dst_page).sum())) * dst_tokens
            left_out = sum(stop - start for start, stop in gone if start >= first)
            where = [src_start, dst_start, end - src_start - left_out]
        self._kept[number] = kept_src, kept_dst
        return [*self._append(src[kept_src], "src_pages"), *self._append(dst[kept_dst], "dst_pages"), *where]

    def as_given(self, facts: Sequence[int], pages: np.ndarray) -> tuple[list[int], np.ndarray, Sequence[int]]:
        """Facts about a refusal, page ids and windows, as they are in the lists that the caller gave."""
        code, request, space, position, *rest = facts
        kept = self._kept.get(request * len(self.pairing.space_names) + space)
        if kept is not None and code in (1, 2, 3):
            position = int(kept[code != 1][position])
        return [code, request, space, position, *rest], pages[: self._given.size], self._given.windows


def _null_tokens(pages: np.ndarray, null: int, start: int, tokens: int, first: int, end: int) -> _Stretches:
    """Stretches of the tokens first to end - 1 that lie in null pages. Page 0 begins at token `start`."""
    places = np.flatnonzero(pages == null)
    stretches = []
    for run in np.split(places, np.flatnonzero(np.diff(places) != 1) + 1) if len(places) else ():
        low, high = max(start + int(run[0]) * tokens, first), min(start + (int(run[-1]) + 1) * tokens, end)
        if low < high:
            stretches.append((low, high))
    return stretches


def _first_difference(src: _Stretches, dst: _Stretches, end: int) -> tuple[int, bool]:
    """The first token that lies in a null page of one side alone, and whether that is the source."""
    for (src_low, src_high), (dst_low, dst_high) in zip([*src, (end, end)], [*dst, (end, end)], strict=False):
        if src_low != dst_low:
            return min(src_low, dst_low), src_low < dst_low
        if src_high != dst_high:
            return min(src_high, dst_high), src_high > dst_high
    raise AssertionError("the stretches do not differ")


def _one_sided(
    pairing: PairingTables,
    space: int,
    null: int,
    token: int,
    of_source: bool,
    places: Sequence[int],
    ids: Sequence[Any],
) -> PlanError:
    sides = [
        f"the {side} page at position {place}" for side, place in zip(("source", "destination"), places, strict=True)
    ]
    mine, other = (0, 1) if of_source else (1, 0)
    return PlanError(
        f"space {quoted(pairing.space_names[space])}: {sides[mine]} is the null page {null}, and {sides[other]}, where "
        f"token {token} lies too, is page {ids[other]}: null pages must stand for the same tokens on both sides"
    )
