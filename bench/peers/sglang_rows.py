"""Times SGLang's own row-wise planners on the inputs of bench/inputs.py: send_kvcache_dcp and send_kvcache_slice.

DCP is timed in its row-wise form. (On CUDA SGLang gathers the rows first where its buffer is large enough, and then
plans fewer descriptors.) The engine frees the lists of each call, as a real one does. Prints JSON, as
sglang_planner.py does.
"""

from __future__ import annotations

import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import inputs
from bench.peers.sglang_planner import Recorder, manager, timed, workers


class Counter(Recorder):
    """An engine that counts descriptors and keeps nothing."""

    count = 0

    def batch_transfer_sync(self, _session: str, *lists: list[int]) -> int:
        self.count += len(lists[0])
        return 0


def dcp(engine: Counter) -> Any:
    """One decode rank of DCP 8."""
    sources = [inputs.base(inputs.SRC_BASE, k) for k in range(inputs.LAYERS)]
    targets = [inputs.base(inputs.DST_BASE, k) for k in range(inputs.LAYERS)]
    item = inputs.DCP_ROW * inputs.PAGE_TOKENS
    kv_args = SimpleNamespace(
        kv_data_ptrs=sources, kv_item_lens=[item] * inputs.LAYERS, kv_layer_ids=[], num_draft_entries=0,
        page_size=inputs.PAGE_TOKENS, mla_compression_ratios=None, prefill_start_layer=0,
        prefill_end_layer=inputs.LAYERS, gpu_id=0, engine_rank=0,
    )  # fmt: skip
    sender, executor = manager(kv_args, engine), ThreadPoolExecutor(workers())
    src, dst = inputs.dcp_request()

    def plan() -> None:
        status = sender.send_kvcache_dcp(
            "session", src, targets, dst, dcp_token_item_lens=[inputs.DCP_ROW] * inputs.LAYERS,
            dst_dcp_size=inputs.DCP_SIZE, dst_dcp_rank=inputs.DCP_RANK, src_page_offset=0, decode_prefix_len=0,
            num_kv_tokens=inputs.DCP_TOKENS, executor=executor, dst_layer_ids=[], pack_buffer=None,
            dst_kv_item_lens=[item] * inputs.LAYERS, dst_tp_rank=inputs.DCP_RANK, dst_attn_tp_size=inputs.DCP_SIZE,
        )  # fmt: skip
        if status != 0:
            raise RuntimeError(f"send_kvcache_dcp returned {status}")

    return plan


def slices(engine: Counter) -> Any:
    """One pair of ranks of TP 4 to 8."""
    count = 2 * inputs.LAYERS
    targets = [inputs.base(inputs.DST_BASE, k) for k in range(count)]
    src_heads, dst_heads = inputs.HEADS // inputs.SRC_TP, inputs.HEADS // inputs.DST_TP
    page_bytes = inputs.HEAD_BYTES * inputs.PAGE_TOKENS
    kv_args = SimpleNamespace(
        kv_data_ptrs=[inputs.base(inputs.SRC_BASE, k) for k in range(count)],
        kv_item_lens=[src_heads * page_bytes] * count, kv_layer_ids=[], page_size=inputs.PAGE_TOKENS,
        total_kv_head_num=inputs.HEADS, kv_head_num=src_heads, engine_rank=inputs.SLICE_SRC_RANK,
        prefill_start_layer=0, prefill_end_layer=inputs.LAYERS,
    )  # fmt: skip
    sender, executor = manager(kv_args, engine), ThreadPoolExecutor(workers())
    sender.is_mla_backend, sender.attn_tp_size = False, inputs.SRC_TP
    src, dst = inputs.slice_request()

    def plan() -> None:
        status = sender.send_kvcache_slice(
            "session", src, targets, dst, inputs.SLICE_DST_RANK, inputs.DST_TP, dst_heads * page_bytes, executor, [],
        )  # fmt: skip
        if status != 0:
            raise RuntimeError(f"send_kvcache_slice returned {status}")

    return plan


def main() -> None:
    rows = []
    gc.collect()
    gc.freeze()  # as SGLang's server does after warm-up
    for case, make in (("DCP 8", dcp), ("TP 4 to 8", slices)):
        engine = Counter()
        plan = make(engine)
        plan()
        count = engine.count
        best, median = timed(plan, engine)
        rows.append({"case": case, "descriptors": count, "best_s": best, "median_s": median})
        print(f"SGLang, {case}: {count} descriptors, {1e3 * median:.1f} ms", file=sys.stderr, flush=True)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
