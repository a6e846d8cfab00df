"""The decode process: owns the destination pages, and checks every byte of them when all has arrived."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from .. import Heads, Region
from .allocator import PAGE, PageAllocator, decode_life, replay, stretches, workload
from .channel import Channel, heads_of, make_engine, run_child
from .pools import DRAFT, GUARD, SOURCE, TP_HEAD_BYTES, Pools, blocks, identify, page_keys, pattern


@dataclass
class Due:
    """What must have arrived in one space: destination page -> (request id, page of the request, source page)."""

    pages: dict[int, tuple[int, int, int]] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)  # request id -> its tokens

    def add(self, request: int, pages: Sequence[int], source_pages: Sequence[int], tokens: int | None = None) -> None:
        """Page number i of the request, `source_pages[i]` on the prefill side, is due in `pages[i]`.

        The request has `tokens`; all that its pages hold, where that is None.
        """
        if len(pages) != len(source_pages):
            raise ValueError(f"request {request}: {len(source_pages)} source pages for {len(pages)} pages")
        self.tokens[request] = len(pages) * PAGE if tokens is None else tokens
        for position, (page, source) in enumerate(zip(pages, source_pages, strict=True)):
            self.pages[page] = (request, position, source)


@dataclass
class RegionErrors:
    """What is wrong in one region."""

    name: str
    layer: int
    space: str
    wrong_bytes: int
    due_pages: int  # pages that were due and are not what they should be
    other_pages: int  # pages that should not have been touched, and were
    first: str  # the first of these pages, in words; a page that was due goes before any other


def check(pools: Pools, due: Mapping[str, Due], sent: Heads | None = None) -> list[RegionErrors]:
    """Compare every byte of `pools` with what it must be: the regions where something is wrong, in layout order.

    A page in `due[space]` must hold the pattern of its source page, worked out here again; any other page, and all of
    a draft region, its guard. Where the pools hold heads, `sent` says which the source has; the others, and rows of no
    token, must hold their guard.
    """
    found = []
    for region in pools.layout.regions:
        view = pools.pages(region)
        due_here = Due() if region.key == DRAFT else due[region.space]
        wrong: dict[int, int] = {}  # page -> wrong bytes
        for block in blocks(torch.arange(region.num_pages), view.shape[1]):
            start, stop = int(block[0]), int(block[-1]) + 1
            want = expected(pools, region, due_here, start, stop, sent).to(view.device)
            if not torch.equal(view[start:stop], want):
                counts = (view[start:stop] ^ want).view(torch.uint8).ne(0).sum(1).tolist()
                wrong.update((start + n, count) for n, count in enumerate(counts) if count)
        if wrong:
            missed = [page for page in due_here.pages if page in wrong]  # in order of requests and position
            first = missed[0] if missed else next(iter(wrong))
            errors = RegionErrors(
                name=region.name,
                layer=region.layer,
                space=region.space,
                wrong_bytes=sum(wrong.values()),
                due_pages=len(missed),
                other_pages=len(wrong) - len(missed),
                first=describe(
                    pools, region, due_here, first, expected(pools, region, due_here, first, first + 1, sent)[0]
                ),
            )
            found.append(errors)
    return found


def expected(pools: Pools, region: Region, due: Due, start: int, stop: int, sent: Heads | None) -> torch.Tensor:
    """What pages [start, stop) of `region` must hold: int64 [stop - start, words]."""
    number, words = pools.number[region.key], region.page_bytes // 8
    here = [page for page in due.pages if start <= page < stop]
    keys = page_keys(GUARD, number, torch.arange(start, stop))
    sources = page_keys(SOURCE, number, torch.tensor([due.pages[page][2] for page in here], dtype=torch.int64))
    if pools.heads is None or sent is None or sent == pools.heads:  # pages move whole
        keys[torch.tensor(here, dtype=torch.int64) - start] = sources
        return pattern(keys, words)
    want = pattern(keys, words)
    held, head = pools.heads, TP_HEAD_BYTES // 8
    first, last = max(held.start, sent.start), min(held.stop, sent.stop)
    for k, page in enumerate(here):
        request, position, _ = due.pages[page]
        rows = min(PAGE, due.tokens[request] - position * PAGE)
        theirs = pattern(sources[k : k + 1], PAGE * (sent.stop - sent.start) * head).view(PAGE, -1, head)
        mine = want[page - start].view(PAGE, -1, head)
        mine[:rows, first - held.start : last - held.start] = theirs[:rows, first - sent.start : last - sent.start]
    return want


def describe(pools: Pools, region: Region, due: Due, page: int, want: torch.Tensor) -> str:
    """Where wrong page `page` of `region` is, what it should hold (`want`, int64 [words]), and what it does hold."""
    got = pools.pages(region)[page].cpu()
    bad = (got ^ want).view(torch.uint8).nonzero()
    offset = int(bad[0])
    text = f"{region}, space {region.space!r}, page {page}"
    if page in due.pages:
        request, position, source = due.pages[page]
        text += f" (page {position} of request {request}, tokens from {position * PAGE}; source page {source})"
    else:
        text += " (where nothing was due)"
    side, number, held, word = identify(int(got[offset // 8]))
    key_of = {n: f"{name} layer {layer}" for (name, layer), n in pools.number.items()}
    if (side, number, held, word) == (GUARD, pools.number[region.key], page, offset // 8):
        holds = "what it held before: nothing arrived"
    elif side in (SOURCE, GUARD) and number in key_of and word < len(got):
        whose = "source" if side == SOURCE else "decode"
        holds = f"byte {word * 8} of {whose} page {held} of {key_of[number]}"
    else:
        holds = f"{bytes(got.view(torch.uint8)[offset : offset + 8]).hex()}, which neither side wrote"
    return f"{text}: wrong from byte {offset}, which holds {holds}"


def serve(config: dict[str, Any], parent: Channel, peer: Channel) -> None:
    """Offer the layout and the page tables, wait until the prefill side has sent everything, check, and report."""
    deadline = time.monotonic() + config["timeout"]
    parent.send("progress", text="replaying requests")
    churn, moved = workload(config["trace"], config["tokens"], config["requests"], config["seed"])
    allocators = {  # unlike each other, as these two are in a server
        "host": PageAllocator(config["host_pages"], "lifo"),
        "device": PageAllocator(config["device_pages"], "sorted"),
    }
    sent = heads_of(config, "prefill")
    if sent is not None:
        del allocators["host"]
    tables, turned_away = replay(churn, allocators, decode_life, moved)
    parent.send("progress", text="filling pools")
    if sent is None:
        pools = Pools(config["device_pages"], config["host_pages"], config["draft"])
    else:
        pools = Pools(config["device_pages"], heads=heads_of(config, "decode"))
    pools.fill(GUARD)
    engine = make_engine(config["engine"])
    engine.register(pools.layout)
    parent.send("progress", text="waiting for pages")
    peer.send("hello", layout=pools.layout.to_dict(), session=engine.session)
    due = {space: Due() for space in allocators}
    for request in moved:
        peer.send("request", id=request.id, tokens=request.tokens, pages=tables[request.id])
        source_pages = peer.expect("sent", timeout=deadline - time.monotonic())["pages"]
        for space in due:
            due[space].add(request.id, tables[request.id][space], source_pages, request.tokens)
    peer.expect("end", timeout=deadline - time.monotonic())
    parent.send("progress", text=f"checking {pools.nbytes / 1e6:,.0f} MB")
    start = time.monotonic()
    errors = check(pools, due, sent)
    parent.send(
        "done",
        checked_bytes=pools.nbytes,
        pools="both decode pools" if sent is None else "the decode pool",
        check_s=time.monotonic() - start,
        turned_away=turned_away,
        churn=len(churn),
        stretches={space: [stretches(tables[request.id][space]) for request in moved] for space in allocators},
        errors=[asdict(error) for error in errors],
    )
    engine.close()


if __name__ == "__main__":
    run_child(serve)
