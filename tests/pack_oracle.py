"""Packing from its definition, one descriptor after another, and what packed tables do to bytes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch

END = 1 << 64
Row = tuple[int, int, int]  # src, dst, nbytes


def pack(
    rows: Sequence[Row], cuts: Sequence[int], read: bool, piece: int, edges: Sequence[int]
) -> tuple[list[Row], list[Row], list[Row], list[int]]:
    """(copies, merged, pieces with the last column, info) of `ops.pack`, as rows of unsigned numbers."""
    copies: list[Row] = []
    merged: list[Row] = []
    pieces: list[Row] = []
    info = [-1]
    at = begin = 0  # bytes of staging: so many are placed, and the open piece begins here

    def new_piece() -> None:
        nonlocal begin
        pieces.append((len(copies), len(merged), at))
        begin = at

    def place(src: int, dst: int, nbytes: int) -> None:
        """One more stretch of the open piece."""
        remote, local = (src, dst) if read else (dst, src)
        for table, address, staging_first, barred in ((copies, local, read, ()), (merged, remote, not read, edges)):
            first = len(pieces) and pieces[-1][0 if table is copies else 1]
            offset, before = (0, 1) if staging_first else (1, 0)  # columns of staging's side and of the other one
            if len(table) > first and table[-1][before] + table[-1][2] == address and address not in barred:
                table[-1] = (table[-1][0], table[-1][1], table[-1][2] + nbytes)
            else:
                row = [0, 0, nbytes]
                row[offset], row[before] = at, address
                table.append((row[0], row[1], row[2]))

    for start, stop in itertools.pairwise(cuts):
        info.append(len(pieces))
        fresh = True  # the next byte begins a piece
        for number in range(start, stop):
            src, dst, nbytes = rows[number]
            if nbytes == 0:
                continue
            if max(src, dst) + nbytes > END or at + nbytes >= END // 2:
                return [], [], [(0, 0, 0)], [number, *[0] * len(cuts)]
            if not fresh and at - begin + nbytes > piece:
                fresh = True
            while nbytes:
                if fresh:
                    new_piece()
                size = min(nbytes, piece)
                place(src, dst, size)
                src, dst, nbytes, at = src + size, dst + size, nbytes - size, at + size
                fresh = nbytes > 0
    pieces.append((len(copies), len(merged), at))
    return copies, merged, pieces, [*info, len(pieces) - 1]


def unsigned(table: torch.Tensor) -> list[Row]:
    """The columns of an int64 [3, N] tensor as rows of unsigned numbers."""
    return [tuple(row) for row in table.cpu().numpy().view(np.uint64).T.tolist()]


def bits(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """int64 [3, N] of unsigned rows."""
    return torch.from_numpy(np.array(rows, dtype=np.uint64).reshape(-1, 3).T.copy().view(np.int64))


class Bytes:
    """Memory of two sides by address, bytes made up: what a plan's addresses mean, wherever they point."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.source: dict[int, int] = {}
        for src, _, nbytes in rows:
            for k in range(nbytes):
                self.source[src + k] = (src + k) * 2654435761 % 251

    def direct(self, rows: Sequence[Row]) -> dict[int, int]:
        """The bytes that the plan itself writes, by address."""
        return {dst + k: self.source[src + k] for src, dst, nbytes in rows for k in range(nbytes)}

    def by_staging(self, packed: tuple[list[Row], list[Row], list[Row]], read: bool, piece: int) -> dict[int, int]:
        """The bytes that the packed plan writes, piece by piece, each through staging of its own size alone."""
        copies, merged, pieces = packed
        written: dict[int, int] = {}
        for (c, m, at), (c_end, m_end, end) in itertools.pairwise(pieces):
            assert 0 < end - at <= piece
            staging: dict[int, int] = {}
            into, out = (merged[m:m_end], copies[c:c_end]) if read else (copies[c:c_end], merged[m:m_end])
            for src, offset, nbytes in into:
                for k in range(nbytes):
                    assert at <= offset + k < end and offset + k not in staging
                    staging[offset + k] = self.source[src + k]
            assert len(staging) == end - at
            for offset, dst, nbytes in out:
                for k in range(nbytes):
                    assert dst + k not in written
                    written[dst + k] = staging.pop(offset + k)
            assert not staging
        return written
