"""The prefill process: owns the source pages; computes, plans and sends each request, chunk by chunk."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .. import Layout, Memory, Pairing, Plan, pair
from ..engines import Peer, Staging
from .allocator import PAGE, PageAllocator, Request, prefill_life, replay, stretches, workload
from .channel import Channel, heads_of, make_engine, run_child
from .pools import SOURCE, Pools

STAGING = 64 << 20  # bytes: four pieces
PACK = {"direct": "never", "packed": "always", "auto": "auto"}  # by --route

Call = tuple[np.ndarray, dict[str, np.ndarray], int, int]  # of `plan`: source pages, destination pages, start, tokens


def chunks(tokens: int, chunk_tokens: int) -> Iterator[tuple[int, int]]:
    """The (start, stop) token positions to send when `chunk_tokens` at a time are computed: after each chunk all pages
    that are full and not yet sent, after the last one the rest."""
    start = 0
    for computed in range(chunk_tokens, tokens, chunk_tokens):
        stop = computed // PAGE * PAGE
        if stop > start:
            yield start, stop
            start = stop
    yield start, tokens


class Sender:
    """Sends requests to one decode peer."""

    def __init__(self, config: dict[str, Any], pools: Pools, engine: Any, hello: dict[str, Any]) -> None:
        decode_layout = Layout.from_dict(hello["layout"])
        start = time.perf_counter()
        self.pairing = pair(pools.layout, decode_layout)
        self.pair_s = time.perf_counter() - start
        self.peer = Peer(hello["session"], decode_layout)
        self.pools, self.engine = pools, engine
        self.chunk_tokens, self.one_space = config["chunk_tokens"], config["one_space"]
        self.deadline = time.monotonic() + config["timeout"]
        self.pack: Any = PACK[config["route"]]
        gpu = torch.cuda.is_available()
        self.staging = None if self.pack == "never" else Staging(STAGING, memory="pinned" if gpu else Memory.DRAM)
        self.calls: list[Call] = []  # every call of `plan`, to be timed again beside the peers' forms

    def send(
        self,
        request: Request,
        pages: Sequence[int],
        peer_pages: dict[str, list[int]],
        tell: Callable[[int], None],
    ) -> dict[str, Any]:
        """Send one request from `pages` to `peer_pages`; what it took. `tell` hears how many bytes are sent so far."""
        source = np.array(pages, dtype=np.int64)
        target = {space: np.array(table, dtype=np.int64) for space, table in peer_pages.items()}
        if self.one_space:  # what serving stacks did before they knew two: host page ids for everything
            target = dict.fromkeys(target, target["host"])
        took: dict[str, Any] = dict(chunks=0, descriptors=0, bytes=0, plan_s=0.0, transfer_s=0.0)
        for start, stop in chunks(request.tokens, self.chunk_tokens):
            part = source[start // PAGE : -(-stop // PAGE)]
            self.pools.fill(SOURCE, torch.from_numpy(part))  # this chunk is computed
            call = (part, target, start, stop - start)
            before = time.perf_counter()
            plan = self.plan(call)
            planned = time.perf_counter()
            transfer = self.engine.submit(
                plan, self.peer, label=f"request {request.id}", staging=self.staging, pack=self.pack
            )
            transfer.wait(timeout=max(0.0, self.deadline - time.monotonic()))
            took["transfer_s"] += time.perf_counter() - planned
            took["plan_s"] += planned - before
            took["chunks"] += 1
            took["descriptors"] += len(plan)
            took["bytes"] += plan.total_bytes
            tell(took["bytes"])
            self.calls.append(call)
        return took

    def plan(self, call: Call) -> Plan:
        """The plan of one chunk. The whole page table goes along: where the chunk lies in it, `src_start` says."""
        source, target, start, tokens = call
        return self.pairing.plan(source, target, src_start=start, dst_start=0, num_tokens=tokens)

    def other_forms(self) -> list[dict[str, Any]]:
        """All calls planned again, beside the forms in which other planners give the same: rows of a table.

        Times are the sum over the calls, of each the fastest of 5: the machine is doing other things as well.
        """
        grid = Grid(self.pairing)
        names = (
            "kvplan: table int64 [3, N]",
            "the same, then three lists of int",
            "NumPy broadcast: nothing merged or checked",
            "the same, then three lists of int",
        )
        rows: list[dict[str, Any]] = [dict(form=name, descriptors=0, ints=0, bytes=0, seconds=0.0) for name in names]
        for call in self.calls:
            plan, plan_s = fastest(self.plan, call)
            lists, lists_s = fastest(Plan.lists, plan)
            table, table_s = fastest(grid.plan, call)
            table_lists, table_lists_s = fastest(np.ndarray.tolist, table)
            for row, seconds, descriptors, ints, nbytes in (
                (rows[0], plan_s, len(plan), 0, plan.table.nbytes),
                (rows[1], plan_s + lists_s, len(plan), 3 * len(plan), object_bytes(lists)),
                (rows[2], table_s, table.shape[1], 0, table.nbytes),
                (rows[3], table_s + table_lists_s, table.shape[1], table.size, object_bytes(table_lists)),
            ):
                row["seconds"] += seconds
                row["descriptors"] += descriptors
                row["ints"] += ints
                row["bytes"] += nbytes
        return rows


def fastest(function: Callable[[Any], Any], argument: Any) -> tuple[Any, float]:
    """The result, and the least seconds that 5 calls took."""
    times = []
    for _ in range(5):
        start = time.perf_counter()
        result = function(argument)
        times.append(time.perf_counter() - start)
    return result, min(times)


class Grid:
    """A plan as NumPy users write it: base + page * stride, broadcast over regions and pages, nothing merged."""

    def __init__(self, pairing: Pairing) -> None:
        by_key = {region.key: region for region in pairing.src.regions}
        self.columns: list[tuple[str, np.ndarray]] = []  # (space, [5, regions, 1]: bases and strides, bytes of a page)
        for space in pairing.dst.spaces:
            pairs = [(by_key[r.key], r) for r in pairing.dst.regions if r.space == space and r.key in by_key]
            rows = [(s.base, s.page_stride, d.base, d.page_stride, s.page_bytes) for s, d in pairs]
            self.columns.append((space, np.array(rows, dtype=np.int64).T[:, :, None]))

    def plan(self, call: Call) -> np.ndarray:
        """int64 [3, N] of the chunk, one descriptor for every page and region."""
        source, target, start, _ = call
        parts = []
        for space, (src_base, src_stride, dst_base, dst_stride, nbytes) in self.columns:
            pages = target[space][start // PAGE : start // PAGE + len(source)]
            part = np.empty((3, len(src_base), len(source)), dtype=np.int64)
            part[0] = src_base + source * src_stride
            part[1] = dst_base + pages * dst_stride
            part[2] = nbytes
            parts.append(part.reshape(3, -1))
        return np.concatenate(parts, axis=1)


def object_bytes(lists: Sequence[list[int]]) -> int:
    """Bytes that lists of ints take, the ints included."""
    return sum(sys.getsizeof(part) + sum(map(sys.getsizeof, part)) for part in lists)


def serve(config: dict[str, Any], parent: Channel, peer: Channel) -> None:
    """Take the decode side's layout and page tables, send every request, and report what it took."""
    deadline = time.monotonic() + config["timeout"]
    parent.send("progress", text="replaying requests")
    churn, moved = workload(config["trace"], config["tokens"], config["requests"], config["seed"])
    allocators = {"device": PageAllocator(config["prefill_pages"], "sorted")}
    tables, turned_away = replay(churn, allocators, prefill_life, moved)
    pools = Pools(config["prefill_pages"], heads=heads_of(config, "prefill"))
    engine = make_engine(config["engine"])
    engine.register(pools.layout)
    parent.send("progress", text="waiting for the decode side")
    sender = Sender(config, pools, engine, peer.expect("hello", timeout=deadline - time.monotonic()))
    sent = 0
    for number, request in enumerate(moved, 1):
        message = peer.expect("request", timeout=deadline - time.monotonic())
        if (message["id"], message["tokens"]) != (request.id, request.tokens):
            raise ValueError(f"the decode side expects request {message['id']}, here {request.id} is next")
        head = f"sending request {number} of {len(moved)}"

        def tell(nbytes: int, head: str = head, before: int = sent) -> None:
            parent.send("progress", text=f"{head}, {(before + nbytes) / 1e6:,.0f} MB sent")

        tell(0)
        pages = tables[request.id]["device"]
        took = sender.send(request, pages, message["pages"], tell)
        sent += took["bytes"]
        peer.send("sent", pages=pages)
        parent.send("request", id=request.id, tokens=request.tokens, pages=len(pages), **took)
    parent.send("progress", text=f"sent {sent / 1e6:,.0f} MB; timing other forms of the plans")
    forms = sender.other_forms() if config["tp"] is None else []  # those are forms of plans of whole pages
    peer.send("end")
    parent.send(
        "done",
        pair_s=sender.pair_s,
        forms=forms,
        churn=len(churn),
        turned_away=turned_away,
        stretches={"device": [stretches(tables[request.id]["device"]) for request in moved]},
    )
    engine.close()


if __name__ == "__main__":
    run_child(serve)
