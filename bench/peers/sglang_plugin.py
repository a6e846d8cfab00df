"""SGLang's functions as they are, and with kvplan's plugin: the same inputs, taking turns in one run.

    .venv-sglang/bin/python bench/peers/sglang_plugin.py [--seconds 3] [--only WORD]

The engine of both is a recorder that drops what it is given, so that planning and handing over are timed, and no
transfer. With lists it takes Python lists; with arrays NumPy arrays, as Mooncake 0.3.14 does. "read" adds the time in
which the installed Mooncake reads its arguments: SGLang's lists, and the views of the table that kvplan gives a
Mooncake without array calls.

Each in turn is called back to back for two milliseconds. A cell has the median of these calls, how many times as long
SGLang takes, and the goal for that, marked where it was missed. Its last ratio is of the first calls of the turns
alone: they find caches full of another's objects.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
from mooncake.engine import TransferEngine

from bench import inputs
from bench.peers.sglang_planner import manager as sglang_manager
from bench.peers.sglang_planner import workers
from kvplan.integrations.sglang.mooncake import PlannedMooncakeManager

EXECUTOR = ThreadPoolExecutor(workers())
BLOCK = 0.002  # seconds that each is called back to back
Calls = dict[str, Callable[[], Any]]


class Lists:
    """An engine that takes lists."""

    count = 0

    def batch_transfer_sync(self, _session: str, src: list[int], _dst: list[int], _nbytes: list[int]) -> int:
        """Count the descriptors."""
        self.count += len(src)
        return 0


class Arrays(Lists):
    """An engine that takes arrays as well, as SGLang wraps Mooncake 0.3.14."""

    def __init__(self) -> None:
        self.engine = self

    def batch_transfer_sync_write_arrays(self, _session: str, src: Any, _dst: Any, _nbytes: Any) -> int:
        """Count the descriptors."""
        self.count += len(src)
        return 0


class Read:
    """An engine whose arguments Mooncake's wheel itself reads, as for a transfer, which it then does not make.

    A word among the lengths ends the call once both addresses have been read into C++ vectors.
    """

    def __init__(self) -> None:
        self.engine = self
        self._mooncake = TransferEngine()

    def batch_transfer_sync_write(self, session: str, src: Any, dst: Any, _nbytes: Any) -> int:
        """Have the addresses read."""
        try:
            self._mooncake.batch_transfer_sync_write(session, src, dst, ["none"])
        except TypeError:
            return 0
        raise RuntimeError("Mooncake took a word for a length")

    batch_transfer_sync = batch_transfer_sync_write


def managers(args: SimpleNamespace, **fields: Any) -> dict[str, Any]:
    """SGLang's manager, and kvplan's over both engines."""
    args.kv_data_lens = [each * inputs.NUM_PAGES for each in args.kv_item_lens]
    made = {}
    for name, engine in (("SGLang", Lists()), ("SGLang, read", Read()), ("lists", Lists()), ("arrays", Arrays()),
                         ("views, read", Read())):  # fmt: skip
        made[name] = sglang_manager(args, engine)  # type: ignore[arg-type]
        if not name.startswith("SGLang"):
            made[name].__class__ = PlannedMooncakeManager
            made[name].set_up()
    for one in made.values():
        one.decode_kv_args_table, one.request_status, one.transfer_infos = {}, {}, {}
        for field, value in fields.items():
            setattr(one, field, value)
    return made


def pointers(start: int, count: int) -> list[int]:
    return [inputs.base(start, k) for k in range(count)]


def deepseek_v4(pages: int, pattern: str, **fields: Any) -> Calls:
    """send_kvcache, two index spaces; `fields` of the manager."""
    count = len(inputs.PAGE_BYTES)
    ratios = [4] * inputs.HOST_REGIONS + [128] * (count - 2 * inputs.HOST_REGIONS)
    args = SimpleNamespace(
        kv_data_ptrs=pointers(inputs.SRC_BASE, count), kv_item_lens=list(inputs.PAGE_BYTES), kv_layer_ids=[],
        num_draft_entries=0, mla_compression_ratios=ratios, prefill_start_layer=0, prefill_end_layer=len(ratios),
    )  # fmt: skip
    targets = pointers(inputs.DST_BASE, count)
    source, host, device = inputs.request(pages, pattern)

    def call(made: Any) -> Callable[[], Any]:
        return lambda: made.send_kvcache(
            "session", source, targets, host, EXECUTOR, dst_layer_ids=[], dst_device_kv_indices=device
        )

    return {name: call(made) for name, made in managers(args, **fields).items()}


def context_parallel(pages: int) -> Calls:
    """send_kvcache_dcp, one rank of eight, rows where they lie (SGLang's form without its pack buffer)."""
    item = inputs.DCP_ROW * inputs.PAGE_TOKENS
    args = SimpleNamespace(
        kv_data_ptrs=pointers(inputs.SRC_BASE, inputs.LAYERS), kv_item_lens=[item] * inputs.LAYERS, kv_layer_ids=[],
        num_draft_entries=0, page_size=inputs.PAGE_TOKENS, mla_compression_ratios=None, prefill_start_layer=0,
        prefill_end_layer=inputs.LAYERS, gpu_id=0, engine_rank=0,
    )  # fmt: skip
    targets = pointers(inputs.DST_BASE, inputs.LAYERS)
    rng = np.random.default_rng(inputs.SEED)
    src = inputs.make_pages(rng, pages, "scattered")
    dst = inputs.make_pages(rng, pages // inputs.DCP_SIZE, "scattered")

    def call(made: Any) -> Callable[[], Any]:
        return lambda: made.send_kvcache_dcp(
            "session", src, targets, dst, dcp_token_item_lens=[inputs.DCP_ROW] * inputs.LAYERS,
            dst_dcp_size=inputs.DCP_SIZE, dst_dcp_rank=inputs.DCP_RANK, src_page_offset=0, decode_prefix_len=0,
            num_kv_tokens=pages * inputs.PAGE_TOKENS, executor=EXECUTOR, dst_layer_ids=[], pack_buffer=None,
            dst_kv_item_lens=[item] * inputs.LAYERS, dst_tp_rank=inputs.DCP_RANK, dst_attn_tp_size=inputs.DCP_SIZE,
        )  # fmt: skip

    return {name: call(made) for name, made in managers(args).items()}


def heads(pages: int) -> Calls:
    """send_kvcache_slice, TP 4 to 8: SGLang makes a call a layer. "one call": its arithmetic, all layers at once."""
    count = 2 * inputs.LAYERS
    src_heads, dst_heads = inputs.HEADS // inputs.SRC_TP, inputs.HEADS // inputs.DST_TP
    page_bytes = inputs.HEAD_BYTES * inputs.PAGE_TOKENS
    args = SimpleNamespace(
        kv_data_ptrs=pointers(inputs.SRC_BASE, count), kv_item_lens=[src_heads * page_bytes] * count, kv_layer_ids=[],
        page_size=inputs.PAGE_TOKENS, total_kv_head_num=inputs.HEADS, kv_head_num=src_heads, num_draft_entries=0,
        engine_rank=inputs.SLICE_SRC_RANK, prefill_start_layer=0, prefill_end_layer=inputs.LAYERS,
    )  # fmt: skip
    targets = pointers(inputs.DST_BASE, count)
    rng = np.random.default_rng(inputs.SEED)
    src, dst = (inputs.make_pages(rng, pages, "scattered") for _ in range(2))
    made = managers(args, is_mla_backend=False, attn_tp_size=inputs.SRC_TP)

    def call(one: Any) -> Callable[[], Any]:
        return lambda: one.send_kvcache_slice(
            "session", src, targets, dst, inputs.SLICE_DST_RANK, inputs.DST_TP, dst_heads * page_bytes, EXECUTOR, [],
        )  # fmt: skip

    tokens = np.arange(inputs.PAGE_TOKENS, dtype=np.int64)
    offset = inputs.SLICE_DST_RANK * dst_heads % src_heads * inputs.HEAD_BYTES

    def one_call() -> int:
        columns = []
        for bases, ids, held, first in ((args.kv_data_ptrs, src, src_heads, offset), (targets, dst, dst_heads, 0)):
            rows = ids.astype(np.int64)[:, None] * (held * page_bytes) + tokens * (held * inputs.HEAD_BYTES) + first
            columns.append((np.array(bases, np.int64)[:, None, None] + rows).reshape(-1).tolist())
        lengths = [dst_heads * inputs.HEAD_BYTES] * len(columns[0])
        return made["SGLang"].engine.batch_transfer_sync("session", *columns, lengths)

    return {name: call(one) for name, one in made.items()} | {"one call": one_call}


def medians(calls: Calls, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    """Median seconds of each, in turn: (called again at once, its first call after the others' calls).

    Each turn of one of them is a call right after another's, which finds what that one left in the caches, and then
    calls back to back for two milliseconds.
    """
    first: dict[str, list[float]] = {name: [] for name in calls}
    again: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        if call() != 0:
            raise RuntimeError("a call failed")
    end = time.perf_counter() + seconds
    rounds = 0
    while rounds < 7 or (time.perf_counter() < end and rounds < 2000):
        for name, call in calls.items():
            start = stop = time.perf_counter()
            call()
            first[name].append(time.perf_counter() - stop)
            while stop - start < BLOCK:
                begun = time.perf_counter()
                call()
                stop = time.perf_counter()
                again[name].append(stop - begun)
        rounds += 1
    middle, cold = ({name: statistics.median(found) for name, found in each.items()} for each in (again, first))
    return middle, cold


@dataclasses.dataclass(frozen=True)
class Case:
    """Calls to compare, and how many times as long SGLang should take at least.

    Attributes:
        make: makes the calls.
        lists, arrays: the goals for an engine that takes lists, and for one that takes arrays.
        one_call: the same for lists against SGLang's arithmetic with all layers in one call; None where it has no such.
    """

    make: Callable[[], Calls]
    lists: float = 1
    arrays: float = 1
    one_call: float | None = None


BY_LAYER = {"enable_custom_mem_pool": True, "custom_mem_pool_type": "NVLINK"}
CASES = {
    "DeepSeek-V4, 64 contiguous pages": Case(lambda: deepseek_v4(64, "contiguous"), 3, 4),
    "DeepSeek-V4, 64 scattered": Case(lambda: deepseek_v4(64, "scattered"), 9, 70),
    "DeepSeek-V4, 512 runs of 8": Case(lambda: deepseek_v4(512, "runs of 8"), 25, 150),
    "DeepSeek-V4, 512 scattered": Case(lambda: deepseek_v4(512, "scattered"), 20, 800),
    "DCP 8, 256 pages": Case(lambda: context_parallel(256), 12, 100),
    "TP 4 to 8, 64 pages of 64 tokens": Case(lambda: heads(64), 2, 7, one_call=1),
    "TP 4 to 8, 4 pages": Case(lambda: heads(4)),
    "DeepSeek-V4, 1 page": Case(lambda: deepseek_v4(1, "contiguous")),
    "DCP 8, 8 pages": Case(lambda: context_parallel(8)),
    "custom memory pool (a call a layer), 1 page": Case(lambda: deepseek_v4(1, "contiguous", **BY_LAYER)),
    "custom memory pool, 64 scattered": Case(lambda: deepseek_v4(64, "scattered", **BY_LAYER)),
    "custom memory pool, 512 scattered": Case(lambda: deepseek_v4(512, "scattered", **BY_LAYER)),
    "batches of 8 indices, 64 scattered": Case(lambda: deepseek_v4(64, "scattered", max_transfer_batch_indices=8)),
    "batches of 128 indices, 512 scattered": Case(
        lambda: deepseek_v4(512, "scattered", max_transfer_batch_indices=128)
    ),
}


def rows(name: str, case: Case, found: dict[str, float], first: dict[str, float]) -> list[str]:
    """A case's rows of the table."""

    def times(kind: str, against: str, goal: float | None) -> str:
        ratio, cold = (each[against] / each[kind] for each in (found, first))
        missed = "" if goal is None or ratio >= goal else " **missed**"
        wanted = "" if goal is None else f" (goal {goal:g}×{missed})"
        return f"{1e6 * found[kind]:,.0f}: {ratio:.1f}×{wanted}; {cold:.1f}×"

    made = [f"| {name} | {1e6 * found['SGLang']:,.0f} | {times('lists', 'SGLang', case.lists)} "
            f"| {times('arrays', 'SGLang', case.arrays)} | {1e6 * found['SGLang, read']:,.0f} "
            f"| {times('views, read', 'SGLang, read', None)} |"]  # fmt: skip
    if case.one_call is not None:
        one = "one call"
        made.append(f"| the same, against one call | {1e6 * found[one]:,.0f} | {times('lists', one, case.one_call)} "
                    f"| {times('arrays', one, 1)} | | |")  # fmt: skip
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case")
    parser.add_argument("--only", default="", metavar="WORD", help="cases with this word in their name")
    options = parser.parse_args()
    print("| chunk | SGLang, µs | kvplan, lists | kvplan, arrays | SGLang, read | kvplan's views, read |")
    print("|---|---|---|---|---|---|")
    missed = 0
    for name, case in CASES.items():
        if options.only not in name:
            continue
        calls = case.make()
        gc.collect()
        gc.freeze()  # as SGLang's server does after warm-up
        made = rows(name, case, *medians(calls, options.seconds))
        gc.unfreeze()
        missed += sum(row.count("**missed**") for row in made)
        print("\n".join(made), flush=True)
    print(f"\nGoals missed: {missed}. They are those of a calm machine.")


if __name__ == "__main__":
    main()
