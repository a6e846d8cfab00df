"""Inputs of the single stages, for the tests of every back end, and how results are compared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import torch

SIZES = [0, 1, 2, 31, 33, 255, 256, 257, 1023, 1024, 1025, 2049, 5000]  # around warps, blocks and tiles


def same(got: Iterable[torch.Tensor], want: Iterable[torch.Tensor]) -> None:
    """Fails unless two sequences of tensors are equal to the bit, dtypes and shapes included, wherever they lie."""
    for number, (mine, right) in enumerate(zip(got, want, strict=True)):
        assert (mine.dtype, mine.shape) == (right.dtype, right.shape), f"result {number}"
        mine, right = mine.cpu(), right.cpu()
        if not torch.equal(mine, right):
            places = (mine != right).nonzero()
            first = tuple(places[0].tolist())
            raise AssertionError(
                f"result {number}: {len(places)} words differ, the first at {first}: {mine[first]}, not {right[first]}"
            )


def words(rows: Iterable[Iterable[int]], columns: int) -> torch.Tensor:
    """int64 [N, columns] of numbers up to 2^64 - 1: addresses past 2^63 - 1 become the int64 with the same bits."""
    signed = [[value - (1 << 64) if value >= 1 << 63 else value for value in row] for row in rows]
    return torch.tensor(signed, dtype=torch.int64).reshape(-1, columns)


# ------------------------------------------------------------------------------------------------------ page_indices


def slot_table(length: int, size: int, seed: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(slots [R, >= length], rows, lengths) for `ops.page_indices`; in every second table one slot is wrong.

    Give the op slots[:, :length], whose rows do not lie side by side. Some rows and lengths name none of the table.
    """
    draw = random.Random(1000 * seed + length)
    columns, num_rows = -(-length // size), draw.randrange(1, 5)
    dtype = draw.choice([torch.int32, torch.int64])
    first = torch.tensor([[draw.randrange(1000) * size for _ in range(columns)] for _ in range(num_rows)], dtype=dtype)
    slots = first.repeat_interleave(size, dim=1) + torch.arange(columns * size, dtype=dtype) % size
    if length and draw.random() < 0.5:
        slots[draw.randrange(num_rows), draw.randrange(length)] += draw.choice([-1, 1, -100_000])
    rows = lengths = None
    if draw.random() < 0.7:
        count = draw.randrange(0, 6)
        rows = torch.tensor([draw.randrange(-1, num_rows + 1) for _ in range(count)], dtype=torch.int64)
        lengths = torch.tensor(
            [draw.choice([length, 0, length + 1, length // 2, -1]) for _ in range(count)], dtype=torch.int64
        )
    return slots, rows, lengths


def broken_slots(slots: torch.Tensor) -> Iterable[torch.Tensor]:
    """Consecutive slots, of which one is wrong: the last, one in the middle, the first."""
    for place, value in ((len(slots) - 1, -1), (len(slots) // 2, 7), (0, 6)):
        if len(slots) > 1:
            broken = slots.clone()
            broken[place] = value
            yield broken


# (slots of one page, page size, position of the first wrong one): their differences do not fit in 64 bits, or wrap.
FAR_SLOTS = [
    ([(1 << 63) - 1, -(1 << 63)], 2, 0),
    ([0, -(1 << 63)], 2, 1),
    ([-(1 << 63), (1 << 63) - 1], 2, 0),
    ([(1 << 63) - 2, (1 << 63) - 1, -(1 << 63)], 3, 2),
]


# --------------------------------------------------------------------------------------------------------- find_runs


def random_pairs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(src, dst), int64 [n]: index pairs in which runs of several lengths occur."""
    draw = random.Random(seed)
    pairs = []
    while len(pairs) < n:
        src, dst, length = draw.randrange(1 << 40), draw.randrange(1 << 40), draw.choice([1, 1, 2, 3, 40, 700])
        pairs += [(src + k, dst + k) for k in range(length)]
    table = torch.tensor(pairs[:n], dtype=torch.int64).reshape(-1, 2)
    return table[:, 0].contiguous(), table[:, 1].contiguous()


def random_cuts(n: int, lists: int, seed: int) -> torch.Tensor:
    """int64 [lists + 1]: an indptr of lists over n pairs; some lists may be empty."""
    draw = random.Random(seed)
    return torch.tensor([0, *sorted(draw.randrange(n + 1) for _ in range(lists - 1)), n])


# Each of these is refused as the indptr of nine pairs: it does not rise from 0 to 9.
MALFORMED_INDPTRS = [
    [0, 5],
    [1, 9],
    [-5, 9],
    [0, 5, 4, 9],
    [1, 5, 9],
    [0, 5, 8],
    [0, 5, 10],
    [0, 12, 9],
    [0, -1, 9],
    [0, -9, -9, 9],
]


# ------------------------------------------------------------------------------------------------------------ expand


def random_entries(groups: int, seed: int) -> torch.Tensor:
    """int64 [E, 6]: entries for `ops.expand`. E is 0, 1, 5, or 1,100, which is more than a tile."""
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.choice([0, 1, 5, 1100])):
        stride = draw.choice([8, 24, 40])
        rows.append((draw.randrange(1 << 50), stride, draw.randrange(1 << 50), stride, 8, draw.randrange(groups)))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)


STEPS = torch.tensor([[1, 1], [3, 1], [3, 5]])  # of up to three groups

# What makes an expansion malformed: words of (entries, runs, indptr, steps) that are changed, by place.
MALFORMED_EXPANSIONS: dict[str, dict[str, dict]] = {
    "a run of no pairs": {"runs": {(2, 1): 0}},
    "a run of fewer than no pairs": {"runs": {(2, 1): -3}},
    "a run of more pairs than any plan has": {"runs": {(2, 1): (1 << 40) + 1}},
    "a source run that begins below 0": {"runs": {(0, 1): -1}},
    "a destination run that begins below 0": {"runs": {(1, 1): -1}},
    "a source run that ends past 2^63": {"runs": {(0, 0): (1 << 63) - 1}},
    "a destination run that ends past 2^63": {"runs": {(1, 0): (1 << 63) - 1}},
    # 2^34 steps of 2^30 are 2^64, which is 0 in 64 bits.
    "a source run whose length wraps": {"runs": {(2, 1): (1 << 34) + 1}, "steps": {(0, 0): 1 << 30}},
    "a destination run whose length wraps": {"runs": {(2, 1): (1 << 34) + 1}, "steps": {(0, 1): 1 << 30}},
    "more runs than there are": {"indptr": {-1: 4}},
    "fewer than no runs": {"indptr": {-1: -1}},
    "an indptr that does not begin with 0": {"indptr": {0: 1}},
    "an indptr that falls": {"indptr": {1: 4}},
    "no source step": {"steps": {(0, 0): 0}},
    "no destination step": {"steps": {(0, 1): 0}},
    "a source step below 0, of a group without runs": {"steps": {(1, 0): -1}},
    "a destination step below 0, of a group without runs": {"steps": {(1, 1): -1}},
    "a group past the last": {"entries": {(-1, 5): 2}},
    "a group below 0": {"entries": {(0, 5): -1}},
    "an entry of no bytes": {"entries": {(-1, 4): 0}},
    "an entry of fewer than no bytes": {"entries": {(-1, 4): -8}},
    "an entry whose end wraps": {"entries": {(-1, 4): (1 << 63) - 1}},
    "no source stride": {"entries": {(0, 1): 0}},
    "no destination stride": {"entries": {(0, 3): 0}},
    "a source stride below 0": {"entries": {(0, 1): -8}},
    "a destination stride below 0": {"entries": {(0, 3): -8}},
    "a source stride that leads past 64 bits": {"entries": {(-1, 1): 1 << 62}},
    "a destination stride that leads past 64 bits": {"entries": {(-1, 3): 1 << 62}},
    # 512 times 2^55 is 2^64, which is 0 in 64 bits.
    "a source stride whose product wraps": {"runs": {(0, 2): 510}, "entries": {(-1, 1): 1 << 55}},
    "a destination stride whose product wraps": {"runs": {(1, 2): 510}, "entries": {(-1, 3): 1 << 55}},
    "a source base that leads past 64 bits": {"entries": {(-1, 0): -8}},
    "a destination base that leads past 64 bits": {"entries": {(-1, 2): -8}},
}


def malformed_expansion(change: str, entries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(entries, runs, indptr, steps) for `ops.expand`: so many entries, three runs and two groups, changed as named."""
    args = {
        "entries": torch.tensor([[1 << 30, 8, 1 << 40, 8, 8, 0]] * entries),
        "runs": torch.tensor([[5, 50, 500], [2, 20, 200], [3, 3, 3]]),
        "indptr": torch.tensor([0, 3, 3]),
        "steps": torch.ones(2, 2, dtype=torch.int64),
    }
    for name, changes in MALFORMED_EXPANSIONS[change].items():
        for place, value in changes.items():
            args[name][place] = value
    return args["entries"], args["runs"], args["indptr"], args["steps"]


# -------------------------------------------------------------------------------------------------------------- copy


class Copies:
    """Ranges of given sizes to copy between two buffers, at odd addresses, with bytes between them that must stay.

    Args:
        sizes: bytes of each range.
        seed: of the addresses, the bytes and the order of the ranges.
        apart: by how much source and destination address differ, modulo 16; by default any difference.
        placed: for source and destination, what takes a tensor on the CPU to the memory in which it is to lie.
    """

    GUARD = 64  # bytes between two ranges

    def __init__(
        self,
        sizes: list[int],
        seed: int,
        apart: int | None = None,
        placed: Iterable[Callable[[torch.Tensor], torch.Tensor]] = (torch.clone, torch.clone),
    ) -> None:
        draw = random.Random(seed)
        total = sum(sizes) + (self.GUARD + 32) * (len(sizes) + 1)
        noise = torch.Generator().manual_seed(seed)
        self.before = [torch.randint(0, 256, (total,), dtype=torch.uint8, generator=noise) for _ in range(2)]
        self.src, self.dst = (put(bytes_.clone()) for put, bytes_ in zip(placed, self.before, strict=True))
        self.moves, at = [], self.GUARD  # (offset in the source, offset in the destination, bytes)
        for size in sizes:
            src, dst = draw.randrange(16), draw.randrange(16)
            if apart is not None:
                dst = (self.src.data_ptr() + src + apart - self.dst.data_ptr()) % 16
            self.moves.append((at + src, at + dst, size))
            at += size + self.GUARD
        draw.shuffle(self.moves)

    def table(self, spare: int = 0) -> torch.Tensor:
        """int64 [3, N + spare] on the CPU; the spare descriptors must not be carried out."""
        rows = [(self.src.data_ptr() + src, self.dst.data_ptr() + dst, size) for src, dst, size in self.moves]
        return words([*rows, *[(1, 1, 1 << 62)] * spare], 3).T.contiguous()

    def check(self, moved: int | None = None) -> None:
        """Fails unless the first `moved` ranges were copied, by default all, and nothing else was touched."""
        src, after = self.before[0], self.before[1].clone()
        for start, end, size in self.moves[:moved]:
            after[end : end + size] = src[start : start + size]
        same([self.src, self.dst], [src, after])
