"""The tables of a pairing: all that is known of a peer before a request comes, as plain data."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from ..errors import PairingError, listed, quoted
from ..layout import Layout, Memory, Region
from ..layout.region import INT64_END
from ..ops.backend import send
from .overlap import shared_spaces
from .slices import Slice


class Room:
    """Memory for one call of the op: the page ids of a request, and the words that say what came of it."""

    __slots__ = ("info", "info_tensor", "pages", "pages_tensor")

    def __init__(self, page_ids: int, words: int) -> None:
        self.pages, self.info = np.zeros(page_ids, np.int64), np.zeros(words, np.int64)
        self.pages_tensor, self.info_tensor = torch.from_numpy(self.pages), torch.from_numpy(self.info)


class PairingTables:
    """The tables for one (source rank, destination rank). `kvplan.Pairing` adds the methods that plan with them.

    Attributes:
        entries: torch int64 [E, 6]: src_base, src_stride, dst_base, dst_stride, nbytes, group. Bases are the bit
            patterns of unsigned 64-bit addresses. Ordered by segment.
        groups: torch int64 [G, 12], struct Group in csrc/entry.h.
        spaces: torch int64 [S, 8], struct Space in csrc/entry.h, in the order of `space_names`.
        bounds: torch int64 [segments + 1]: the entry at which each segment begins, and E.
        tables: int64 [T]: a header and the four above in one tensor, as the op takes it. The others are views of it.
        regions: for each entry the (source, destination) regions that it moves: one pair, or several neighbours.
        space_names: the destination spaces that are written.
        src_spaces: for each of them, the space that numbers its source pages.
        narrowest: for each of them, the source and the destination region with the fewest pages. They bound page ids.
        segment_memories: for each segment, the source memory and the destination memory.
        src, dst: the two layouts.
        only_layers: the layers that `Pairing.layers` has kept; None where it has not been called.

    Raises:
        PairingError: one destination space would take source pages of two spaces, or of two page sizes.
    """

    def __init__(self, src: Layout, dst: Layout, slices: Sequence[Slice]) -> None:
        self.src, self.dst = src, dst
        self.dst_spaces = frozenset(dst.spaces)
        order = {memories: None for memories in (piece.memories for piece in slices)}
        self.segment_memories: tuple[tuple[Memory, Memory], ...] = tuple(order)
        rank = {memories: number for number, memories in enumerate(order)}
        slices = sorted(slices, key=lambda piece: rank[piece.memories])
        self.regions = tuple(piece.regions for piece in slices)
        used = {piece.space for piece in slices}
        self.space_names: tuple[str, ...] = tuple(space for space in dst.spaces if space in used)
        self._number = {space: k for k, space in enumerate(self.space_names)}
        rules: dict[tuple[int, ...], int] = {}
        rows = []
        for piece in slices:
            group = rules.setdefault((self._number[piece.space], *piece.rule), len(rules))
            rows.append((piece.src_base, piece.src_stride, piece.dst_base, piece.dst_stride, piece.nbytes, group))
        #: For each destination space that shares memory with another: the first of those, and a shift; `shared_spaces`.
        self.domains: dict[str, tuple[str, int]] = {}
        if len(self.space_names) > 1:
            self.domains = shared_spaces(dst, src.by_key.keys() & dst.by_key.keys())
        spaces = self._space_rows()
        # For each space written: tokens that a source page covers.
        self.src_tokens = {space: row[1] for space, row in zip(self.space_names, spaces, strict=True)}
        self.unequal_src_tokens = len(set(self.src_tokens.values())) > 1
        self.many_src_spaces = len(set(self.src_spaces.values())) > 1
        counts = np.bincount([rank[piece.memories] for piece in slices], minlength=len(order))
        sizes = (len(rows), len(rules), len(spaces), len(order))
        bounds = (0, *np.cumsum(counts).tolist())
        words = [*sizes, *_flat(rows), *_flat(rules), *_flat(spaces), *bounds]
        self.only_layers: frozenset[int] | None = None
        self._set_words(torch.from_numpy(np.array(words, np.uint64).view(np.int64)))

    def set_tables(
        self, entries: torch.Tensor, groups: torch.Tensor, spaces: torch.Tensor, bounds: torch.Tensor
    ) -> None:
        """Put other tables in the place of these."""
        parts = (entries, groups, spaces, bounds)
        sizes = torch.tensor([len(entries), len(groups), len(spaces), len(bounds) - 1])
        self._set_words(torch.cat([sizes, *(part.reshape(-1) for part in parts)]))

    def _set_words(self, words: torch.Tensor) -> None:
        self.tables = words
        sizes = words[:4].tolist()
        parts = words[4:].split([6 * sizes[0], 12 * sizes[1], 8 * sizes[2], sizes[3] + 1])
        self.entries, self.groups = parts[0].view(-1, 6), parts[1].view(-1, 12)
        self.spaces, self.bounds = parts[2].view(-1, 8), parts[3]
        #: At place k, rooms for 2**k page ids, kept between requests. A thread takes a room, and puts it back.
        self.rooms: list[list[Room]] = [[] for _ in range(64)]
        self._tables_on: dict[torch.device, tuple[torch.Tensor, torch.Event]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles, without rooms: array and tensor of a room are one memory, and a copy has two."""
        return self.__dict__ | {"rooms": [[] for _ in self.rooms], "_tables_on": {}}

    def _space_rows(self) -> list[tuple[int, ...]]:
        """Rows of struct Space; fills `src_spaces` and `narrowest`."""
        members: dict[str, list[tuple[Region, Region]]] = {space: [] for space in self.space_names}
        for pair in _flat(self.regions):
            members[pair[1].space].append(pair)
        self.src_spaces: dict[str, str] = {}
        self.narrowest: list[tuple[Region, Region]] = []
        rows: list[tuple[int, ...]] = []
        for space, pairs in members.items():
            _check_one_source_list(space, [region for region, _ in pairs])
            source = min((region for region, _ in pairs), key=lambda region: region.num_pages)
            destination = min((region for _, region in pairs), key=lambda region: region.num_pages)
            self.narrowest.append((source, destination))
            self.src_spaces[space] = source.space
            row: list[int] = []
            for narrowest, regions in zip((source, destination), zip(*pairs, strict=True), strict=True):
                tokens: int = narrowest.tokens  # type: ignore[assignment]  # of a layout: filled in
                # Interleaved lists must start at a virtual page.
                align = tokens if any(region.interleave for region in regions) else 1
                row += (narrowest.num_pages, tokens, align)
            rows.append(tuple(row))
        return [row + self._shared(number, row) for number, row in enumerate(rows)]

    def _shared(self, number: int, row: tuple[int, ...]) -> tuple[int, int]:
        """The last two words of struct Space: with whom a space shares memory."""
        if len(self.space_names) == 1:
            return number, 0
        space, limit = self.space_names[number], row[3]
        first, shift = self.domains.get(space, (space, 0))
        if shift + limit >= INT64_END:
            raise PairingError(f"space {quoted(space)}: its pages, counted with those of {quoted(first)}, pass 64 bits")
        sharing = (name for name in self.space_names if self.domains.get(name, (name, 0))[0] == first)
        return self._number[next(sharing)], shift

    def tables_on(self, device: torch.device) -> torch.Tensor:
        """`tables` on a device. They are copied there once."""
        if device.type == "cpu":
            return self.tables
        module = torch.get_device_module(device.type)
        stream = module.current_stream(device)
        if device not in self._tables_on:
            tables, event = send(self.tables, device), module.Event()
            event.record(stream)
            self._tables_on[device] = (tables, event)
        tables, event = self._tables_on[device]
        if not event.query():
            stream.wait_event(event)  # another stream may be copying them
        return tables

    def destination(self, space: str) -> Region:
        """The destination region whose num_pages bounds the page ids of `space`."""
        return self.narrowest[self._number[space]][1]

    def by_page(self, entry: int) -> bool:
        """Whether an entry moves whole pages, or the same heads of whole pages: then its indices are page ids."""
        _, compression, *sides = self.groups[int(self.entries[entry, 5])].tolist()
        source, destination = self.regions[entry][0]
        return sides == [1, 0, 1, 1, 1] * 2 and compression == source.tokens == destination.tokens

    def step(self, entry: int) -> int:
        """Tokens that an entry moves as one: those of a page, of a row, or of a run of rows."""
        return int(self.groups[int(self.entries[entry, 5]), 1])

    def __repr__(self) -> str:
        sizes = f"{len(self.entries)} entries, {len(self.groups)} groups"
        return f"{type(self).__name__}({sizes}, spaces: {listed(self.space_names)})"


def _flat(rows: Iterable[Iterable[Any]]) -> Iterable[Any]:
    return itertools.chain.from_iterable(rows)


def _check_one_source_list(space: str, sources: Sequence[Region]) -> None:
    """A destination space takes one list of source pages, so all its source regions must be addressed alike."""
    first = sources[0]
    for region in sources:
        if region.space != first.space:
            raise PairingError(
                f"space {quoted(space)}: source {first} is numbered by space {quoted(first.space)}, {region} by "
                f"{quoted(region.space)}; a destination space takes one list of source pages"
            )
        if region.tokens != first.tokens:
            raise PairingError(
                f"space {quoted(space)}: source {first} covers {first.tokens} tokens a page and {region} "
                f"{region.tokens}; a destination space takes one list of source pages"
            )
