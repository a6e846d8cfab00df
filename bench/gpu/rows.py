"""The rows of the goal, each with what it is measured against in the same process."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator

import numpy as np
import torch

from bench import inputs
from bench.gpu import timing
from bench.gpu.timing import DEVICE, GPU
from kvplan import Layout, Memory, Pairing, Region, Request, execute, ops, pair
from kvplan.planning.device import Planner

GIB = 1 << 30
Ids = torch.Tensor
PAGE_SIZES = (1_728, 4_096, 8_448, 18_432, 37_440)
PAGES = 4096 if GPU else 64
REQUESTS = 64 if GPU else 4
SETS = 16 if GPU else 2  # of inputs and outputs, gone through in turn: 98 MB of table, more than a cache holds
NUM_PAGES = 1 << 19  # of each pool, at made-up addresses: a plan reads no page


@dataclasses.dataclass
class Row:
    """One measured figure; `limit` is the goal, which `value` must not pass (or, with `least`, must reach)."""

    what: str
    value: float
    unit: str
    limit: float | None = None
    least: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.limit is None or not GPU:
            return None
        return self.value >= self.limit if self.least else self.value <= self.limit


def layout(start: int, *, host: bool) -> Layout:
    """DeepSeek-V4-Flash: 62 regions, two index spaces on the decode side."""
    names = ["c4_kv"] * inputs.C4[0] + ["c4_indexer"] * inputs.INDEXER[0] + ["c128_kv"] * inputs.C128[0]
    return Layout(
        [
            Region(name, k, start + (k << 36), inputs.PAGE_BYTES[k], NUM_PAGES,
                   space="host" if host and name == "c4_kv" else "device")
            for k, name in enumerate(names)
        ],
        page_size=256,
    )  # fmt: skip


def make_pairing() -> Pairing:
    return pair(layout(1 << 44, host=False), layout(1 << 46, host=True))


class Planning:
    """Requests of scattered pages, as the arguments of `ops.plan_`."""

    def __init__(self, pairing: Pairing, requests: int, seed: int) -> None:
        rng = np.random.default_rng([inputs.SEED, requests, seed])
        ids = [rng.permutation(NUM_PAGES)[: requests * PAGES].astype(np.int32) for _ in range(3)]
        each = [[side[k * PAGES : (k + 1) * PAGES] for side in ids] for k in range(requests)]
        self.pairing = pairing
        self.requests = [Request(src, {"host": host, "device": device}) for src, host, device in each]
        self.lists = [[torch.from_numpy(part).to(DEVICE) for part in parts] for parts in each]
        on_device = [Request(src, {"host": host, "device": device}) for src, host, device in self.lists]
        self.planner = pairing.planner(on_device, device=DEVICE)
        plan = self.planner.run()
        self.args = (self.planner._tables, self.planner._job, plan._ids, self.planner._sizes)
        self.outputs = (self.planner.table, self.planner.info)

    def call(self) -> None:
        ops.plan_(*self.args, *self.outputs)

    def check(self) -> None:
        """As the CPU plans."""
        for output in self.outputs:
            output.fill_(-1)
        self.call()
        timing.finish()
        want = self.pairing.plan_batch(self.requests)
        assert self.outputs[1][0] == 0 and int(self.outputs[1][-1]) == len(want)
        assert torch.equal(self.outputs[0][:, : len(want)].cpu(), want.table)


def planning_rows() -> Iterator[Row]:
    """One request, by graph replay."""
    pairing = make_pairing()
    sets = [Planning(pairing, 1, seed) for seed in range(SETS)]
    sets[0].check()
    sets[-1].check()
    what = f"plan {PAGES:,} scattered pages × {len(inputs.PAGE_BYTES)} regions"
    replays = [timing.graph_of([one.call]) for one in sets]
    yield Row(f"{what}, graph replay", 1e6 * timing.device_time(replays * 4), "µs", 15.0)
    together = timing.graph_of([one.call for one in sets])
    yield Row("  the same, 16 plans in one graph, each", 1e6 * timing.device_time([together] * 4) / SETS, "µs")
    runs = [timing.graph_of([one.planner.run]) for one in sets]
    yield Row("  Planner.run: lists joined, status to the host", 1e6 * timing.device_time(runs * 4), "µs")
    bytes_ = [timing.graph_of([timing.memset(one.outputs[0])]) for one in sets]
    yield Row("  memset of the same table", 1e6 * timing.device_time(bytes_ * 4), "µs")
    yield Row("  the calls without a graph", 1e6 * timing.device_time([one.call for one in sets]), "µs")
    for name, spent in timing.kernel_times(sets[0].call).items():
        yield Row(f"    {name}", spent, "µs")


def batch_rows() -> Iterator[Row]:
    """Many requests in one call, against memset of the table."""
    pairing = make_pairing()
    sets = [Planning(pairing, REQUESTS, seed) for seed in range(2)]
    sets[0].check()
    ours = timing.device_time([timing.graph_of([one.call]) for one in sets], rounds=20)
    floor = timing.device_time([timing.graph_of([timing.memset(one.outputs[0])]) for one in sets], rounds=20)
    filled = timing.device_time([lambda table=one.outputs[0]: table.fill_(7) for one in sets], rounds=20)
    size = sets[0].outputs[0].nbytes
    note = f"{1e6 * ours:.0f} µs; memset {1e6 * floor:.0f} µs, fill_ {1e6 * filled:.0f} µs, {size / 1e6:.0f} MB"
    yield Row(f"plan {REQUESTS} requests at once, against memset", ours / floor, "×", 1.5, note=note)
    for name, spent in timing.kernel_times(sets[0].call, 5).items():
        yield Row(f"    {name}", spent, "µs")


def table_of(src: torch.Tensor, dst: torch.Tensor, src_ids: Ids, dst_ids: Ids, size: int) -> torch.Tensor:
    """One descriptor a page."""
    nbytes = torch.full_like(src_ids, size)
    return torch.stack([src.data_ptr() + src_ids * size, dst.data_ptr() + dst_ids * size, nbytes])


def check_pages(src: torch.Tensor, dst: torch.Tensor, src_ids: Ids, dst_ids: Ids, size: int) -> None:
    """The pages named are equal; page by page over all of them, in pieces."""
    timing.finish()
    views = [tensor[: tensor.numel() // size * size].view(-1, size) for tensor in (src, dst)]
    for piece in range(0, len(src_ids), 4096):
        left, right = (
            view[ids[piece : piece + 4096].to(view.device)].to(DEVICE)
            for view, ids in zip(views, (src_ids, dst_ids), strict=True)
        )
        assert torch.equal(left, right), "a page is wrong"


def bytes_of(size: int, where: str) -> torch.Tensor:
    """Random bytes on the device, or in pinned memory."""
    noise = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    if GPU:
        noise.random_(0, 256)
    else:
        noise.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8))
    if where == "device":
        return noise
    host = torch.empty(size, dtype=torch.uint8, pin_memory=GPU)
    host.copy_(noise)
    return host


def copy_rows() -> Iterator[Row]:
    """Gather, scatter and page to page on the device, against one copy of as many bytes."""
    moved = 2 * GIB if GPU else 1 << 20
    pool, other, staging = (bytes_of(size, "device") for size in (2 * moved, 2 * moved, moved))
    one_piece = timing.device_time([lambda: staging.copy_(pool[:moved]), lambda: staging.copy_(pool[moved:])])
    yield Row("device's own copy rate, read and written", 2e-12 * moved / one_piece, "TB/s")
    worst = 1e9
    for size in PAGE_SIZES:
        count = moved // size
        here, there = (torch.randperm(2 * moved // size, device=DEVICE)[:count] for _ in range(2))
        in_turn = torch.arange(count, device=DEVICE)
        rates = []
        for src, dst, src_ids, dst_ids in (
            (pool, staging, here, in_turn), (staging, other, in_turn, there), (pool, other, here, there),
        ):  # fmt: skip
            table = table_of(src, dst, src_ids, dst_ids, size)
            dst.zero_()
            ops.copy_(table)
            check_pages(src, dst, src_ids, dst_ids, size)
            spent = timing.device_time([lambda table=table: ops.copy_(table)] * 2, rounds=10)
            rates.append(one_piece * (count * size / moved) / spent)
        worst = min(worst, *rates[:2])
        note = f"scatter {100 * rates[1]:.0f}%, page to page {100 * rates[2]:.0f}%"
        yield Row(f"  gather of {size / 1000:.1f} KB pages", 100 * rates[0], "%", note=note)
    yield Row("gather and scatter on the device, slowest of these", 100 * worst, "%", 90.0, least=True)
    yield Row("  DeepSeek-V4's sizes in one plan, gather", 100 * _mixed(pool, staging, one_piece / moved), "%")


def _mixed(pool: torch.Tensor, staging: torch.Tensor, seconds_a_byte: float) -> float:
    """All regions of a model in one table, in order of region: each size in a stretch of its own."""
    share = len(staging) // sum(inputs.PAGE_BYTES)
    parts, at = [], 0
    for size in inputs.PAGE_BYTES:
        ids = torch.randperm(2 * share, device=DEVICE)[:share]
        in_turn = torch.arange(share, device=DEVICE)
        parts.append(table_of(pool[2 * at :], staging[at:], ids, in_turn, size))
        at += share * size
    table = torch.cat(parts, dim=1).contiguous()
    spent = timing.device_time([lambda: ops.copy_(table)] * 2, rounds=10)
    return seconds_a_byte * at / spent


def pinned_rows() -> Iterator[Row]:
    """Between the device and pinned host memory, against one transfer of as many bytes."""
    moved = GIB // 4 if GPU else 1 << 20
    for src, dst in (("device", "host"), ("host", "device")):
        pools = {where: bytes_of(2 * moved, where) for where in (src, dst)}
        target, source = pools[dst][:moved], pools[src][moved:]
        one_piece = timing.device_time([lambda t=target, s=source: t.copy_(s, non_blocking=True)] * 2, rounds=7)
        rates = {}
        for size in PAGE_SIZES:
            count = moved // size
            ids = [torch.randperm(2 * moved // size, device=DEVICE)[:count] for _ in range(2)]
            table = table_of(pools[src], pools[dst], *ids, size)
            pools[dst].zero_()
            ops.copy_(table)
            check_pages(pools[src], pools[dst], *ids, size)
            spent = timing.device_time([lambda table=table: ops.copy_(table)] * 2, rounds=7)
            rates[size] = 100 * one_piece * (count * size / moved) / spent
        note = ", ".join(f"{size / 1000:.1f} KB {rate:.0f}%" for size, rate in rates.items())
        what = f"{src} to {dst}, scattered pages, slowest of these"
        yield Row(what, min(rates.values()), "%", 95.0, least=True, note=f"{note}; {1e-9 * moved / one_piece:.1f} GB/s")


def host_rows() -> Iterator[Row]:
    """What a call costs the host."""
    one = Planning(make_pairing(), 1, 99)
    src, host, device = one.lists[0]
    tables: list[object] = []

    def plan() -> None:
        tables[:] = [one.pairing.plan(src, {"host": host, "device": device})]

    yield Row("host work of ops.plan_", 1e6 * timing.host_time(one.call), "µs", 15.0)
    yield Row("host work of Planner.run", 1e6 * timing.host_time(one.planner.run), "µs", 15.0)
    yield Row("host work of Pairing.plan", 1e6 * timing.host_time(plan, calls=40), "µs", 15.0)
    yield Row("  replay of a graph of Planner.run", 1e6 * timing.host_time(timing.graph_of([one.planner.run])), "µs")
    small = torch.empty(1 << 16, dtype=torch.uint8, device=DEVICE)
    ids = torch.arange(16, device=DEVICE)
    table = table_of(small, small, ids, ids + 16, 1024)
    yield Row("  ops.copy_", 1e6 * timing.host_time(lambda: ops.copy_(table)), "µs")


def execute_rows() -> Iterator[Row]:
    """`execute` of a plan made on the device, C4 pages to pinned memory, against one copy of as many bytes each way."""
    count = PAGES // 8
    for host in (False, True):
        pools = [
            [bytes_of(2 * count * size, "host" if side and host and size == inputs.C4[1] else "device")
             for size in MODEL] for side in range(2)
        ]  # fmt: skip
        made = pair(*(
            Layout([
                Region(f"kv{size}", 0, pool.data_ptr(), size, 2 * count, memory=memory_of(pool))
                for size, pool in zip(MODEL, side, strict=True)
            ], page_size=256)
            for side in pools
        ))  # fmt: skip
        src, dst = (torch.randperm(2 * count)[:count].to(DEVICE) for _ in range(2))
        planner = made.planner([Request(src, dst)], device=DEVICE)

        def both(planner: Planner = planner) -> None:
            execute(planner.run())

        for pool in pools[1]:
            pool.zero_()
        both()
        for size, here, there in zip(MODEL, *pools, strict=True):
            check_pages(here, there, src, dst, size)
        graph = timing.graph_of([both])  # a replay plans and copies
        pieces = [
            (there[: count * size], here[: count * size]) for size, here, there in zip(MODEL, *pools, strict=True)
        ]
        floor = timing.device_time([lambda: [to.copy_(of, non_blocking=True) for to, of in pieces]] * 2, rounds=7)  # noqa: B023
        spent, replayed = (timing.device_time([call] * 2, rounds=7) for call in (both, graph))
        where = "C4 pages to pinned memory" if host else "all on the device"
        note = f"{1e6 * spent:.0f} µs; in a graph {1e6 * replayed:.0f} µs; contiguous copies {1e6 * floor:.0f} µs"
        yield Row(f"Planner.run and execute, {where}, against copies", 100 * floor / spent, "%", note=note)


MODEL = (inputs.C4[1], inputs.INDEXER[1], inputs.C128[1])


def memory_of(pool: torch.Tensor) -> Memory:
    return Memory.VRAM(pool.device.index or 0) if pool.is_cuda else Memory.DRAM


def packing_rows() -> Iterator[Row]:
    """`Plan.packed` over device tensors; it waits for the device three times, so this is time of the host's clock."""
    one = Planning(make_pairing(), 1, 7)
    want = one.pairing.plan_batch(one.requests).packed()
    for op in ("write", "read"):
        plan = one.planner.run()
        got = plan.packed(op)
        if op == "write":
            for name in ("copies", "merged", "pieces"):
                assert torch.equal(getattr(got, name).cpu(), getattr(want, name)), name
        times = []
        for _ in range(5 if GPU else 1):
            timing.finish()
            started = time.perf_counter()
            plan.packed(op)
            timing.finish()
            times.append(time.perf_counter() - started)
        yield Row(f"Plan.packed of {len(plan):,} descriptors, {op}", 1e6 * sorted(times)[len(times) // 2], "µs")


def beside_rows() -> Iterator[Row]:
    """What is left of a compute kernel's rate while pages go to pinned memory, by ops.copy_ and by one transfer."""
    side = 4096 if GPU else 64
    left, right = (torch.randn(side, side, device=DEVICE).to(torch.bfloat16) for _ in range(2))
    out = torch.empty_like(left)
    moved, size = (GIB // 4 if GPU else 1 << 16), 8_448
    pool, host = bytes_of(moved, "device"), bytes_of(moved, "host")
    ids = torch.randperm(moved // size, device=DEVICE)
    table = table_of(pool, host, ids, ids, size)

    def compute() -> None:
        for _ in range(15):  # a few milliseconds: less than the transfer takes
            torch.mm(left, right, out=out)

    alone = timing.device_time([compute], rounds=7)
    kept = {
        name: 100 * alone / timing.time_beside(compute, call)
        for name, call in (
            ("ops.copy_", lambda: ops.copy_(table)),
            ("a transfer", lambda: host.copy_(pool, non_blocking=True)),
        )
    }
    note = f"beside a transfer {kept['a transfer']:.0f}%; alone {1e6 * alone:.0f} µs"
    yield Row("a compute kernel's rate beside ops.copy_ to the host", kept["ops.copy_"], "%", note=note)


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "planning": planning_rows,
    "batch": batch_rows,
    "host": host_rows,
    "copies": copy_rows,
    "pinned": pinned_rows,
    "execute": execute_rows,
    "packing": packing_rows,
    "beside": beside_rows,
}


def measure(parts: list[str], until: float) -> Iterator[Row | tuple[str, str]]:
    """All rows of these parts, and (part, how far it came): none begins, and none goes on, after `until`.

    A part that fails does not keep the others from being measured.
    """
    for part in parts:
        if time.monotonic() >= until:
            yield part, "no time was left"
            continue
        yield part, "begun"
        state = "measured"
        try:
            for row in PARTS[part]():
                yield row
                if time.monotonic() >= until:
                    state = "not all of it: no time was left"
                    break
        except Exception as error:  # whatever it is belongs into the report
            traceback.print_exc()
            state = f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        yield part, state
        if GPU:
            torch.cuda.empty_cache()
