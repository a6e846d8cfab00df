"""A part of a pairing: the entries of some layers, under the same groups, spaces and checks."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TypeVar

import torch

from ..layout import Memory, Region
from .slices import slices
from .tables import PairingTables

Tables = TypeVar("Tables", bound=PairingTables)
_Rows = list[tuple[list[int], list[tuple[Region, Region]]]]


def cut(pairing: Tables, layers: Collection[int]) -> Tables:
    """See `Pairing.layers`."""
    rows: list[list[int]] = []
    regions: list[tuple[tuple[Region, Region], ...]] = []
    memories: list[tuple[Memory, Memory]] = []
    bounds = [0]
    starts = pairing.bounds.tolist()
    entries = pairing.entries.tolist()
    for number, pair in enumerate(pairing.segment_memories):
        for entry in range(starts[number], starts[number + 1]):
            for row, kept in _kept(entries[entry], pairing.regions[entry], layers):
                rows.append(row)
                regions.append(tuple(kept))
        if len(rows) > bounds[-1]:
            memories.append(pair)
            bounds.append(len(rows))
    part = copy.copy(pairing)
    part.only_layers = frozenset(layers) if part.only_layers is None else part.only_layers & frozenset(layers)
    part.regions, part.segment_memories = tuple(regions), tuple(memories)
    entry_table = torch.tensor(rows, dtype=torch.int64).view(-1, 6)
    part.set_tables(entry_table, pairing.groups, pairing.spaces, torch.tensor(bounds))
    return part


def _kept(entry: list[int], regions: Sequence[tuple[Region, Region]], layers: Collection[int]) -> _Rows:
    """What is left of one entry: itself, nothing, or of several regions side by side the stretches that stay."""
    there = [source.layer in layers for source, _ in regions]
    if all(there):
        return [(entry, list(regions))]
    rows: _Rows = []
    offset, before = 0, False
    for pair, stays in zip(regions, there, strict=True):
        piece = slices(*pair)[0]  # all pieces of a pair have as many bytes
        if stays and before:
            rows[-1][0][4] += piece.nbytes
            rows[-1][1].append(pair)
        elif stays:
            row = [_wrapped(entry[0] + offset), entry[1], _wrapped(entry[2] + offset), entry[3], piece.nbytes, entry[5]]
            rows.append((row, [pair]))
        offset, before = offset + piece.nbytes, stays
    return rows


def _wrapped(address: int) -> int:
    """The int64 with the bits of an address, which may have passed from one half to the other."""
    return (address + (1 << 63)) % (1 << 64) - (1 << 63)
