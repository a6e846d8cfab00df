"""SGLang's own DeepSeek-V4 pools and HiSparse allocators, on a CPU, for the two-process run.

The host pool is made as HiSparseCoordinator makes it, but for pinned memory, which needs CUDA: with its default,
DeepSeekV4PagedHostPool ends in `torch.cuda.cudart()` (mem_cache/pool_host/common.py:147, `_cuda_host_register`), and
so does the coordinator, without which `DecodePreallocQueue.pop_preallocated` allocates nothing for HiSparse. What it
calls then, the host pool's and the logical allocator's own `alloc` functions, is called here.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import torch

RATIOS = [0, 0, 4, 128, 4, 128, 4, 128]
PAGES, PAGE_SIZE = 100, 256
_KEPT: list[Any] = []  # pools whose memory is viewed


def _pool(hisparse: bool) -> Any:
    from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool

    return DeepSeekV4TokenToKVPool(
        max_num_reqs=4, swa_size=PAGES * PAGE_SIZE, c4_size=PAGES * 64, c128_size=PAGES * 2, c4_state_pool_size=64,
        c128_state_pool_size=64, page_size=PAGE_SIZE, swa_page_size=PAGE_SIZE, dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32, c128_state_dtype=torch.float32, qk_nope_head_dim=448, qk_rope_head_dim=64,
        indexer_head_dim=128, layer_num=len(RATIOS), device="cpu", enable_memory_saver=False,
        compression_ratios=RATIOS, enable_hisparse=hisparse,
    )  # fmt: skip


def _views(infos: tuple[list[int], list[int], list[int]]) -> list[np.ndarray]:
    """uint8 [pages, page bytes] over each buffer."""
    return [np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(base)).reshape(-1, item)
            for base, nbytes, item in zip(*infos, strict=True)]  # fmt: skip


def prefill() -> list[np.ndarray]:
    """The buffers of a prefill process's pool, filled with bytes that are the same in each process."""
    pool = _pool(hisparse=False)
    _KEPT.append(pool)
    views = _views(pool.get_contiguous_buf_infos())
    rng = np.random.default_rng(11)
    for view in views:
        view[:] = rng.integers(1, 255, view.shape, dtype=np.uint8)
    return views


class Decode:
    """The pools of a decode process with HiSparse, and its allocators.

    Attributes:
        views: C4 KV in host memory, then the indexer and C128 KV on the device: as DecodePreallocQueue registers them.
    """

    def __init__(self) -> None:
        from sglang.srt.mem_cache.allocator.hisparse import DeepSeekV4HiSparseTokenToKVPoolAllocator
        from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool_host import DeepSeekV4PagedHostPool

        self.pool = _pool(hisparse=True)
        c4 = self.pool.c4_kv_pool
        self.host = DeepSeekV4PagedHostPool(
            pool_name="dsv4_hisparse_c4", device_buffers=c4.kv_buffer, item_bytes=c4.bytes_per_page_padded,
            num_host_pages=PAGES, slot_page_size=c4.page_size, layout="layer_first", pin_memory=False,
        )  # fmt: skip
        size = PAGES * PAGE_SIZE
        logical = SWATokenToKVPoolAllocator(size, size, PAGE_SIZE, torch.uint8, "cpu", self.pool, False)
        self.allocator = DeepSeekV4HiSparseTokenToKVPoolAllocator(logical)
        device = self.pool.get_contiguous_buf_infos()
        columns = [mine + theirs[self.host.layer_num :]
                   for mine, theirs in zip(self.host.get_contiguous_buf_infos(), device, strict=True)]  # fmt: skip
        self.views = _views(tuple(columns))  # type: ignore[arg-type]

    def allocate(self, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        """(host page ids, logical device page ids) of a new request; int32, one a prefill page."""
        from sglang.srt.mem_cache.common import kv_to_page_indices

        none, count, before = (torch.tensor([value], dtype=torch.int64) for value in (0, tokens, -1))
        slots = self.allocator.alloc_logical_only(none, none, count, count, before, tokens)
        assert slots is not None
        host_slots = self.host.alloc_page(-(-tokens // PAGE_SIZE))
        host = kv_to_page_indices(host_slots, self.host.page_size)
        return host.astype(np.int32), kv_to_page_indices(slots, PAGE_SIZE).astype(np.int32)

    def shuffle(self, seed: int) -> None:
        """Free everything, and put the free lists in random order, as they are after many requests."""
        generator = torch.Generator().manual_seed(seed)
        self.host.clear()
        self.host.free_slots = self.host.free_slots.view(-1, self.host.page_size)[
            torch.randperm(PAGES, generator=generator)
        ].flatten()  # fmt: skip
        self.allocator.clear()
        logical = self.allocator.logical_attn_allocator.full_attn_allocator
        logical.free_pages = logical.free_pages[torch.randperm(len(logical.free_pages), generator=generator)]
