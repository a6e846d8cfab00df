"""The reason why a request is refused, in words: region, space, position and value."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from ..errors import PlanError, quoted
from ..pairing import PairingTables


def refusal(pairing: PairingTables, facts: Sequence[int], pages: np.ndarray, windows: Sequence[int]) -> PlanError:
    """The error for a status (Code in csrc/entry.h), in words; it names the request where there are several."""
    error = _of_request(pairing, facts, pages, windows)
    alone = len(windows) <= 7 * len(pairing.space_names)
    return error if alone else PlanError(f"request {facts[1]}: {error}")


def _of_request(pairing: PairingTables, facts: Sequence[int], pages: np.ndarray, windows: Sequence[int]) -> PlanError:
    code, request, space, position, value = facts[:5]
    where = f"space {quoted(pairing.space_names[space])}"
    source, destination = pairing.narrowest[space]
    src_tokens, dst_tokens = source.tokens, destination.tokens
    at = 7 * (request * len(pairing.space_names) + space)
    window = windows[at + 4 : at + 7]
    if code == 11:  # the tables alone may be at fault, with no request given
        return PlanError(
            f"{where}: an address, a position or the number of descriptors does not fit in 64 bits ({source}, entry "
            f"{position}, src_start, dst_start and num_tokens {window})"
        )
    if code == 12:
        return PlanError(f"the plan has {value} descriptors, and there is room for {position}")
    if code == 13:
        return PlanError("tables, job, page ids and info were not made for the same planning call")
    src_start, dst_start, num_tokens = window
    if code == 1:
        return PlanError(
            f"{where}: source page id {value} at position {position} is out of range: {source} has pages 0 to "
            f"{source.num_pages - 1}"
        )
    if code == 2:
        return PlanError(
            f"{where}: destination page id {value} at position {position} is out of range: {destination} has pages "
            f"0 to {destination.num_pages - 1}"
        )
    if code == 3:
        first = _first_place(pairing, value, pages, windows, request, space)
        return PlanError(
            f"{where}: destination page {value} is given twice, at positions {first} and {position}; {destination} "
            f"would be overwritten"
        )
    if code == 4:
        return PlanError(
            f"{where}: the length of the source list is {position} pages, but {num_tokens} tokens take {value} pages "
            f"of {src_tokens} tokens ({source})"
        )
    if code == 6:
        # A chunk that begins inside a page seems to be one page longer. That is the cause, not the length.
        step = _least_move(pairing, space)
        if (src_start - dst_start) % step:
            code, value = 8, step
    if code in (5, 6):
        exact = "exactly" if code == 5 else "at least"
        given = f"from token {dst_start}" if code == 6 else "without dst_start"
        hint = ". If the list begins at the request's first token, pass dst_start=0" if position > value else ""
        return PlanError(
            f"{where}: the length of the destination list is {position} pages, but the tokens sent take {exact} "
            f"{value} pages of {dst_tokens} tokens {given} ({destination}){hint}"
        )
    if code == 8:
        return PlanError(
            f"{where}: the chunk's start is not aligned: src_start {src_start} and dst_start {dst_start} must differ "
            f"by a multiple of {value} tokens, the smallest unit that can be copied ({source})"
        )
    side, start, region = ("src", src_start, source) if code == 9 else ("dst", dst_start, destination)
    start = src_start if start < 0 else start
    return PlanError(
        f"{where}: {side}_start {start} must be a multiple of {value} tokens, the virtual page of {region}, whose rows "
        f"are interleaved"
    )


def _least_move(pairing: PairingTables, space: int) -> int:
    """Tokens that move as one: a page where any entry of the space moves whole pages, else a row or a run of rows."""
    steps = [1]
    for number, regions in enumerate(pairing.regions):
        if regions[0][1].space == pairing.space_names[space]:
            steps.append(pairing.step(number))
    return max(steps)


def _first_place(
    pairing: PairingTables, page: int, pages: np.ndarray, windows: Sequence[int], request: int, space: int
) -> str:
    """Where a destination page was given first: in the same list, or where another space or request writes it."""
    spaces = len(pairing.space_names)
    at = 7 * (request * spaces + space)
    offset, count = windows[at + 2 : at + 4]
    places = np.flatnonzero(pages[offset : offset + count] == page)
    if len(places) > 1:
        return f"{places[0]}"
    rows = pairing.spaces.tolist()
    domain, shift = rows[space][6:]
    sharing = [number for number, row in enumerate(rows) if row[6] == domain]
    for earlier, other in itertools.product(range(request + 1), sharing):
        if (earlier, other) >= (request, space):
            break
        at = 7 * (earlier * spaces + other)
        _, src_count, offset, count, src_start, dst_start, num_tokens = windows[at : at + 7]
        _, src_tokens, _, _, dst_tokens, _, _, other_shift = rows[other]
        there = page + shift - other_shift
        sent = num_tokens if num_tokens >= 0 else src_count * src_tokens
        ahead = src_start - dst_start if dst_start >= 0 else 0
        first, stop = max(ahead, 0) // dst_tokens, -(-(ahead + sent) // dst_tokens) if sent else 0
        places = np.flatnonzero(pages[offset + first : offset + max(min(stop, count), first)] == there)
        if len(places):
            text = f"{first + places[0]}"
            if other != space:
                name = quoted(pairing.space_names[other])
                text += f" of space {name} (page {there} there, in the same memory)"
            return text + (f" of request {earlier}" if earlier != request else "")
    return "unknown"  # the ids have changed since they were checked
