"""The slow oracle: a transfer plan from its definition, one token and one row at a time, in plain Python integers.

It shares no code and no shortcut with what it checks: no entry table, no index groups, no strides per run. A region is
anything with the attributes of `kvplan.Region`, a layout anything with `regions` and `replica`, a page list anything
that yields integers.

Words used here: a *pair* is a source region and the destination region of the same name and layer; the *start* of a
page list is the token position of its first token; a row's *position* counts rows from the start of the list that it
is seen through; a row *covers* as many tokens as the region's compression.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..errors import PlanError
from .reference_pairs import Pair, compression, interleave, pairs_of, run_rows
from .reference_requests import Request, null_at, num_sent, requests_of, tokens_sent

Triple = tuple[int, int, int]


def plan(*arguments: Any, **named: Any) -> list[Triple]:
    """The bytes a right plan moves, as `(dst_addr, src_addr, nbytes)` in canonical form (see `canonical`).

    Arguments and errors are those of `moves`.
    """
    found = moves(*arguments, **named)
    return canonical((dst, src, nbytes) for _, moved in found for src, dst, nbytes in moved)


def descriptors(*arguments: Any, entries: Iterable[Iterable[tuple[str, int]]] = (), **named: Any) -> list[Triple]:
    """The descriptors of the same plan, as `(src_addr, dst_addr, nbytes)`, in the order every back end must give.

    By segment (pairs of source and destination memory, in order of first appearance), then entry in the order of the
    source layout, then position. Adjacent moves of one entry are merged into one
    descriptor if both addresses are contiguous: whole pages, and rows that lie side by side.

    `entries` names regions, by (name, layer), that are moved as one because they lie side by side in each page: a list
    for each entry. A pair that moves in several pieces is named once for each. A pair that is not named is entries of
    its own. All other arguments and errors are those of `moves`.
    """
    found = moves(*arguments, **named)
    shared: dict[Any, list[int]] = {}
    for number, keys in enumerate(entries):
        for key in keys:
            shared.setdefault(key, []).append(number)
    together: dict[Any, list[tuple[Pair, list[Triple]]]] = {}
    for number, (pair, moved) in enumerate(found):
        own = shared.get((pair.src.name, pair.src.layer))
        together.setdefault(own.pop(0) if own else (number,), []).append((pair, moved))

    segments: dict[Any, list[Triple]] = {}
    for members in together.values():
        members.sort(key=lambda member: member[0].src.base)
        src, dst = members[0][0].src.memory, members[0][0].dst.memory
        segment = segments.setdefault((src.kind, src.device, dst.kind, dst.device), [])
        by_position = zip(*(moved for _, moved in members), strict=True)
        segment.extend(_joined(move for position in by_position for move in position))
    return [descriptor for segment in segments.values() for descriptor in segment]


def _joined(descriptors: Iterable[Triple]) -> list[Triple]:
    """The same `(src_addr, dst_addr, nbytes)` in the same order, one that continues the last merged into it."""
    merged: list[Triple] = []
    for src, dst, nbytes in descriptors:
        if merged:
            last_src, last_dst, last_nbytes = merged[-1]
            if last_src + last_nbytes == src and last_dst + last_nbytes == dst:
                merged[-1] = (last_src, last_dst, last_nbytes + nbytes)
                continue
        merged.append((src, dst, nbytes))
    return merged


def canonical(triples: Iterable[Triple]) -> list[Triple]:
    """Sort `(dst_addr, src_addr, nbytes)` by destination, then merge neighbours that touch on both sides."""
    merged: list[Triple] = []
    for dst, src, nbytes in sorted(triples):
        if merged:
            last_dst, last_src, last_nbytes = merged[-1]
            if last_dst + last_nbytes == dst and last_src + last_nbytes == src:
                merged[-1] = (last_dst, last_src, last_nbytes + nbytes)
                continue
        merged.append((dst, src, nbytes))
    return merged


def moves(
    src_layout: Any,
    dst_layout: Any,
    src_pages: Any,
    dst_pages: Any,
    *,
    src_start: Any = 0,
    dst_start: Any = None,
    num_tokens: Any = None,
    null_page: Any = None,
    allow_unsent: Iterable[Any] = (),
) -> list[tuple[Pair, list[Triple]]]:
    """For each piece of each pair, `(src_addr, dst_addr, nbytes)` of every page or row that moves, by position.

    A pair is one piece where whole pages move, or rows with all their heads. Where heads do not lie side by side on
    both sides, each head is a piece of its own. Where ranks hold tokens in runs, see `_rows`.

    Arguments are those of `kvplan.pair` and `Pairing.plan`. Raises PairingError where the two layouts do not fit, and
    PlanError where the page lists or positions do not.
    """
    pairs = pairs_of(src_layout, dst_layout, allow_unsent)
    given = {"src_start": src_start, "dst_start": dst_start, "num_tokens": num_tokens, "null_page": null_page}
    requests = requests_of(pairs, dst_layout, src_pages, dst_pages, **given)
    for pair in pairs:
        _check_request(pair, requests[pair.dst.space])
    for space, request in requests.items():
        seen = set()
        for position, page in enumerate(request.dst_pages):
            if page in seen and not request.is_null(page):
                raise PlanError(f"space {space!r}: destination page {page} is given twice, again at {position}")
            seen.add(page)
    _refuse_twice(src_layout, dst_layout, [(pairs, requests)])
    for pair in pairs:
        request = requests[pair.dst.space]
        for token in () if request.null is None else tokens_sent(pair, request):
            (src_null, at), (dst_null, _) = null_at(pair, request, token)
            if src_null != dst_null:
                side = "source" if src_null else "destination"
                raise PlanError(f"{pair}: token {token} is in the null page of the {side} alone, position {at}")
    return [(pair, moved) for pair in pairs for moved in _walk(pair, requests[pair.dst.space])]


def check_batch(src_layout: Any, dst_layout: Any, requests: Iterable[Mapping[str, Any]]) -> None:
    """PlanError where requests, whose fields are arguments of `moves`, would write one physical page twice."""
    pairs = pairs_of(src_layout, dst_layout, [region.name for region in src_layout.regions])
    _refuse_twice(src_layout, dst_layout, [(pairs, requests_of(pairs, dst_layout, **given)) for given in requests])


def _blocks(region: Any) -> list[tuple[int, int]]:
    """(offset, bytes) of what a page takes: all of it, or where its rows lie apart, each head of each row."""
    if region.row_stride is None and region.head_stride is None:
        return [(0, region.page_bytes)]
    pair = Pair(region, region)
    return [(pair.place(region, *cell), pair.per_head(region)) for cell in pair.cells()]


def _refuse_twice(src_layout: Any, dst_layout: Any, batch: list[tuple[list[Pair], dict[str, Request]]]) -> None:
    """Compare the memory of all pages that are written, of every destination region of their space."""
    sent = {(region.name, region.layer) for region in src_layout.regions}
    spans = []
    for number, (pairs, requests) in enumerate(batch):
        for space, request in requests.items():
            pair = next(pair for pair in pairs if pair.dst.space == space)
            places = {(token - request.dst_start) // pair.dst.tokens for token in tokens_sent(pair, request)}
            for place in sorted(places):
                page = request.dst_pages[place] if place < len(request.dst_pages) else request.null
                if page is None or request.is_null(page):
                    continue
                for region in dst_layout.regions:
                    if region.space == space:
                        memory = region.memory.kind, region.memory.device
                        about = number, space, page, place, (region.name, region.layer) in sent
                        for start, nbytes in _blocks(region):
                            start += region.base + page * region.page_stride
                            spans.append((*memory, start, start + nbytes, *about))
    open_spans: list[Any] = []
    for span in sorted(spans):
        open_spans = [other for other in open_spans if other[:2] == span[:2] and other[3] > span[2]]
        for other in open_spans:
            if other[4:6] != span[4:6] and (other[-1] or span[-1]):
                first, last = sorted(f"page {s[6]} at {s[7]} of space {s[5]!r}, request {s[4]}" for s in (other, span))
                raise PlanError(f"one destination page is given twice: {first}, and {last}")
        open_spans.append(span)


def _check_request(pair: Pair, request: Request) -> None:
    src, dst = pair.src, pair.dst
    sent = num_sent(pair, request)
    # Tokens that the destination list covers before the first of the source list; below 0, so many are not sent.
    before = request.src_start - request.dst_start
    if sent < 0 or request.src_start < 0 or request.dst_start < 0:
        raise PlanError(f"{pair}: token positions and counts are not negative")

    need = _pages_for(sent, src.tokens)
    if len(request.src_pages) != need:
        raise PlanError(f"{pair}: source list has length {len(request.src_pages)}, {sent} tokens need {need}")
    need = _pages_for(before + sent, dst.tokens)
    if len(request.dst_pages) < need or (request.exact and len(request.dst_pages) != need):
        raise PlanError(f"{pair}: destination list has length {len(request.dst_pages)}, {sent} tokens need {need}")

    step = dst.tokens if pair.alike() or _head_major(pair) else _unit(pair) * compression(dst)
    if before % step:
        raise PlanError(f"{pair}: lists that start {before} tokens apart, not a multiple of {step}")
    for region, start in ((src, request.src_start), (dst, request.dst_start)):
        if region.interleave is not None and start % region.tokens:
            raise PlanError(f"{pair}: an interleaved list starts at {start}, not a multiple of {region.tokens}")

    for region, pages, side in ((src, request.src_pages, "source"), (dst, request.dst_pages, "destination")):
        for position, page in enumerate(pages):
            if not 0 <= page < region.num_pages and not request.is_null(page):
                raise PlanError(
                    f"{pair}: {side} page {page} at position {position} is out of range, {region.num_pages} pages"
                )


def _pages_for(tokens: int, tokens_per_page: int) -> int:
    pages = 0
    while pages * tokens_per_page < tokens:
        pages += 1
    return pages


# --------------------------------------------------------------------------------------------------- what is moved


def _walk(pair: Pair, request: Request) -> list[list[Triple]]:
    """For each piece, what moves: token by token over what is sent, each new page (or row) seen is moved once."""
    if pair.alike():
        return [list(_whole_pages(pair, request))]
    if _head_major(pair):
        return [list(_head_pages(pair, request, heads)) for heads in _side_by_side(pair, range(pair.src.rows))]
    return _rows(pair, request)


def _tokens(pair: Pair, request: Request, step: int) -> Iterator[int]:
    """The first token sent of every `step` tokens, counted from the start; none of a null page."""
    last = None
    for token in tokens_sent(pair, request):
        position = (token - request.src_start) // step
        if position != last and not null_at(pair, request, token)[0][0]:
            last = position
            yield token


def _pages(pair: Pair, request: Request) -> Iterator[tuple[int, int]]:
    """Addresses of the pages that hold each page of tokens."""
    src, dst = pair.src, pair.dst
    for token in _tokens(pair, request, src.tokens):
        src_page = request.src_pages[(token - request.src_start) // src.tokens]
        dst_page = request.dst_pages[(token - request.dst_start) // dst.tokens]
        yield src.base + src_page * src.page_stride, dst.base + dst_page * dst.page_stride


def _whole_pages(pair: Pair, request: Request) -> Iterator[Triple]:
    """Pages, padding and rows of tokens that are not sent included."""
    src, dst = pair.src, pair.dst
    nbytes = src.page_bytes if src.page_bytes == dst.page_bytes else src.rows * src.row_bytes
    for src_addr, dst_addr in _pages(pair, request):
        yield src_addr, dst_addr, nbytes


def _head_major(pair: Pair) -> bool:
    """Whether pages of as many tokens hold the rows of a head behind one another on both sides."""
    if not pair.same_pages():
        return False
    heads = pair.heads_in_common() or [pair.heads(pair.src)[0]]
    return not pair.heads_in_common() or pair.adjacent([(row, heads[0]) for row in range(pair.src.rows)])


def _side_by_side(pair: Pair, rows: Iterable[int]) -> list[list[int]]:
    """Heads in common, cut where the one's rows do not end where the next one's begin, on both sides."""
    heads = pair.heads_in_common()
    first, last = min(rows), max(rows)
    per_head = pair.per_head(pair.src)
    together = all(
        pair.place(region, first, pair.heads(region)[0]) + per_head + pair.place(region, last, pair.heads(region)[0])
        == pair.place(region, first, pair.heads(region)[0] + 1) + pair.place(region, first, pair.heads(region)[0])
        for region in (pair.src, pair.dst)
    )
    return [heads] if together else [[head] for head in heads]


def _head_pages(pair: Pair, request: Request, heads: list[int]) -> Iterator[Triple]:
    """All rows of these heads, page by page."""
    nbytes = len(heads) * pair.src.rows * pair.per_head(pair.src)
    for src_page, dst_page in _pages(pair, request):
        src_addr = src_page + pair.place(pair.src, 0, heads[0])
        yield src_addr, dst_page + pair.place(pair.dst, 0, heads[0]), nbytes


def _unit(pair: Pair) -> int:
    """Rows that move together: as many as divide every run, and the rows of a page on both sides."""
    runs = [run_rows(region) for region in (pair.src, pair.dst) if region.interleave is not None]
    rows = (pair.src.rows, pair.dst.rows)
    return next(n for n in range(min(rows), 0, -1) if not any(k % n for k in (*runs, *rows))) if runs else 1


def _rows(pair: Pair, request: Request) -> list[list[Triple]]:
    """Every unit of rows that both sides hold, the same heads of it.

    Pieces are ordered by head, then by row of a unit where a unit is no block of memory, then by where in a run of the
    source, then of the destination, a unit lies.
    """
    unit = _unit(pair)
    step = unit * compression(pair.src)
    pieces: dict[Any, list[Triple]] = {}
    wheres = _meetings(pair, unit)
    for heads in _side_by_side(pair, [0]):
        first = [(row, head) for row in range(unit) for head in heads]
        block = unit == 1 or (pair.adjacent(first) if pair.src.rows > 1 else True)
        for row in [0] if block else range(unit):
            for where in wheres:
                moved = pieces.setdefault((heads[0], row, where), [])
                for token in _tokens(pair, request, step):
                    here = _row_address(
                        pair, pair.src, request.src_pages, (token - request.src_start) // step, unit, row, heads[0]
                    )
                    there = _row_address(
                        pair, pair.dst, request.dst_pages, (token - request.dst_start) // step, unit, row, heads[0]
                    )
                    if here is not None and there is not None and (here[1], there[1]) == where:
                        nbytes = len(heads) * pair.per_head(pair.src) * (unit if block else 1)
                        moved.append((here[0], there[0], nbytes))
    return list(pieces.values())


def _meetings(pair: Pair, unit: int) -> list[tuple[int, int]]:
    """Where in their runs the two sides hold one unit: all that occur, or else the first."""
    (src_size, src_rank, _), (dst_size, dst_rank, _) = interleave(pair.src), interleave(pair.dst)
    src_run, dst_run = (max(run_rows(region) // unit, 1) for region in (pair.src, pair.dst))
    if src_run == dst_run == 1:
        return [(0, 0)]
    found = set()
    for position in range(math.lcm(src_size * src_run, dst_size * dst_run)):
        if position // src_run % src_size == src_rank and position // dst_run % dst_size == dst_rank:
            found.add((position % src_run, position % dst_run))
    return sorted(found) or [(0, 0)]


def _row_address(
    pair: Pair, region: Any, pages: list[int], position: int, unit: int, row: int, head: int
) -> tuple[int, int] | None:
    """Address of one row of the unit at this position, and where in its run the unit lies. None: it is not held."""
    size, rank, _ = interleave(region)
    run = max(run_rows(region) // unit, 1)
    if position // run % size != rank:
        return None
    local = (position // (run * size) * run + position % run) * unit + row
    page = pages[local // region.rows]
    return region.base + page * region.page_stride + pair.place(region, local % region.rows, head), position % run
