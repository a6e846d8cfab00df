"""Plans: tables of descriptors, cut into segments, and the requests they are made for."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from .. import ops
from ..layout import Layout, Memory
from ..pairing import PairingTables
from . import forms
from .packed import PIECE, Packed, pack
from .segment import Segment

_FEW = 64  # descriptors whose lengths are listed as they are


_Memories: TypeAlias = "Sequence[tuple[Memory, Memory]]"  # of each segment: source, destination
Start: TypeAlias = "int | Mapping[str | None, int]"  # tokens: one number, or one for each destination space
Cuts: TypeAlias = "tuple[tuple[Segment, ...], Sequence[Sequence[int]]]"  # Plan.segments and Plan.offsets


def cuts_of(memories: _Memories, info: Sequence[int], requests: int) -> Cuts:
    """(segments, offsets) of a Plan from the words of an op's info. Segments without descriptors are left out."""
    segments, offsets = [], []
    at = 5  # after the status
    for src, dst in memories:
        cuts = list(info[at : at + requests + 1])
        at += requests
        if cuts[-1] > cuts[0]:
            segments.append(Segment(src, dst, cuts[0], cuts[-1]))
            offsets.append(cuts)
    return tuple(segments), offsets


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of `Pairing.plan` for one request of a batch; see there."""

    src_pages: Any
    dst_pages: Any
    src_start: Start = 0
    dst_start: Start | None = None
    num_tokens: Start | None = None
    null_page: int | Mapping[str, int] | None = None


def lists_of(table: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """The rows of a table as lists of non-negative ints. Stretches of equal lengths share one int."""
    src, dst = table[:2].view(np.uint64)
    # A memoryview lists itself twice as fast as an array does.
    return src.data.tolist(), dst.data.tolist(), _lengths(table[2])


def _lengths(nbytes: np.ndarray) -> list[int]:
    """`nbytes.tolist()`, sooner where there are few different lengths behind one another."""
    count = len(nbytes)
    if count < _FEW:
        return nbytes.data.tolist()
    stops = np.flatnonzero(nbytes[1:] != nbytes[:-1])
    if 8 * len(stops) > count:
        return nbytes.data.tolist()
    lengths: list[int] = []
    start = 0
    for stop in [*(stops + 1).tolist(), count]:
        lengths += [int(nbytes[start])] * (stop - start)
        start = stop
    return lengths


class Plan:
    """Which bytes go where: `table`, torch int64 [3, N], rows src address, dst address, nbytes.

    Addresses are unsigned; the table holds their bit patterns. Descriptors are ordered by segment, then entry, then
    position in the request.

    Args:
        table: int64 [3, N], on the CPU.
        segments: cut the N descriptors, in order and without gaps.
        src_layout, dst_layout: the layouts the addresses belong to, where known; engines check against them.
        offsets: for each segment, where the descriptors of each request begin, and where the last one's end: a list of
            requests + 1 numbers a segment. Default: one request.
        requests: how many requests it holds.
    """

    #: What it was made of, for `entry_cuts`: the pairing, the windows and how many page ids there were.
    work: tuple[PairingTables, Sequence[int], int] | None = None

    def __init__(
        self,
        table: torch.Tensor,
        segments: Sequence[Segment],
        src_layout: Layout | None = None,
        dst_layout: Layout | None = None,
        offsets: Sequence[Sequence[int]] | None = None,
        requests: int = 1,
    ) -> None:
        self.table = table
        self.src_layout = src_layout
        self.dst_layout = dst_layout
        self.requests = requests
        segments = tuple(segments)
        self._cuts: Cuts = segments, [[s.start, s.stop] for s in segments] if offsets is None else offsets
        self._info: tuple[_Memories, Sequence[int], int] | None = None

    @classmethod
    def of_info(
        cls, table: torch.Tensor, memories: _Memories, info: Sequence[int], src: Layout, dst: Layout, requests: int
    ) -> Plan:
        """A plan whose segments are still the words of an op's info. They are made when somebody asks for them."""
        plan = cls.__new__(cls)
        plan.table, plan.src_layout, plan.dst_layout, plan.requests = table, src, dst, requests
        plan._info = memories, info, requests
        return plan

    def _segments_and_offsets(self) -> Cuts:
        info = self._info
        if info is not None:
            self._cuts = cuts_of(*info)
            self._info = None  # after the cuts, for threads that ask at the same time
        return self._cuts

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Cuts of the descriptors by kinds of memory, in order and without gaps."""
        return self._segments_and_offsets()[0]

    @property
    def offsets(self) -> Sequence[Sequence[int]]:
        """For each segment, where the descriptors of each request begin, and where the last one's end."""
        return self._segments_and_offsets()[1]

    def entry_cuts(self) -> list[int]:
        """Where the descriptors of each entry of the pairing begin, and where the last one's end: E + 1 numbers.

        Entry k, of the source and destination regions `pairing.regions[k]`, has descriptors cuts[k] to cuts[k + 1] - 1.

        Raises:
            ValueError: this is no plan of one request, as `Pairing.plan` makes them on the CPU.
        """
        if self.work is None or self.requests != 1:
            raise ValueError("only a plan that Pairing.plan made on the CPU can be cut by entries")
        pairing, windows, num_pages = self.work
        job, _ = ops.prepare(pairing.tables, windows, num_pages)
        groups = len(pairing.groups)
        lists = job[ops.SIZES :][: 7 * (groups + 1)].view(-1, 7)  # struct List in csrc/job.h, and where the last ends
        pairs = lists[:, 0].diff().numpy()
        entries = pairing.entries.numpy()
        ends = np.cumsum(entries[:, 4] * pairs[entries[:, 5]])  # bytes of the plan up to the end of each entry
        cuts = np.searchsorted(np.cumsum(self.table[2].numpy()), ends, side="right")
        return [0, *cuts.tolist()]

    def __len__(self) -> int:
        return self.table.shape[1]

    def __repr__(self) -> str:
        parts = ", ".join(f"{len(s)} {s.src_memory}->{s.dst_memory}" for s in self.segments)
        return f"Plan({len(self)} descriptors, {self.total_bytes} bytes: {parts or 'empty'})"

    @property
    def src(self) -> torch.Tensor:
        """Source addresses, torch uint64 [N], a view."""
        return self.table[0].view(torch.uint64)

    @property
    def dst(self) -> torch.Tensor:
        """Destination addresses, torch uint64 [N], a view."""
        return self.table[1].view(torch.uint64)

    @property
    def nbytes(self) -> torch.Tensor:
        """Bytes of each descriptor, torch uint64 [N], a view."""
        return self.table[2].view(torch.uint64)

    @property
    def total_bytes(self) -> int:
        """Bytes moved in all."""
        # Halves apart: int64 holds the sum of either.
        high, low = int((self.table[2] >> 32).sum()), int((self.table[2] & 0xFFFFFFFF).sum())
        return (high << 32) + low

    def explain(self, engine: Any = None, *, op: str = "write", staging: Any = None) -> str:
        """In words: descriptors and bytes of each segment, and how large the descriptors are.

        Args:
            engine: an `engines.Engine`: say too which descriptors it would send by way of staging with pack="auto", and
                where tiny ones would go straight for want of staging.
            op: "write" or "read", as for `submit`.
            staging: an `engines.Staging`, or None where `submit` is given none.
        """
        lines = [f"{len(self)} descriptors, {self.total_bytes} bytes"]
        for segment in self.segments:
            sizes = Counter(self.table[2, segment.start : segment.stop].tolist())
            total = sum(size * count for size, count in sizes.items())
            lines.append(
                f"segment {segment.src_memory} -> {segment.dst_memory}: descriptors {segment.start} to "
                f"{segment.stop - 1} ({len(segment)}), {total} bytes"
            )
            common = sizes.most_common(4)
            rest = len(sizes) - len(common)
            text = ", ".join(f"{count} of {size} bytes" for size, count in common)
            lines.append(f"  {text}" + (f", and {rest} other sizes" if rest else ""))
        if engine is not None:
            lines += engine.explain_routes(self, op=op, staging=staging)
        return "\n".join(lines)

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """(src, dst, nbytes) as Python lists of non-negative ints, for engines that take no arrays."""
        return lists_of(self.table.numpy())

    def pieces(self, most: int) -> Iterator[tuple[list[int], list[int], list[int]]]:
        """`lists()` in pieces of at most `most` descriptors, in order, whatever their segments.

        Each piece reuses the memory of the one before, once that is dropped: one list of 500,000 takes twice as long.
        """
        if most < 1:
            raise ValueError(f"most is {most}; it must be at least 1")
        table = self.table.numpy()
        for start in range(0, len(self), most):
            yield lists_of(table[:, start : start + most])

    def indices(self) -> tuple[torch.Tensor, torch.Tensor]:
        """This plan as numbers in the lists of `Pairing.prepared`, as NIXL's `make_prepped_xfer` takes them.

        Returns:
            (source, destination), each torch int32 [P], a pair of numbers for each page that moves: by entry, then by
            position. A run of pages is not merged here.

        Raises:
            PlanError: rows move, not whole pages; or the numbers do not fit into int32.
            ValueError: this is no plan of one request, as `Pairing.plan` makes them on the CPU.
        """
        cuts = self.entry_cuts()
        assert self.work is not None  # entry_cuts has looked
        return forms.indices(self.work[0], self.table.numpy(), cuts)

    def strided(self) -> tuple[torch.Tensor, list[int]]:
        """This plan as strided lists: descriptors of one length that follow one another at equal steps become one item.

        Returns:
            (items, cuts). items: torch int64 [6, M]: source address, destination address (bit patterns of unsigned
            ones), bytes of each descriptor, source stride, destination stride, count. Strides are positive, or 0 where
            the count is 1. Descriptor k of an item, k < count, is (source + k * source stride, destination + k *
            destination stride, bytes); the descriptors of all items, in order, are those of the plan, in its order.
            cuts: items cuts[s] to cuts[s + 1] - 1 are those of segment s. No item crosses two.
        """
        return forms.strided(self.table.numpy(), [segment.stop for segment in self.segments])

    def packed(self, op: str = "write", piece: int = PIECE) -> Packed:
        """This plan by way of staging: local copies, and fewer descriptors for the engine. Nothing moves yet.

        Byte k of the plan, in plan order, is byte k of staging. Nothing is merged over the beginning of a region of the
        peer's, whose memory may be registered apart.

        Args:
            op: "write": gather here, then write into the peer. "read": read from the peer, then scatter here.
            piece: bytes of a piece, at most.

        Raises:
            PlanError: a descriptor of a plan made by hand passes 64 bits, or all together pass 2^63 bytes.
            ValueError: `op` or `piece` is none.
        """
        table, segments = self._to_pack()
        remote = self.src_layout if op == "read" else self.dst_layout
        return pack(table, op, piece, segments, None if remote is None else remote.bases)

    def _to_pack(self) -> tuple[torch.Tensor, tuple[Segment, ...]]:
        """The table where it lies, and its segments."""
        return self.table, self.segments

    def request(self, number: int) -> Plan:
        """The descriptors of one request of a batch, a plan of their own (a view where there is one segment)."""
        if not 0 <= number < self.requests:
            raise IndexError(f"request {number} is not one of the {self.requests} of this plan")
        parts, segments, at = [], [], 0
        for segment, cuts in zip(self.segments, self.offsets, strict=True):
            start, stop = cuts[number], cuts[number + 1]
            if stop > start:
                parts.append(self.table[:, start:stop])
                segments.append(dataclasses.replace(segment, start=at, stop=at + stop - start))
                at += stop - start
        table = parts[0] if len(parts) == 1 else torch.cat([self.table[:, :0], *parts], dim=1)
        return Plan(table, segments, self.src_layout, self.dst_layout)

    def chunks(self, max_descriptors: int) -> Iterator[Plan]:
        """Cuts of at most `max_descriptors`, each within one segment, in order; views, no copies."""
        if max_descriptors < 1:
            raise ValueError(f"max_descriptors is {max_descriptors}; it must be at least 1")
        for segment in self.segments:
            for start in range(segment.start, segment.stop, max_descriptors):
                stop = min(start + max_descriptors, segment.stop)
                part = dataclasses.replace(segment, start=0, stop=stop - start)
                yield Plan(self.table[:, start:stop], (part,), self.src_layout, self.dst_layout)
