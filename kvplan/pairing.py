"""Regions of two layouts become the entry table: everything that is known before a request comes."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import backend as _backend
from . import explain as _explain
from . import plan as _plan
from .errors import PairingError
from .layout import Heads, Layout, Memory, Region
from .overlap import first_overlap

if TYPE_CHECKING:
    from .device import Planner


@dataclasses.dataclass(frozen=True)
class _Slice:
    """What one pair of regions moves: an entry whose group is still spelled out."""

    src_base: int
    src_stride: int
    dst_base: int
    dst_stride: int
    nbytes: int
    space: str
    rule: tuple[int, ...]  # row of the group table behind its space number; see Group in csrc/entry.h
    memories: tuple[Memory, Memory]
    regions: tuple[tuple[Region, Region], ...]


def pair(src: Layout, dst: Layout, *, allow_unsent: Iterable[str] = ()) -> Pairing:
    """Match source with destination regions by (name, layer), once per peer.

    Args:
        src: layout of this prefill rank.
        dst: layout of the decode rank. Its regions without a source are left alone.
        allow_unsent: names of source regions that may have no destination. Names that this layout lacks are fine, so
            every pipeline stage can be given the same.

    Raises:
        PairingError: a source region has no destination, a pair cannot be moved row for row, or two destination
            regions overlap. It names the regions and the reason.
    """
    if not isinstance(src, Layout) or not isinstance(dst, Layout):
        raise TypeError(f"pair takes two Layouts, not {type(src).__name__} and {type(dst).__name__}")
    if isinstance(allow_unsent, str):
        raise TypeError(f"allow_unsent takes a collection of names: ({allow_unsent!r},)")
    unsent = set(allow_unsent)
    for region in src.regions:
        if region.key not in dst.by_key and region.name not in unsent:
            raise PairingError(
                f"source {region} has no destination: the decode layout holds no region of that name and layer. Name "
                f"it in allow_unsent if it is not meant to be sent"
            )
    _check_destinations(dst, [dst.by_key[region.key] for region in src.regions if region.key in dst.by_key])
    index, count = src.replica
    mine = {key for number, key in enumerate(sorted(src.by_key)) if number % count == index}
    slices = []
    for region in src.regions:
        other = dst.by_key.get(region.key)
        if other is not None:
            piece = _slice(region, other)
            if piece is not None and region.key in mine:
                slices.append(piece)
    return Pairing(src, dst, _join_neighbours(slices))


def _check_destinations(dst: Layout, written: Sequence[Region]) -> None:
    """No byte of a written region may belong to another region, or it would be written twice, or unasked."""
    clash = first_overlap(dst.regions, {region.key for region in written})
    if clash is not None:
        raise PairingError(f"destination {clash[0]} and {clash[1]} overlap in memory")


def _slice(src: Region, dst: Region) -> _Slice | None:
    """The entry of one pair of regions, or None where this source owes this destination nothing."""
    src_heads, dst_heads = _heads(src, dst)
    low, high = max(src_heads.start, dst_heads.start), min(src_heads.stop, dst_heads.stop)
    whole = (
        src_heads == dst_heads
        and (src.tokens, src.rows, src.interleave) == (dst.tokens, dst.rows, dst.interleave)
        and (src.row_bytes == dst.row_bytes or not (src.row_bytes and dst.row_bytes))
        and (src.page_bytes == dst.page_bytes or 0 < src.row_bytes == dst.row_bytes)  # type: ignore[operator]
    )
    if not whole:
        _check_rows(src, dst, src_heads, dst_heads)
    if low >= high:
        return None
    if whole:
        # A page is one row: see Side in csrc/entry.h. Where only the padding differs, the rows move without it.
        nbytes = src.page_bytes if src.page_bytes == dst.page_bytes else src.rows * src.row_bytes  # type: ignore
        side = (1, 0, 1, 1, 1)
        return _Slice(
            src.base, src.page_stride, dst.base, dst.page_stride, nbytes, dst.space,  # type: ignore[arg-type]
            (src.tokens, *side, *side), (src.memory, dst.memory), ((src, dst),),  # type: ignore[arg-type]
        )  # fmt: skip
    head_bytes = src.row_bytes // (src_heads.stop - src_heads.start)  # type: ignore[operator]
    src_stride, src_side = _side(src)
    dst_stride, dst_side = _side(dst)
    return _Slice(
        src.base + (low - src_heads.start) * head_bytes, src_stride,
        dst.base + (low - dst_heads.start) * head_bytes, dst_stride,
        (high - low) * head_bytes, dst.space, (src.compression, *src_side, *dst_side),
        (src.memory, dst.memory), ((src, dst),),
    )  # fmt: skip


def _heads(src: Region, dst: Region) -> tuple[Heads, Heads]:
    """Head ranges of both, in one total; a region that names none holds all of the other's."""
    total = src.heads.total if src.heads else dst.heads.total if dst.heads else 1
    src_heads, dst_heads = src.heads or Heads(0, total, total), dst.heads or Heads(0, total, total)
    if src_heads.total != dst_heads.total:
        raise PairingError(f"{src}: source counts {src_heads.total} heads in all, destination {dst_heads.total}")
    return src_heads, dst_heads


def _check_rows(src: Region, dst: Region, src_heads: Heads, dst_heads: Heads) -> None:
    """Both sides must mean the same by a row: tokens it stands for, bytes of each head."""
    if src.compression != dst.compression:
        raise PairingError(
            f"{src}: a source row stands for {src.compression} tokens, a destination row for {dst.compression} "
            f"(source {_geometry(src)}; destination {_geometry(dst)})"
        )
    for side, region in (("source", src), ("destination", dst)):
        if not region.row_bytes:
            raise PairingError(
                f"{src}: pages differ (source {_geometry(src)}; destination {_geometry(dst)}) and rows of the {side} "
                f"cannot be told apart; give row_bytes if a page ends in padding"
            )
    src_count, dst_count = src_heads.stop - src_heads.start, dst_heads.stop - dst_heads.start
    if src.row_bytes * dst_count != dst.row_bytes * src_count or src.row_bytes % src_count:  # type: ignore[operator]
        raise PairingError(
            f"{src}: {src.row_bytes} bytes a row for {src_count} heads on the source, {dst.row_bytes} for {dst_count} "
            f"on the destination; give row_bytes if a page ends in padding"
        )


def _geometry(region: Region) -> str:
    text = f"{region.page_bytes} bytes, {region.tokens} tokens, {region.rows} rows a page"
    return text + (f", rank {region.interleave.rank} of {region.interleave.size}" if region.interleave else "")


def _side(region: Region) -> tuple[int, tuple[int, ...]]:
    """(stride in bytes, Side of csrc/entry.h): pages and rows counted in the largest step that divides both.

    Without padding that step is one row. With padding it is less, and rows are several steps apart.
    """
    step = math.gcd(region.page_stride, region.row_bytes)  # type: ignore[arg-type]
    interleave = region.interleave
    size, rank = (interleave.size, interleave.rank) if interleave else (1, 0)
    page_step, row_step = region.page_stride // step, region.row_bytes // step  # type: ignore[operator]
    return step, (size, rank, region.rows, page_step, row_step)  # type: ignore[return-value]


def _join_neighbours(slices: list[_Slice]) -> list[_Slice]:
    """Slices that lie side by side within one stride on both sides become one: a page of many layers moves at once.

    Only within a stride: then both are parts of one buffer, so no descriptor reaches over two registrations.
    """
    alike: dict[tuple[Any, ...], list[_Slice]] = {}
    for piece in slices:
        key = (piece.src_stride, piece.dst_stride, piece.space, piece.rule, piece.memories)
        alike.setdefault(key, []).append(piece)
    place = {id(piece): number for number, piece in enumerate(slices)}
    joined: list[tuple[int, _Slice]] = []
    for pieces in alike.values():
        pieces.sort(key=lambda piece: piece.src_base)
        for neighbours in _chains(pieces):
            nbytes = sum(piece.nbytes for piece in neighbours)
            regions = tuple(itertools.chain.from_iterable(piece.regions for piece in neighbours))
            where = min(place[id(piece)] for piece in neighbours)
            joined.append((where, dataclasses.replace(neighbours[0], nbytes=nbytes, regions=regions)))
    return [piece for _, piece in sorted(joined, key=lambda item: item[0])]


def _chains(pieces: Sequence[_Slice]) -> Iterator[list[_Slice]]:
    """Cuts slices, sorted by source and of equal strides, into longest chains that touch on both sides."""
    chain: list[_Slice] = []
    src = dst = 0  # where the next piece would touch
    for piece in pieces:
        if chain and (piece.src_base, piece.dst_base) == (src, dst) and _one_buffer(chain[0], piece):
            chain.append(piece)
        else:
            if chain:
                yield chain
            chain = [piece]
        src, dst = piece.src_base + piece.nbytes, piece.dst_base + piece.nbytes
    if chain:
        yield chain


def _one_buffer(first: _Slice, last: _Slice) -> bool:
    """Whether both lie within one stride of buffers that show a stride, which a buffer of one page does not."""
    within = last.src_base + last.nbytes - first.src_base <= min(first.src_stride, first.dst_stride)
    return within and all(region.num_pages > 1 for piece in (first, last) for region in piece.regions[0])


def _flat(rows: Iterable[Sequence[int]]) -> Iterable[int]:
    return itertools.chain.from_iterable(rows)


class Pairing:
    """The tables for one (source rank, destination rank): made by `pair`, used for every request.

    Attributes:
        entries: torch int64 [E, 6]: src_base, src_stride, dst_base, dst_stride, nbytes, group. Bases are the bit
            patterns of unsigned 64-bit addresses. Ordered by segment.
        groups, spaces, bounds: rows of Group and Space (csrc/entry.h), and the entry at which each segment begins.
        tables: all of these behind a header in one int64 tensor, as the op takes them; the others are views of it.
        regions: per entry, the (source, destination) regions it moves: one pair, or several neighbours.
        src, dst: the two layouts.
    """

    def __init__(self, src: Layout, dst: Layout, slices: Sequence[_Slice]) -> None:
        self.src, self.dst = src, dst
        self.dst_spaces = frozenset(dst.spaces)
        order = {memories: None for memories in (piece.memories for piece in slices)}
        self.segment_memories: tuple[tuple[Memory, Memory], ...] = tuple(order)
        rank = {memories: number for number, memories in enumerate(order)}
        slices = sorted(slices, key=lambda piece: rank[piece.memories])
        self.regions = tuple(piece.regions for piece in slices)
        used = {piece.space for piece in slices}
        self.space_names: tuple[str, ...] = tuple(space for space in dst.spaces if space in used)
        number = {space: k for k, space in enumerate(self.space_names)}
        rules: dict[tuple[int, ...], int] = {}
        rows = []
        for piece in slices:
            group = rules.setdefault((number[piece.space], *piece.rule), len(rules))
            rows.append((piece.src_base, piece.src_stride, piece.dst_base, piece.dst_stride, piece.nbytes, group))
        spaces = self._spaces()
        self.unequal_src_tokens = len({row[1] for row in spaces}) > 1
        self.many_src_spaces = len(set(self.src_spaces.values())) > 1
        counts = np.bincount([rank[piece.memories] for piece in slices], minlength=len(order))
        sizes = (len(rows), len(rules), len(spaces), len(order))
        bounds = (0, *np.cumsum(counts).tolist())
        words = [*sizes, *_flat(rows), *_flat(rules), *_flat(spaces), *bounds]
        self.tables = torch.from_numpy(np.array(words, np.uint64).view(np.int64))
        parts = self.tables[4:].split([6 * sizes[0], 12 * sizes[1], 6 * sizes[2], sizes[3] + 1])
        self.entries, self.groups = parts[0].view(-1, 6), parts[1].view(-1, 12)
        self.spaces, self.bounds = parts[2].view(-1, 6), parts[3]
        self._tables_on: dict[torch.device, tuple[torch.Tensor, torch.Event]] = {}

    def tables_on(self, device: torch.device) -> torch.Tensor:
        """`tables` on a device: copied there once."""
        if device.type == "cpu":
            return self.tables
        module = torch.get_device_module(device.type)
        stream = module.current_stream(device)
        if device not in self._tables_on:
            tables, event = _backend.send(self.tables, device), module.Event()
            event.record(stream)
            self._tables_on[device] = (tables, event)
        tables, event = self._tables_on[device]
        if not event.query():
            stream.wait_event(event)  # another stream may be copying them
        return tables

    def _spaces(self) -> list[tuple[int, ...]]:
        table = []
        self.src_spaces: dict[str, str] = {}  # per destination space: who numbers its source pages
        self.narrowest: list[tuple[Region, Region]] = []  # per space: the regions whose num_pages bound its page ids
        for space in self.space_names:
            pairs = [pair for regions in self.regions for pair in regions if pair[1].space == space]
            first = pairs[0][0]
            for region, _ in pairs:
                if region.space != first.space:
                    raise PairingError(
                        f"space {space!r}: source {first} is numbered by space {first.space!r}, {region} by "
                        f"{region.space!r}; a destination space takes one list of source pages"
                    )
                if region.tokens != first.tokens:
                    raise PairingError(
                        f"space {space!r}: source {first} covers {first.tokens} tokens a page and {region} "
                        f"{region.tokens}; a destination space takes one list of source pages"
                    )
            source = min((region for region, _ in pairs), key=lambda region: region.num_pages)
            destination = min((region for _, region in pairs), key=lambda region: region.num_pages)
            self.narrowest.append((source, destination))
            self.src_spaces[space] = source.space
            src_align = source.tokens if any(region.interleave for region, _ in pairs) else 1
            dst_align = destination.tokens if any(region.interleave for _, region in pairs) else 1
            table.append(
                (source.num_pages, source.tokens, src_align, destination.num_pages, destination.tokens, dst_align)
            )
        return table  # type: ignore[return-value]

    def destination(self, space: str) -> Region:
        """The destination region whose num_pages bounds the page ids of `space`."""
        return self.narrowest[self.space_names.index(space)][1]

    def __repr__(self) -> str:
        return f"Pairing({len(self.entries)} entries, {len(self.groups)} groups, spaces={self.space_names})"

    def whole(self, entry: int) -> bool:
        """Whether an entry moves whole pages, not rows: then a row is a page (see Side in csrc/entry.h)."""
        source, destination = self.regions[entry][0]
        compression = int(self.groups[int(self.entries[entry, 5]), 1])
        return compression == source.tokens == destination.tokens and source.heads == destination.heads

    def explain(self) -> str:
        """In words: which region goes where, under which space and rule, what was merged, what is left alone."""
        return _explain.pairing_text(self)

    def plan(
        self,
        src_pages: Any,
        dst_pages: Any,
        *,
        src_start: int = 0,
        dst_start: int | None = None,
        num_tokens: int | None = None,
        backend: str | None = None,
    ) -> _plan.Plan:
        """The transfer plan of one request, or of one chunk of it.

        Args:
            src_pages: page ids of the source, int32 or int64 [P], in request order: a torch tensor, a NumPy array,
                anything with DLPack, or a list. Or {destination space: such an array}: a space given by name pairs its
                rows one to one, free of token positions; the key None gives the list for all other spaces. Where a
                list is on a GPU the plan is made there, on the current stream, without waiting: see DevicePlan in
                kvplan/device.py.
            dst_pages: {space: page ids}; an array alone where the destination layout has one space.
            src_start: position in the request of the first token of src_pages[0].
            dst_start: the same of dst_pages[0]. By default both lists start together and cover the same tokens, each
                rounded up to its own page. When given, dst_pages is the request's list from dst_start on and must
                cover what is sent.
            num_tokens: valid tokens from src_start on; by default all that src_pages covers.
            backend: one that must do it, or fail (see kvplan/backend.py). "reference" always can, slowly.

        Returns:
            Plan: complete; an empty one where this rank owes the peer nothing.

        Raises:
            PlanError: the request cannot be planned whole. Names region, space, position and value.
            ValueError: `backend` is not the one in use.
        """
        return _plan.make(self, src_pages, dst_pages, src_start, dst_start, num_tokens, backend)

    def planner(
        self,
        requests: Iterable[_plan.Request],
        *,
        device: torch.device | str | None = None,
        pinned: bool = False,
        backend: str | None = None,
    ) -> Planner:
        """Plan requests on a GPU more than once, as with CUDA graphs, or straight into pinned memory for an engine.

        Args:
            requests: as `plan_batch` takes them. Lists on the GPU are read anew by each run; others are copied there.
            device: by default where the lists are.
            pinned: whether the table is pinned host memory, which the kernels write themselves.
            backend: as for `plan`.

        Raises:
            PlanError: lengths or positions do not fit; or no list is on a GPU, and no device is given.
            ValueError: `backend` is not the one in use.
        """
        gather, count = _plan.gathered(self, requests)
        try:
            where = gather.device if device is None else torch.empty(0, device=device).device  # with its index
        except (AssertionError, RuntimeError) as error:
            raise _plan.PlanError(f"cannot plan on {device}: {str(error).splitlines()[0]}") from None
        if where is None:
            raise _plan.PlanError("no list is on a GPU: say on which device to plan")
        if backend is not None:
            _backend.check_in_use(backend, where.type)
        return gather.planner(count, where, pinned)

    def plan_batch(self, requests: Iterable[_plan.Request], *, backend: str | None = None) -> _plan.Plan:
        """One plan for many requests (or chunks) to this peer, in one op call.

        Args:
            requests: `kvplan.Request`s, whose fields are the arguments of `plan`. No two may write one page.
            backend: as for `plan`.

        Returns:
            Plan: by segment, then request, then entry, then position; `Plan.offsets` says where each request lies, and
            `Plan.request(k)` gives the k-th as a plan of its own.

        Raises:
            PlanError: as `plan`, with the number of the request.
        """
        return _plan.make_batch(self, requests, backend)
