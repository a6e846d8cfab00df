"""Page allocators, and the request churn that leaves them as fragmented as a server's.

A replay takes requests in the order of their arrival. Each gets pages, gets more as it grows, and gives all of them
back when it ends; in between others come and go. The requests that the demo transfers are the last to arrive, and find
what is left: whichever pages the traffic before them gave back.
"""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

PAGE = 256  # tokens
MAX_TOKENS = 1 << 24  # of one request; more is a mistake in the trace


class OutOfPages(RuntimeError):
    """An allocator has fewer free pages than asked for."""


class PageAllocator:
    """Hands out page ids 0 .. num_pages-1 from a free list.

    `order` says which free page is next:
        "fifo": the one that has been free for longest, from a queue.
        "lifo": the one that was freed last, from a stack.
        "sorted": from a list in which freed pages are put only when it runs out, and which then is sorted; so SGLang
            keeps stretches of consecutive pages alive on both sides of a disaggregated service.
    """

    def __init__(self, num_pages: int, order: str) -> None:
        if order not in ("fifo", "lifo", "sorted"):
            raise ValueError(f"order {order!r} is none of fifo, lifo, sorted")
        self.num_pages, self.order = num_pages, order
        self._free = deque(range(num_pages))  # the next one is at the left
        self._released: list[int] = []  # free as well, but not in the list yet
        self._used = bytearray(num_pages)

    @property
    def available(self) -> int:
        return len(self._free) + len(self._released)

    def allocate(self, count: int) -> list[int]:
        """`count` page ids, in the order in which the request will use them. Raises OutOfPages, having taken none."""
        if count > self.available:
            raise OutOfPages(f"{count} pages asked for, {self.available} of {self.num_pages} are free")
        if count > len(self._free):
            self._free = deque(sorted([*self._free, *self._released]))
            self._released = []
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._used[page] = 1
        return pages

    def free(self, pages: Sequence[int]) -> None:
        """Give pages back. Raises ValueError, having freed none, when one is not allocated or named twice."""
        if len(set(pages)) != len(pages) or not all(0 <= p < self.num_pages and self._used[p] for p in pages):
            raise ValueError("a page is freed that is not allocated")
        for page in pages:
            self._used[page] = 0
        if self.order == "lifo":
            self._free.extendleft(pages)
        elif self.order == "fifo":
            self._free.extend(pages)
        else:
            self._released += pages


@dataclass(frozen=True)
class Request:
    """One request of a trace. `arrival` in milliseconds; `tokens` of the prompt; `output` tokens generated."""

    id: int
    arrival: float
    tokens: int
    output: int

    @property
    def pages(self) -> int:
        return -(-self.tokens // PAGE)


@dataclass(frozen=True)
class Life:
    """How a request holds pages: `first` of them on arrival, `step` more every `step_ms`, up to `total`, then none."""

    first: int
    step: int
    step_ms: float
    total: int


def prefill_life(request: Request) -> Life:
    """Chunked prefill under load: a request computes 512 tokens every 0.4 s, and gets the pages for them just then."""
    chunk = 512 // PAGE
    return Life(min(chunk, request.pages), chunk, 400.0, request.pages)


def decode_life(request: Request) -> Life:
    """Pages for the whole prompt at once, then one for every 256 tokens generated, at 25 ms a token."""
    total = -(-(request.tokens + request.output) // PAGE)
    return Life(request.pages, 1, 25.0 * PAGE, total)


Tables = dict[int, dict[str, list[int]]]  # request id -> space -> page ids, in the order of the request's tokens


def replay(
    requests: Iterable[Request],
    allocators: Mapping[str, PageAllocator],
    life: Callable[[Request], Life],
    keep: Iterable[Request],
) -> tuple[Tables, int]:
    """Let `requests` arrive, grow and end, then let `keep` arrive and stay.

    Args:
        requests: in the order of arrival.
        allocators: by space. A request holds the same number of pages in each; which ones, each decides for itself.
        life: `prefill_life` or `decode_life`.
        keep: one that finds too few free pages waits until others have ended.

    Returns:
        The page tables of `keep`, and how many of `requests` found too few pages and were turned away.

    Raises:
        OutOfPages: the pages do not suffice for `keep`.
    """
    tables: Tables = {}
    events: list[tuple[float, int, Life]] = []  # (time, request id, its life): it grows or ends
    turned_away = 0

    def fits(count: int) -> bool:
        return all(allocator.available >= count for allocator in allocators.values())

    def grow(request_id: int, count: int) -> None:
        table = tables.setdefault(request_id, {space: [] for space in allocators})
        for space, allocator in allocators.items():
            table[space] += allocator.allocate(count)

    def next_event() -> None:
        time, request_id, span = heapq.heappop(events)
        held = len(next(iter(tables[request_id].values())))
        more = min(span.step, span.total - held)
        if more > 0 and fits(more):
            grow(request_id, more)
            heapq.heappush(events, (time + span.step_ms, request_id, span))
        else:  # done, or preempted because there are no pages to grow into
            for space, pages in tables.pop(request_id).items():
                allocators[space].free(pages)

    for request in requests:
        while events and events[0][0] <= request.arrival:
            next_event()
        span = life(request)
        if fits(span.first):
            grow(request.id, span.first)
            heapq.heappush(events, (request.arrival + span.step_ms, request.id, span))
        else:
            turned_away += 1
    kept: Tables = {}
    for request in keep:
        while events and not fits(request.pages):
            next_event()
        grow(request.id, request.pages)
        kept[request.id] = tables.pop(request.id)
    return kept, turned_away


def stretches(pages: Sequence[int]) -> int:
    """Into how many stretches of consecutive ids a page table falls: 1 for a contiguous one, len(pages) at worst."""
    return len(pages) and 1 + sum(b != a + 1 for a, b in itertools.pairwise(pages))


def read_trace(path: str) -> list[Request]:
    """Requests of a trace in the Mooncake format (JSON lines: timestamp, input_length, output_length), by time.

    Which requests share a prefix (`hash_ids`) is not used: each gets pages of its own. Raises ValueError naming the
    line that is malformed, OSError when the file cannot be read.
    """
    requests = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                arrival, tokens, output = entry["timestamp"], entry["input_length"], entry["output_length"]
                ok = arrival >= 0 and 0 <= output <= MAX_TOKENS and 0 < tokens <= MAX_TOKENS
                ok = ok and isinstance(tokens, int) and isinstance(output, int)
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}:{number}: not a trace entry: {error!r}") from None
            if not ok:
                raise ValueError(f"{path}:{number}: a time or a length is out of range")
            requests.append(Request(number, arrival, tokens, output))
    return sorted(requests, key=lambda request: request.arrival)


def made_up(count: int, rng: random.Random) -> list[Request]:
    """`count` requests as a conversation service sees them: 3 a second; prompts of 7,000 tokens in the middle, with a
    long tail; outputs of 350 tokens on average."""
    requests = []
    arrival = 0.0
    for number in range(count):
        arrival += rng.expovariate(3 / 1000)
        tokens = min(131072, 1 + int(rng.lognormvariate(8.85, 1.1)))
        requests.append(Request(number, arrival, tokens, 1 + int(rng.expovariate(1 / 350))))
    return requests


CHURN = 3000  # requests before those that are transferred
DEFAULT_TOKENS = (131072, 6244, 2048, 777, 20)
DEFAULT_TRACE_REQUESTS = 20


def workload(
    trace: str | None, tokens: Sequence[int] | None, count: int | None, seed: int
) -> tuple[list[Request], list[Request]]:
    """What happens before, and what is transferred.

    With a trace: the requests transferred are `count` (20) consecutive ones somewhere in its second half, and all that
    came earlier is the churn. Without: both are made up. `tokens` gives the lengths of those that are transferred;
    where `count` is larger, the rest have made up lengths (or the trace's), where it is smaller, the first ones count.

    Returns:
        (churn, transferred), the same in every process for the same arguments.

    Raises:
        ValueError: the trace is malformed or too short.
    """
    rng = random.Random(seed)
    if trace is None:
        tokens = DEFAULT_TOKENS if tokens is None else tokens
        count = len(tokens) if count is None else count
        requests = made_up(CHURN + count, rng)
        start = CHURN
    else:
        tokens = () if tokens is None else tokens
        count = (len(tokens) or DEFAULT_TRACE_REQUESTS) if count is None else count
        requests = read_trace(trace)
        if len(requests) < count:
            raise ValueError(f"{trace}: {len(requests)} requests, {count} are to be transferred")
        spare = len(requests) - count
        start = rng.randint(spare // 2, spare)
    moved = []
    for n, request in enumerate(requests[start : start + count]):
        length = tokens[n] if n < len(tokens) else request.tokens
        moved.append(Request(request.id, request.arrival, length, request.output))
    return requests[:start], moved
