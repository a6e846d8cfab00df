"""SGLang's own pools for two processes: Ascend's of latent attention with index keys; DeepSeek-V4's, with HiSparse's
allocators through its own preallocation queue.

One call is left out, since it needs CUDA: `_cuda_host_register` (mem_cache/pool_host/common.py:147,
`cudart = torch.cuda.cudart()`), which locks host pages in memory for a GPU. With it HiSparseCoordinator cannot be made
on a CPU; test_own_pools.py shows that it ends there. All else of the coordinator, its host pool, the allocators and
`DecodePreallocQueue.pop_preallocated` runs as it is. The queue is made without its constructor, which asks for a
Scheduler, and so for a model; its fields are SGLang's own objects, but for the scheduler's.
"""

from __future__ import annotations

import ctypes
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

RATIOS = [0, 0, 4, 128, 4, 128, 4, 128]
PAGES, PAGE_SIZE, WINDOW = 100, 256, 128
WINDOW_PAGES = 16  # of the sliding window's pool
REQUESTS = 4
_KEPT: list[Any] = []  # pools whose memory is viewed

Infos = tuple[list[int], list[int], list[int]]  # addresses, bytes and bytes of an item of each buffer


def _pool(hisparse: bool) -> Any:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=REQUESTS, swa_size=WINDOW_PAGES * PAGE_SIZE, c4_size=PAGES * 64, c128_size=PAGES * 2,
        c4_state_pool_size=WINDOW_PAGES * 8, c128_state_pool_size=64, page_size=PAGE_SIZE, swa_page_size=PAGE_SIZE,
        dtype=torch.float8_e4m3fn, c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=448,
        qk_rope_head_dim=64, indexer_head_dim=128, layer_num=len(RATIOS), device="cpu", enable_memory_saver=False,
        compression_ratios=RATIOS, enable_hisparse=hisparse,
    )  # fmt: skip
    _KEPT.append(pool)
    return pool


def _views(infos: Infos) -> list[np.ndarray]:
    """uint8 [items, item bytes] over each buffer; compressor state has rows behind its last whole item."""
    return [np.ctypeslib.as_array((ctypes.c_uint8 * (nbytes // item * item)).from_address(base)).reshape(-1, item)
            for base, nbytes, item in zip(*infos, strict=True)]  # fmt: skip


def _fill(views: list[np.ndarray], seed: int) -> None:
    rng = np.random.default_rng(seed)
    for view in views:
        view[:] = rng.integers(1, 255, view.shape, dtype=np.uint8)


class LatentNpu:
    """Ascend's pool of latent attention with index keys, of one process: SGLang's own, on a CPU.

    Attributes:
        pool: SGLang's.
        views: K of all layers, then rope keys, then index keys; of these a decode rank of DCP holds all pages.
    """

    def __init__(self, items: int, page_size: int, layers: int) -> None:
        from sglang.srt.hardware_backend.npu.memory_pool_npu import NPUMLATokenToKVPool
        from sglang.srt.runtime_context import get_parallel

        slots = (items - 1) * page_size
        self.pool = NPUMLATokenToKVPool(
            size=slots, index_size=slots * get_parallel().attn_dcp_size, page_size=page_size, dtype=torch.bfloat16,
            kv_lora_rank=512, qk_rope_head_dim=64, index_head_dim=128, layer_num=layers, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        self.views = _views(self.pool.get_contiguous_buf_infos())


class Pools:
    """The pool of one process.

    Attributes:
        pool: SGLang's.
        states: buffers of each state component: window with the state of C4 layers, then state of C128 layers.
    """

    def __init__(self, hisparse: bool) -> None:
        self.pool = _pool(hisparse)
        self.states = [_views(self.pool.get_state_buf_infos()), _views(self.pool.get_request_state_buf_infos())]

    def describe_states(self, args: Any) -> None:
        """Have SGLang write the state components into its KVArgs."""
        from sglang.srt.disaggregation.utils import setup_state_kv_args

        setup_state_kv_args(args, self.pool)


class Prefill(Pools):
    """The pool of a prefill process, filled with bytes that are the same in each process.

    Attributes:
        views: KV buffers, in SGLang's order.
    """

    def __init__(self) -> None:
        super().__init__(hisparse=False)
        self.views = _views(self.pool.get_contiguous_buf_infos())
        for number, views in enumerate([self.views, *self.states]):
            _fill(views, 11 + number)

    def state_ids(self, room: int, tokens: int) -> list[np.ndarray]:
        """Item ids of a request in each state component: the window's last page, and a slot's row."""
        window = np.array([1 + room % (WINDOW_PAGES - 1)], np.int32)
        return [window, self.pool.request_state_transfer_indices(1 + room % REQUESTS, tokens)]


class Decode(Pools):
    """The pools of a decode process with HiSparse, and the queue that allocates pages of them for a request.

    Attributes:
        views: C4 KV in host memory, then the indexer and C128 KV on the device: as DecodePreallocQueue registers them.
    """

    def __init__(self) -> None:
        from sglang.srt.mem_cache.allocator.hisparse import DeepSeekV4HiSparseTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

        super().__init__(hisparse=True)
        sizes = (PAGES * PAGE_SIZE, WINDOW_PAGES * PAGE_SIZE)
        logical = SWATokenToKVPoolAllocator(*sizes, PAGE_SIZE, torch.uint8, "cpu", self.pool, False)
        self.allocator = DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)
        self.requests = ReqToTokenPool(REQUESTS, PAGES * PAGE_SIZE, "cpu", enable_memory_saver=False)
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        self.coordinator = self._coordinator()
        host, device = self.coordinator.mem_pool_host, self.pool.get_contiguous_buf_infos()
        columns = [mine + theirs[host.layer_num :]
                   for mine, theirs in zip(host.get_contiguous_buf_infos(), device, strict=True)]  # fmt: skip
        self.views = _views((columns[0], columns[1], columns[2]))

    def coordinator_as_it_is(self) -> Any:
        """SGLang's HiSparseCoordinator. Needs CUDA."""
        from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator

        return HiSparseCoordinator(self.requests, self.allocator, top_k=512, device_buffer_size=2048, device="cpu",
                                   tp_group=torch.distributed.group.WORLD)  # fmt: skip

    def _coordinator(self) -> Any:
        from sglang.srt.mem_cache.pool_host import common

        register = common._cuda_host_register
        common._cuda_host_register = lambda *_args, **_more: None
        try:
            return self.coordinator_as_it_is()
        finally:
            common._cuda_host_register = register

    def _queue(self, manager: Any) -> Any:
        from sglang.srt.disaggregation.decode import DecodePreallocQueue
        from sglang.srt.disaggregation.utils import ReqToMetadataIdxAllocator, TransferBackend
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.components import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

        tree = UnifiedRadixCache(CacheInitParams(
            disable=True, req_to_token_pool=self.requests, token_to_kv_pool_allocator=self.allocator,
            page_size=PAGE_SIZE, sliding_window_size=WINDOW, tree_components=(ComponentType.FULL, ComponentType.SWA),
        ))  # fmt: skip
        scheduler = SimpleNamespace(
            enable_hisparse=True, hisparse_coordinator=self.coordinator, running_batch=SimpleNamespace(reqs=[]),
            last_batch=None, waiting_queue=[], enable_priority_scheduling=False, enable_lora=False,
            enable_decode_hicache=False, sliding_window_size=WINDOW,
        )  # fmt: skip
        queue: Any = object.__new__(DecodePreallocQueue)
        fields = {
            "req_to_token_pool": self.requests, "token_to_kv_pool_allocator": self.allocator, "scheduler": scheduler,
            "token_to_kv_pool": self.pool, "draft_token_to_kv_pool": None, "tree_cache": tree, "kv_manager": manager,
            "req_to_metadata_buffer_idx_allocator": ReqToMetadataIdxAllocator(8), "pp_size": 1, "tp_rank": 0,
            "transfer_queue": SimpleNamespace(queue=[], enable_staging=False), "num_reserved_decode_tokens": 512,
            "gloo_group": torch.distributed.group.WORLD, "transfer_backend": TransferBackend.MOONCAKE, "queue": [],
            "pending_reqs": [], "retracted_queue": [], "_prefill_dp_rank_queries": {}, "_num_published_destinations": 0,
        }  # fmt: skip
        for name, value in fields.items():
            setattr(queue, name, value)
        return queue

    def preallocate(self, manager: Any, receiver: Any, room: int, tokens: int) -> None:
        """Have SGLang allocate pages for a request and send their ids: `pop_preallocated` with one request waiting.

        Everything is free before, and the free lists are in random order, as they are after many requests.
        """
        from sglang.srt.disaggregation.decode import DecodeRequest
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        self._shuffle(room)
        queue = self._queue(manager)
        request = Req(str(room), "", array("q", range(tokens)), SamplingParams(max_new_tokens=4), bootstrap_room=room)
        queue.queue.append(DecodeRequest(req=request, kv_receiver=receiver))
        taken, failed = queue.pop_preallocated()
        assert len(taken) == 1 and not failed and not queue.queue

    def _shuffle(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        host, logical = self.coordinator.mem_pool_host, self.allocator.logical_attn_allocator
        self.requests.clear()
        self.coordinator.req_to_host_pool.fill_(-1)
        self.coordinator.req_to_host_pool_allocated_len.zero_()
        host.clear()
        pages = host.free_slots.view(-1, host.page_size)
        host.free_slots = pages[torch.randperm(len(pages), generator=generator)].flatten()
        self.allocator.clear()
        for allocator in (logical.full_attn_allocator, logical.swa_attn_allocator):
            order = torch.randperm(len(allocator.free_pages), generator=generator)
            allocator.free_pages = allocator.free_pages[order]
