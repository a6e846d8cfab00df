"""Packing in torch ops: what serves tables on a GPU, and tables on the CPU where the compiled extension is missing.

`csrc/cpu/pack.cpp` does the same in one pass. Here a descriptor larger than a piece is first cut into *atoms*, each of
a piece but for the last; then a piece is always a stretch of whole atoms.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

_LEAST = -1 << 63
_MOST = (1 << 63) - 1
_MOST_PIECES = 1 << 24


def pack(
    table: torch.Tensor, cuts: Sequence[int], read: bool, piece: int, edges: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`ops.pack`."""
    _check_form(table, cuts, piece, edges)
    nbytes = table[2]
    wrong = _wrong(table)
    atoms = nbytes // piece + (nbytes % piece != 0)
    numbers = torch.arange(len(nbytes), device=table.device)
    first_wrong = torch.where(wrong, numbers, len(nbytes)).amin() if len(nbytes) else nbytes.sum()
    # Read together: the device is waited for once. The number of atoms says how long the next tensors are.
    bad, count, total = torch.stack([first_wrong, atoms.sum(), nbytes.sum()]).tolist()
    if bad < len(nbytes):
        none = table.new_zeros((3, 0))
        info = torch.zeros(len(cuts) + 1, dtype=torch.int64)
        info[0] = bad
        return none, none.clone(), table.new_zeros((3, 1)), info.to(table.device)
    if total // piece > _MOST_PIECES:
        raise RuntimeError(f"piece is {piece}; so small that {total} bytes make more than 2^24 pieces")

    owner = numbers.repeat_interleave(atoms, output_size=count)
    atom_of = torch.cat([atoms.new_zeros(1), atoms.cumsum(0)])  # the first atom of each descriptor
    within = (torch.arange(count, device=table.device) - atom_of[owner]) * piece
    src, dst, rest = table[:, owner] + torch.stack([within, within, -within])
    sizes = rest.clamp(max=piece)
    bounds = torch.tensor(list(cuts), device=table.device)
    segments = atom_of[bounds]  # the first atom of each segment
    stops = sizes.cumsum(0)
    starts = stops - sizes
    begins = _pieces(starts, stops, segments, piece, 2 * (total // piece) + len(cuts))

    remote, local = (src, dst) if read else (dst, src)
    merged_begin = begins | ~_follows(remote, sizes) | _among(remote, edges)
    copies_begin = begins | ~_follows(local, sizes)
    # The second wait: how long the results are.
    sums = [mask.sum() for mask in (copies_begin, merged_begin, begins)]
    num_copies, num_merged, num_pieces = torch.stack(sums).tolist()

    def joined(mask: torch.Tensor, number: int, address: torch.Tensor, staging_first: bool) -> torch.Tensor:
        first = torch.nonzero_static(mask, size=number)[:, 0]
        offset = starts[first]
        size = torch.cat([offset, stops[-1:]]).diff() if number else offset
        return torch.stack([offset, address[first], size] if staging_first else [address[first], offset, size])

    copies = joined(copies_begin, num_copies, local, staging_first=read)
    merged = joined(merged_begin, num_merged, remote, staging_first=not read)
    first = torch.nonzero_static(begins, size=num_pieces)[:, 0]
    ends = torch.tensor([[num_copies], [num_merged], [total]], device=table.device)
    which = torch.stack([copies_begin.cumsum(0)[first] - 1, merged_begin.cumsum(0)[first] - 1, starts[first]])
    piece_of = torch.cat([segments.new_zeros(1), begins.cumsum(0)])  # how many pieces begin before each atom
    info = torch.cat([segments.new_full((1,), -1), piece_of[segments]])
    return copies, merged, torch.cat([which, ends], dim=1), info


def _check_form(table: torch.Tensor, cuts: Sequence[int], piece: int, edges: torch.Tensor) -> None:
    if table.dtype != torch.int64 or table.dim() != 2 or table.shape[0] != 3:
        raise RuntimeError("table must be int64 [3, N], the words of a row side by side")
    if edges.dtype != torch.int64 or edges.dim() != 1:
        raise RuntimeError("edges must be a contiguous int64 tensor")
    if piece < 1:
        raise RuntimeError(f"piece is {piece}; it must be at least 1")
    if not cuts or cuts[0] != 0 or cuts[-1] != table.shape[1] or list(cuts) != sorted(cuts):
        raise RuntimeError(f"cuts must rise from 0 to the table's {table.shape[1]}")


def _wrong(table: torch.Tensor) -> torch.Tensor:
    """Which descriptors pass 64 bits. Of those behind the first, it may say anything."""
    nbytes = table[2]
    # The first sum that passes 2^63 - 1 is below 2^64, and so looks negative.
    wrong = (nbytes < 0) | (nbytes.cumsum(0) < 0)
    for address in (table[0], table[1]):
        last = address + (nbytes - 1)  # an end may be 2^64, so the last byte is looked at
        wrong |= (nbytes > 0) & (last ^ _LEAST < address ^ _LEAST)
    return wrong


def _pieces(starts: torch.Tensor, stops: torch.Tensor, segments: torch.Tensor, piece: int, most: int) -> torch.Tensor:
    """Bool [A]: with which atoms a piece begins.

    From each atom a step leads to the atom with which the next piece would begin, if one began here. Those that steps
    reach from the first are found without reading any: in each round steps become twice as long.
    """
    count = len(starts)
    reach = torch.where(starts > _MOST - piece, _MOST, starts + piece)
    fits = torch.searchsorted(stops, reach, right=True)  # the first atom that does not fit
    numbers = torch.arange(count + 1, device=starts.device)
    segment = torch.searchsorted(segments[1:].contiguous(), numbers[:-1], right=True)
    step = torch.cat([torch.minimum(fits, segments[1:][segment]), numbers[-1:]])
    reached = (numbers == 0).to(torch.int32)
    for _ in range(min(most, count).bit_length()):
        reached = reached.index_add(0, step, reached).clamp(max=1)
        step = step[step]
    return reached[:-1] != 0


def _follows(address: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Bool [A]: whether each atom begins where the one before it ends. Behind the last address nothing follows."""
    follows = torch.zeros_like(address, dtype=torch.bool)
    follows[1:] = (address[1:] == address[:-1] + sizes[:-1]) & (address[1:] != 0)
    return follows


def _among(address: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
    if not len(edges):
        return torch.zeros_like(address, dtype=torch.bool)
    order = edges ^ _LEAST  # signed words in the order of unsigned ones
    at = torch.searchsorted(order, address ^ _LEAST).clamp(max=len(edges) - 1)
    return order[at] == address ^ _LEAST
