"""A plugin of SGLang's: what its servers need to run on a CPU, and hooks that show what a transfer moved.

REAL_SERVERS_TAP      a folder: each process writes there every KV row of each request, on both sides.
REAL_SERVERS_SCATTER  shuffles the allocators' free lists, so that the pages of a request lie apart.
REAL_SERVERS_FAULT    "swap": two destination pages of every chunk change places. The comparison must then fail.
"""

import ctypes
import inspect
import os
import pickle
import threading

_lock = threading.Lock()


def load():
    """Called by SGLang in each process."""
    if os.environ.get("SGLANG_USE_CPU_ENGINE") != "1":
        return
    _no_cuda()
    if os.environ.get("REAL_SERVERS_SCATTER"):
        _scatter()
    if os.environ.get("REAL_SERVERS_TAP"):
        _tap()
    if os.environ.get("REAL_SERVERS_FAULT"):
        _swap()


def _no_cuda():
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    MooncakeKVSender.supports_host_tensor_indices = False  # else page ids go through pinned memory and CUDA events
    from sglang.srt.distributed.parallel_state import GroupCoordinator

    made = GroupCoordinator.__init__

    def without_nccl(self, *args, **kwargs):
        bound = inspect.signature(made).bind(self, *args, **kwargs)
        bound.arguments["use_pynccl"] = False
        made(*bound.args, **bound.kwargs)

    GroupCoordinator.__init__ = without_nccl
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    AttentionBackendRegistry.register("torch_native", lambda _attention, _batch: AttnForwardMethod.MLA)


def _scatter():
    import torch
    from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
    from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator

    for allocator in (PagedTokenToKVPoolAllocator, TokenToKVPoolAllocator):

        def clear(self, before=allocator.clear):
            before(self)
            generator = torch.Generator().manual_seed(os.getpid())
            self.free_pages = self.free_pages[torch.randperm(len(self.free_pages), generator=generator)]

        allocator.clear = clear


def _write(kind, **record):
    path = os.path.join(os.environ["REAL_SERVERS_TAP"], f"{os.getpid()}.pickle")
    with _lock, open(path, "ab") as file:
        pickle.dump(record | {"kind": kind}, file)


def _rows(scheduler, request, kind):
    """Every KV row of a request that this rank holds, by (buffer, layer) and position."""
    from sglang.srt.runtime_context import get_parallel

    allocator = scheduler.token_to_kv_pool_allocator
    pool = allocator.get_kvcache()
    pointers, _, sizes = pool.get_contiguous_buf_infos()
    tokens = len(request.origin_input_ids)
    slots = scheduler.req_to_token_pool.req_to_token[request.kv.req_pool_idx, :tokens].tolist()
    rows = {}
    for number, (base, size) in enumerate(zip(pointers, sizes, strict=True)):
        width = size // allocator.page_size
        key = (number // pool.layer_num, pool.start_layer + number % pool.layer_num)  # all K layers, then all V layers
        rows[key] = [ctypes.string_at(base + slot * width, width) for slot in slots]
    rank = (get_parallel().pp_rank, get_parallel().tp_rank)
    _write(kind, room=request.bootstrap_room, rank=rank, tokens=tokens, rows=rows)


def _tap():
    from sglang.srt.disaggregation.decode import DecodeTransferQueue
    from sglang.srt.managers.scheduler import Scheduler

    commit, chunk = DecodeTransferQueue._commit_transfer_to_req, Scheduler.send_kv_chunk

    def _commit_transfer_to_req(self, decode_request):  # all has arrived, nothing is decoded yet
        _rows(self.scheduler, decode_request.req, "got")
        return commit(self, decode_request)

    def send_kv_chunk(self, request, last_chunk=False, end_idx=None):
        if last_chunk:  # all KV of the prompt has been computed
            _rows(self, request, "had")
        return chunk(self, request, last_chunk=last_chunk, end_idx=end_idx)

    DecodeTransferQueue._commit_transfer_to_req = _commit_transfer_to_req
    Scheduler.send_kv_chunk = send_kv_chunk


def _swap():
    """Change page ids where they come from the peer: whoever plans then plans for the wrong pages."""
    from sglang.srt.disaggregation.mooncake.conn import TransferInfo

    read = TransferInfo.from_zmq.__func__

    def from_zmq(cls, message):
        info = read(cls, message)
        if len(info.dst_kv_indices) > 1:
            info.dst_kv_indices = info.dst_kv_indices.copy()
            info.dst_kv_indices[[0, 1]] = info.dst_kv_indices[[1, 0]]
        return info

    TransferInfo.from_zmq = classmethod(from_zmq)
