"""Times SGLang's own planner, MooncakeKVManager.send_kvcache, on the inputs of bench/inputs.py.

Runs in the environment that bench/peers/setup.sh makes. The engine is a recorder that keeps a reference to each batch,
so that SGLang's planning alone is timed. Prints JSON: [{pages, pattern, gc, descriptors, best_s, median_s}].
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.environ import envs

from bench import inputs


class Recorder:
    """An engine that keeps the lists of the last batch."""

    last: tuple[list[int], ...] = ()

    def batch_transfer_sync(self, _session: str, *lists: list[int]) -> int:
        self.last = lists
        return 0


def manager(kv_args: SimpleNamespace, engine: Recorder) -> Any:
    """A MooncakeKVManager that holds only what send_kvcache reads; made without starting its threads."""
    conn.get_memory = lambda: SimpleNamespace(enable_unified_memory=False)
    made: Any = object.__new__(conn.MooncakeKVManager)
    made.kv_args, made.engine, made.state_strides_validated = kv_args, engine, set()
    made.is_mla_backend, made.is_hybrid_mla_backend, made.attn_tp_size, made.pp_size = True, False, 1, 1
    made.enable_custom_mem_pool, made.custom_mem_pool_type = False, None
    made.max_transfer_batch_indices = envs.SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES.get()
    made.enable_deferred_decode_kv_release = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE.get()
    return made


def workers() -> int:
    """Threads of each transfer queue under SGLang's own settings."""
    default = min(max(4, (os.cpu_count() or 1) // 16), 12)
    pool = envs.SGLANG_DISAGGREGATION_THREAD_POOL_SIZE.get() or default
    return pool // envs.SGLANG_DISAGGREGATION_QUEUE_SIZE.get()


def make_planner(engine: Recorder) -> Callable[..., None]:
    """plan(source, host, device page ids): SGLang's two index lists, chosen by `dst_ptr in set`."""
    count = len(inputs.PAGE_BYTES)
    ratios = [4] * inputs.HOST_REGIONS + [128] * (count - 2 * inputs.HOST_REGIONS)
    kv_args = SimpleNamespace(
        kv_data_ptrs=[inputs.base(inputs.SRC_BASE, k) for k in range(count)],
        kv_item_lens=list(inputs.PAGE_BYTES),
        kv_layer_ids=[],
        num_draft_entries=0,
        mla_compression_ratios=ratios,
        prefill_start_layer=0,
        prefill_end_layer=len(ratios),
    )
    sender, executor = manager(kv_args, engine), ThreadPoolExecutor(workers())
    destinations = [inputs.base(inputs.DST_BASE, k) for k in range(count)]

    def plan(source: Any, host: Any, device: Any) -> None:
        status = sender.send_kvcache(
            "session", source, destinations, host, executor, dst_layer_ids=[], dst_device_kv_indices=device
        )
        if status != 0:
            raise RuntimeError(f"send_kvcache returned {status}")

    return plan


def timed(run: Callable[[], None], engine: Recorder) -> tuple[float, float]:
    """(best, median) seconds; each call frees the lists of the one before, as an engine's caller would."""
    times = []
    stop = time.perf_counter() + 3.0
    run()
    while len(times) < 7 or (time.perf_counter() < stop and len(times) < 500):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times), statistics.median(times)


def main() -> None:
    rows = []
    engine = Recorder()
    plan = make_planner(engine)
    for mode in ("on", "frozen"):  # SGLang's server freezes what is alive after warm-up; "on" is Python's default
        gc.collect()
        if mode == "frozen":
            gc.freeze()
        for n in inputs.PAGES:
            for pattern in inputs.PATTERNS:
                pages = inputs.request(n, pattern)
                plan(*pages)
                count = len(engine.last[0])
                best, median = timed(lambda pages=pages: plan(*pages), engine)
                row = {"pages": n, "pattern": pattern, "gc": mode, "descriptors": count}
                rows.append(row | {"best_s": best, "median_s": median})
                print(f"SGLang, gc {mode}: {n} pages, {pattern}: {1e3 * median:.3f} ms", file=sys.stderr, flush=True)
    json.dump(rows, sys.stdout)


if __name__ == "__main__":
    main()
