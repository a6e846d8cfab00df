"""The slow oracle: a transfer plan from its definition, one token and one row at a time, in plain Python integers.

It shares no code and no shortcut with what it checks: no entry table, no index groups, no strides per run. A region is
anything with the attributes of `kvplan.Region`, a layout anything with `regions` and `replica`, a page list anything
that yields integers.

Words used here: a *pair* is a source region and the destination region of the same name and layer; the *start* of a
page list is the token position of its first token; a row's *position* counts rows from the start of the list that it
is seen through; a row *covers* as many tokens as the region's compression.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PairingError, PlanError

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

    `entries` names regions, by (name, layer), that are moved as one because they lie side by side in each page. Every
    other pair is an entry of its own. All other arguments and errors are those of `moves`.
    """
    found = moves(*arguments, **named)
    shared = {key: number for number, keys in enumerate(entries) for key in keys}
    together: dict[Any, list[tuple[_Pair, list[Triple]]]] = {}
    for pair, moved in found:
        key = (pair.src.name, pair.src.layer)
        together.setdefault(shared.get(key, key), []).append((pair, moved))

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


# ---------------------------------------------------------------------------------------------------------- pairing


@dataclass(frozen=True)
class _Pair:
    src: Any
    dst: Any

    def __str__(self) -> str:
        return f"region ({self.src.name!r}, layer {self.src.layer})"

    def total_heads(self) -> int:
        """Of how many heads both sides speak; 1 where neither tells heads apart."""
        for region in (self.src, self.dst):
            if region.heads is not None:
                return int(region.heads.total)
        return 1

    def heads(self, region: Any) -> tuple[int, int]:
        """First head held, and the head after the last."""
        return (0, self.total_heads()) if region.heads is None else (region.heads.start, region.heads.stop)

    def heads_in_common(self) -> list[int]:
        """Heads held on both sides, ascending."""
        there = range(*self.heads(self.dst))
        return [head for head in range(*self.heads(self.src)) if head in there]

    def alike(self) -> bool:
        """Whether both sides lay out a page in the same way, so that pages move whole."""
        return (
            self.src.tokens == self.dst.tokens
            and self.src.rows == self.dst.rows
            and _interleave(self.src) == _interleave(self.dst)
            and self.heads(self.src) == self.heads(self.dst)
        )


def _interleave(region: Any) -> tuple[int, int]:
    return (1, 0) if region.interleave is None else (region.interleave.size, region.interleave.rank)


def _compression(region: Any) -> int:
    size, _ = _interleave(region)
    tokens_per_row, left = divmod(region.tokens, region.rows * size)
    if left or tokens_per_row < 1:
        raise PairingError(
            f"region ({region.name!r}, layer {region.layer}): {region.rows} rows in {size} ranks cannot share "
            f"{region.tokens} tokens"
        )
    return int(tokens_per_row)


def _pairs(src_layout: Any, dst_layout: Any, allow_unsent: Iterable[str]) -> list[_Pair]:
    """Pairs that this source sends something of, in the order of the source layout. All pairs are checked.

    Page lists are checked only for these pairs: this source owes the others nothing.
    """
    partners = {(region.name, region.layer): region for region in dst_layout.regions}
    index, count = src_layout.replica
    number = {key: k for k, key in enumerate(sorted((r.name, r.layer) for r in src_layout.regions))}
    unsent = set(allow_unsent)
    pairs = []
    for region in src_layout.regions:
        key = (region.name, region.layer)
        if key not in partners:
            if region.name in unsent:
                continue
            raise PairingError(f"region ({region.name!r}, layer {region.layer}) has no destination")
        pair = _Pair(region, partners[key])
        _check_geometry(pair)
        if number[key] % count == index and pair.heads_in_common():
            pairs.append(pair)
    return pairs


def _check_geometry(pair: _Pair) -> None:
    src, dst = pair.src, pair.dst
    if _compression(src) != _compression(dst):
        raise PairingError(f"{pair}: a row covers {_compression(src)} tokens here, {_compression(dst)} there")
    if src.heads is not None and dst.heads is not None and src.heads.total != dst.heads.total:
        raise PairingError(f"{pair}: {src.heads.total} heads in all here, {dst.heads.total} there")
    if src.row_bytes and dst.row_bytes:
        per_head = []
        for region in (src, dst):
            start, stop = pair.heads(region)
            nbytes, left = divmod(region.row_bytes, stop - start)
            if left:
                raise PairingError(f"{pair}: {region.row_bytes} bytes a row do not divide by {stop - start} heads")
            per_head.append(nbytes)
        if per_head[0] != per_head[1]:
            raise PairingError(f"{pair}: {per_head[0]} bytes a row and head here, {per_head[1]} there")
    elif not (pair.alike() and src.page_bytes == dst.page_bytes):
        raise PairingError(f"{pair}: its rows cannot be told apart, and the two sides store a page differently")


# ------------------------------------------------------------------------------------------------------- page lists


@dataclass(frozen=True)
class _Request:
    """The lists that one pair is addressed through, and what is sent of them. `exact`: both lists start together."""

    src_pages: list[int]
    dst_pages: list[int]
    src_start: int
    dst_start: int
    num_tokens: int | None
    exact: bool


def moves(
    src_layout: Any,
    dst_layout: Any,
    src_pages: Any,
    dst_pages: Any,
    *,
    src_start: int = 0,
    dst_start: int | None = None,
    num_tokens: int | None = None,
    allow_unsent: Iterable[str] = (),
) -> list[tuple[_Pair, list[Triple]]]:
    """For each pair, `(src_addr, dst_addr, nbytes)` of every page or row that moves, by position.

    Arguments are those of `kvplan.pair` and `Pairing.plan`. Raises PairingError where the two layouts do not fit, and
    PlanError where the page lists or positions do not.
    """
    pairs = _pairs(src_layout, dst_layout, allow_unsent)
    spaces = {region.space for region in dst_layout.regions}
    src_lists, dst_lists = _by_space(src_pages, dst_pages, spaces)

    requests = {}
    for pair in pairs:
        space = pair.dst.space
        if space not in dst_lists:
            raise PlanError(f"{pair} needs destination pages of space {space!r}, and none are given")
        if space in src_lists:
            requests[space] = _Request(src_lists[space], dst_lists[space], 0, 0, None, True)
        elif None in src_lists:
            exact = dst_start is None
            begin = src_start if dst_start is None else dst_start
            requests[space] = _Request(src_lists[None], dst_lists[space], src_start, begin, num_tokens, exact)
        else:
            raise PlanError(f"{pair} needs source pages for space {space!r}, and none are given")

    for pair in pairs:
        _check_request(pair, requests[pair.dst.space])
    for space, request in requests.items():
        seen = set()
        for position, page in enumerate(request.dst_pages):
            if page in seen:
                raise PlanError(f"space {space!r}: destination page {page} is given twice, again at {position}")
            seen.add(page)
    return [(pair, _walk(pair, requests[pair.dst.space])) for pair in pairs]


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


def _check_request(pair: _Pair, request: _Request) -> None:
    src, dst = pair.src, pair.dst
    sent = _num_sent(pair, request)
    before = request.src_start - request.dst_start  # tokens that the destination list covers before the first one sent
    if sent < 0 or request.src_start < 0 or request.dst_start < 0:
        raise PlanError(f"{pair}: token positions and counts are not negative")

    need = _pages_for(sent, src.tokens)
    if len(request.src_pages) != need:
        raise PlanError(f"{pair}: source list has length {len(request.src_pages)}, {sent} tokens need {need}")
    if before < 0:
        raise PlanError(f"{pair}: destination list of length {len(request.dst_pages)} starts after what is sent")
    need = _pages_for(before + sent, dst.tokens)
    if len(request.dst_pages) < need or (request.exact and len(request.dst_pages) != need):
        raise PlanError(f"{pair}: destination list has length {len(request.dst_pages)}, {sent} tokens need {need}")

    step = dst.tokens if pair.alike() else _compression(dst)
    if before % step:
        raise PlanError(f"{pair}: lists that start {before} tokens apart, not a multiple of {step}")
    for region, start in ((src, request.src_start), (dst, request.dst_start)):
        if region.interleave is not None and start % region.tokens:
            raise PlanError(f"{pair}: an interleaved list starts at {start}, not a multiple of {region.tokens}")

    for region, pages, side in ((src, request.src_pages, "source"), (dst, request.dst_pages, "destination")):
        for position, page in enumerate(pages):
            if not 0 <= page < region.num_pages:
                raise PlanError(
                    f"{pair}: {side} page {page} at position {position} is out of range, {region.num_pages} pages"
                )


def _num_sent(pair: _Pair, request: _Request) -> int:
    return len(request.src_pages) * pair.src.tokens if request.num_tokens is None else request.num_tokens


def _pages_for(tokens: int, tokens_per_page: int) -> int:
    pages = 0
    while pages * tokens_per_page < tokens:
        pages += 1
    return pages


# --------------------------------------------------------------------------------------------------- what is moved


def _walk(pair: _Pair, request: _Request) -> list[Triple]:
    """Token by token over what is sent; each new page (or row) seen is moved once."""
    move = _whole_page if pair.alike() else _row
    per_move = pair.src.tokens if pair.alike() else _compression(pair.src)
    moves = []
    last = None
    for token in range(request.src_start, request.src_start + _num_sent(pair, request)):
        position = (token - request.src_start) // per_move
        if position != last:
            last = position
            moves.extend(move(pair, request, token))
    return moves


def _whole_page(pair: _Pair, request: _Request, token: int) -> list[Triple]:
    """The page that holds `token`, padding and rows of tokens that are not sent included."""
    src, dst = pair.src, pair.dst
    src_page = request.src_pages[(token - request.src_start) // src.tokens]
    dst_page = request.dst_pages[(token - request.dst_start) // dst.tokens]
    nbytes = src.page_bytes if src.page_bytes == dst.page_bytes else src.rows * src.row_bytes
    return [(src.base + src_page * src.page_stride, dst.base + dst_page * dst.page_stride, nbytes)]


def _row(pair: _Pair, request: _Request, token: int) -> list[Triple]:
    """The row that holds `token`, as far as both sides hold it and the same heads of it."""
    src_row = _row_address(pair.src, request.src_pages, token - request.src_start)
    dst_row = _row_address(pair.dst, request.dst_pages, token - request.dst_start)
    if src_row is None or dst_row is None:
        return []
    common = pair.heads_in_common()
    src_first, src_stop = pair.heads(pair.src)
    dst_first, _ = pair.heads(pair.dst)
    per_head = pair.src.row_bytes // (src_stop - src_first)
    src_addr = src_row + (common[0] - src_first) * per_head
    dst_addr = dst_row + (common[0] - dst_first) * per_head
    return [(src_addr, dst_addr, len(common) * per_head)]


def _row_address(region: Any, pages: list[int], token: int) -> int | None:
    """Address of the row that covers `token`, counted from the start of the list; None where another rank holds it."""
    size, rank = _interleave(region)
    position = token // _compression(region)
    if position % size != rank:
        return None
    local = position // size
    page = pages[local // region.rows]
    return int(region.base + page * region.page_stride + (local % region.rows) * region.row_bytes)
