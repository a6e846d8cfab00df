"""Plans: the arguments of a request checked, one op call, and the table of descriptors it gives."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from . import backend, ops
from . import explain as _explain
from .errors import PlanError, shown
from .layout import Layout, Memory
from .pages import NO_PAGES, as_pages
from .refusal import refusal

if TYPE_CHECKING:
    from .device import Planner
    from .pairing import Pairing


_BY_ORACLE = backend.chosen()[0].name == "reference"


@dataclasses.dataclass(frozen=True)
class Segment:
    """Descriptors [start, stop) of a plan: all from one kind of memory to one kind."""

    src_memory: Memory
    dst_memory: Memory
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class Request:
    """Arguments of `Pairing.plan` for one request of a batch; see there."""

    src_pages: Any
    dst_pages: Any
    src_start: int = 0
    dst_start: int | None = None
    num_tokens: int | None = None


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
        self.segments = tuple(segments)
        self.src_layout = src_layout
        self.dst_layout = dst_layout
        self.requests = requests
        self.offsets = offsets if offsets is not None else [[s.start, s.stop] for s in self.segments]

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

    def explain(self) -> str:
        """In words: descriptors and bytes of each segment."""
        return _explain.plan_text(self)

    def lists(self) -> tuple[list[int], list[int], list[int]]:
        """(src, dst, nbytes) as Python lists of non-negative ints, for engines that take no arrays."""
        src, dst, nbytes = self.table.numpy().view(np.uint64)
        return src.tolist(), dst.tolist(), nbytes.tolist()

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


def make(
    pairing: Pairing,
    src_pages: Any,
    dst_pages: Any,
    src_start: int,
    dst_start: int | None,
    num_tokens: int | None,
    by: str | None,
) -> Plan:
    """`Pairing.plan`: see there."""
    if by == "reference" or (_BY_ORACLE and by is None):
        return _oracle(pairing, [Request(src_pages, dst_pages, src_start, dst_start, num_tokens)])
    gather = Gather(pairing)
    gather.add(src_pages, dst_pages, src_start, dst_start, num_tokens)
    return gather.plan(1, by)


def make_batch(pairing: Pairing, requests: Iterable[Request], by: str | None) -> Plan:
    """`Pairing.plan_batch`: see there."""
    if by == "reference" or (_BY_ORACLE and by is None):
        return _oracle(pairing, list(requests))
    gather, count = gathered(pairing, requests)
    return gather.plan(count, by)


def _oracle(pairing: Pairing, requests: list[Request]) -> Plan:
    from . import fallback  # rarely needed

    return fallback.plan(pairing, requests)


def gathered(pairing: Pairing, requests: Iterable[Request]) -> tuple[Gather, int]:
    """The arguments of requests, checked in form, and how many requests they are."""
    gather = Gather(pairing)
    count = 0
    for request in requests:
        if not isinstance(request, Request):
            raise TypeError(f"request {count} of the batch is a {type(request).__name__}, not a kvplan.Request")
        try:
            gather.add(request.src_pages, request.dst_pages, request.src_start, request.dst_start, request.num_tokens)
        except PlanError as error:
            raise PlanError(f"request {count}: {error}") from None
        count += 1
    return gather, count


class Gather:
    """The page lists and windows of requests to one peer, gathered for one op call."""

    def __init__(self, pairing: Pairing) -> None:
        self.pairing = pairing
        self.lists: list[Any] = []  # NumPy arrays, and tensors on `device`
        self.device: torch.device | None = None  # a GPU, where a list is there
        self.size = 0
        self.windows: list[int] = []

    def add(
        self, src_pages: Any, dst_pages: Any, src_start: int, dst_start: int | None, num_tokens: int | None
    ) -> None:
        """Check the form of one request's arguments and append them. What they say is checked by the op."""
        pairing = self.pairing
        if not isinstance(dst_pages, dict):
            dst_pages = _one_space(pairing, dst_pages)
        if not dst_pages.keys() <= pairing.dst_spaces:
            raise _unknown_space(pairing, dst_pages, "dst_pages")
        window = (
            _position(src_start, "src_start"),
            -1 if dst_start is None else _position(dst_start, "dst_start"),
            -1 if num_tokens is None else _position(num_tokens, "num_tokens"),
        )
        named = dict(src_pages) if isinstance(src_pages, Mapping) else None
        if named is not None and not named.keys() - {None} <= pairing.dst_spaces:
            raise _unknown_space(pairing, named, "src_pages")
        if pairing.many_src_spaces:
            _check_one_numbering(pairing, named or ())
        if num_tokens is None and pairing.unequal_src_tokens:
            _check_one_meaning(pairing, named or ())
        shared = None  # offset and length of the source list that serves all spaces
        for space in pairing.space_names:
            if space not in dst_pages:
                raise PlanError(f"dst_pages lacks space {space!r}, whose pages hold {pairing.destination(space)}")
            if named is not None and space in named:
                source, times = self._append(named[space], f"src_pages[{space!r}]"), (0, -1, -1)
            else:
                if shared is None:
                    shared = self._append(_for_others(named, space) if named is not None else src_pages, "src_pages")
                source, times = shared, window
            self.windows += source + self._append(dst_pages[space], f"dst_pages[{space!r}]") + times

    def _append(self, pages: Any, what: str) -> tuple[int, int]:
        array = as_pages(pages, what, on_device=True)
        if isinstance(array, torch.Tensor):
            if self.device not in (None, array.device):
                raise PlanError(f"{what} is on {array.device}, another list on {self.device}")
            self.device = array.device
        offset, count = self.size, len(array)
        self.lists.append(array)
        self.size += count
        return offset, count

    def plan(self, requests: int, by: str | None = None) -> Plan:
        """The plan of all `requests` gathered, by a back end; PlanError for one that is refused."""
        if by is not None:
            backend.check_in_use(by, "cpu" if self.device is None else self.device.type)
        if self.device is not None:
            return self.planner(requests, self.device, pinned=False).run()
        pairing = self.pairing
        pages = np.concatenate(self.lists) if self.lists else NO_PAGES
        table, info = ops.plan(pairing.tables, torch.from_numpy(pages), self.windows)
        facts = info.tolist()
        if facts[0]:
            raise refusal(pairing, facts, pages, self.windows)
        segments, offsets = segments_of(pairing, facts, requests if self.windows else 0)
        return Plan(table, segments, pairing.src, pairing.dst, offsets, requests)

    def planner(self, requests: int, device: torch.device, pinned: bool) -> Planner:
        """The same on a GPU; lists that are on the CPU are copied there, without waiting."""
        from .device import Planner

        lists = [
            ids if isinstance(ids, torch.Tensor) else backend.send(torch.from_numpy(np.ascontiguousarray(ids)), device)
            for ids in self.lists
        ]
        return Planner(self.pairing, lists, self.windows, requests, device, pinned)


def segments_of(pairing: Pairing, facts: Sequence[int], requests: int) -> tuple[list[Segment], list[list[int]]]:
    """(segments, offsets) of a Plan from the words of an info: those that have descriptors."""
    segments, offsets = [], []
    at = 5
    for src, dst in pairing.segment_memories:
        cuts = list(facts[at : at + requests + 1])
        at += requests
        if cuts[-1] > cuts[0]:
            segments.append(Segment(src, dst, cuts[0], cuts[-1]))
            offsets.append(cuts)
    return segments, offsets


def _one_space(pairing: Pairing, dst_pages: Any) -> dict[str, Any]:
    if isinstance(dst_pages, Mapping):
        return dict(dst_pages)
    spaces = pairing.dst.spaces
    if len(spaces) != 1:
        raise PlanError(f"dst_pages is one list, but the destination has the spaces {spaces}: give a list for each")
    return {spaces[0]: dst_pages}


def _for_others(named: Mapping[Any, Any], space: str) -> Any:
    if None not in named:
        raise PlanError(f"src_pages lacks space {space!r}, and gives no list for all others under None")
    return named[None]


def _unknown_space(pairing: Pairing, given: Mapping[Any, Any], what: str) -> PlanError:
    unknown = sorted(shown(space) for space in given if space not in pairing.dst_spaces)
    named = ", ".join(unknown[:5]) + (", ..." if len(unknown) > 5 else "")
    return PlanError(f"{what} names {named}; the destination has the spaces {pairing.dst.spaces}")


def _check_one_numbering(pairing: Pairing, named: Any) -> None:
    numbered = {name: space for name, space in pairing.src_spaces.items() if name not in named}
    if len(set(numbered.values())) > 1:
        raise PlanError(
            f"one source list serves destination spaces whose source pages are numbered by different spaces "
            f"({numbered}): give src_pages by name"
        )


def _check_one_meaning(pairing: Pairing, named: Any) -> None:
    tokens = {
        name: row[1]
        for name, row in zip(pairing.space_names, pairing.spaces.tolist(), strict=True)
        if name not in named
    }
    if len(set(tokens.values())) > 1:
        raise PlanError(
            f"one source list serves spaces whose source pages cover unequal numbers of tokens ({tokens}): give "
            f"num_tokens, or the lists by name"
        )


def _position(value: Any, what: str) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise PlanError(f"{what} must be an integer, not {shown(value)}")
    if not 0 <= value < 1 << 62:
        raise PlanError(f"{what} is {shown(int(value))}; it must be 0 or more and below 2**62")
    return int(value)
