"""SGLang's Mooncake and Ascend managers, with and without kvplan, without threads or engine: for calls by hand."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.ascend.conn import AscendKVManager
from sglang.srt.disaggregation.mooncake import conn

from kvplan.integrations.sglang.ascend import PlannedAscendManager
from kvplan.integrations.sglang.mooncake import PlannedMooncakeManager

EXECUTOR = ThreadPoolExecutor(2)
PAGES = 64  # of every buffer

Descriptor = tuple[int, int, int]


class Recorder:
    """An engine that keeps what it is given, call by call."""

    def __init__(self) -> None:
        self.calls: list[list[Descriptor]] = []
        self.answer = 0

    def batch_transfer_sync(self, _session: str, src: list[int], dst: list[int], nbytes: list[int]) -> int:
        """Keep a batch."""
        self.calls.append(list(zip(src, dst, nbytes, strict=True)))
        return self.answer


def kv_args(**fields: Any) -> SimpleNamespace:
    """KVArgs with defaults for what a test does not say."""
    defaults = {
        "kv_data_ptrs": [], "kv_item_lens": [], "kv_layer_ids": [], "num_draft_entries": 0, "page_size": 1,
        "mla_compression_ratios": None, "prefill_start_layer": 0, "prefill_end_layer": None, "engine_rank": 0,
        "kv_head_num": 1, "total_kv_head_num": 1, "swa_kv_cache_layout": "nhd", "state_data_ptrs": [],
        "state_data_lens": [], "state_item_lens": [], "state_types": [], "gpu_id": 0,
    }  # fmt: skip
    made = SimpleNamespace(**(defaults | fields))
    made.kv_data_lens = [PAGES * each for each in made.kv_item_lens]
    return made


MOONCAKE = (conn.MooncakeKVManager, PlannedMooncakeManager)
ASCEND = (AscendKVManager, PlannedAscendManager)


def manager(planned: bool, args: SimpleNamespace, classes: tuple[type, type] = MOONCAKE, **fields: Any) -> Any:
    """A manager that holds what planning reads. `classes`: SGLang's, and kvplan's in its place."""
    conn.get_memory = lambda: SimpleNamespace(enable_unified_memory=False)
    made: Any = object.__new__(classes[planned])
    if planned:
        made.set_up()
    defaults = {
        "kv_args": args, "engine": Recorder(), "state_strides_validated": set(), "is_mla_backend": True,
        "is_hybrid_mla_backend": False, "attn_tp_size": 1, "state_tp_size": 1, "pp_size": 1,
        "enable_custom_mem_pool": False, "custom_mem_pool_type": None, "max_transfer_batch_indices": 0,
        "enable_deferred_decode_kv_release": False, "decode_kv_args_table": {}, "request_status": {},
        "transfer_infos": {},
    }  # fmt: skip
    for name, value in (defaults | fields).items():
        setattr(made, name, value)
    return made


def merged(calls: list[list[Descriptor]]) -> list[Descriptor]:
    """Which byte goes where: descriptors by destination, those that continue one another joined."""
    found: list[Descriptor] = []
    for src, dst, nbytes in sorted((d for call in calls for d in call), key=lambda d: d[1]):
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == (src, dst):
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + nbytes)
        else:
            found.append((src, dst, nbytes))
    return found


def bases(rng: random.Random, sizes: list[int], start: int) -> list[int]:
    """Where buffers of these page sizes lie, in no order and with gaps."""
    order = list(range(len(sizes)))
    rng.shuffle(order)
    found, at = [0] * len(sizes), start
    for number in order:
        at += rng.randrange(0, 4096, 64)
        found[number] = at
        at += PAGES * max(sizes[number], 1)
    return found


def ids(rng: random.Random, count: int, pages: int = PAGES) -> np.ndarray:
    """Distinct page ids, int32, partly in runs."""
    if rng.random() < 0.5:
        return np.array(rng.sample(range(pages), count), np.int32)
    starts = list(range(0, pages, 4))
    rng.shuffle(starts)
    return np.array([s + k for s in starts for k in range(4)][:count], np.int32)
