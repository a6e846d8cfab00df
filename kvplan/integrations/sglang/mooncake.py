"""SGLang's Mooncake manager, planning with kvplan."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager, _uses_flat_entry_layout
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_byte_blocks

from kvplan import Interleave, LayoutError, Pairing, PairingError, Plan, PlanError, Request

from . import handover, names, regions
from .guarded import GuardedManager
from .names import NotToldError
from .pairings import Pairings
from .regions import DEVICE, HOST, Buffers

logger = logging.getLogger("kvplan.sglang")

#: What is planned by kvplan; the rest is named in docs/sglang.md.
SERVED = (
    "send_kvcache", "send_kvcache_slice", "send_kvcache_dcp", "_send_kvcache_generic", "_send_swa_state_slice",
    "_send_mamba_state_slice",
)  # fmt: skip

REFUSALS = (PlanError, PairingError, LayoutError, NotToldError)


class PlannedMooncakeManager(GuardedManager, Pairings):
    """MooncakeKVManager whose descriptors kvplan plans.

    A request that cannot be planned fails its own room, with the reason, before anything of the chunk is sent. What the
    engine returns keeps SGLang's meaning. Bytes, calls and threads are otherwise as SGLang has them.
    """

    _sglang: type = MooncakeKVManager  # the class that this one takes the place of

    def __init__(self, args: Any, disaggregation_mode: Any, *rest: Any, **more: Any) -> None:
        self.set_up()  # before SGLang starts its threads
        super().__init__(args, disaggregation_mode, *rest, **more)
        logger.warning("kvplan plans for %s (%s): %s", self._sglang.__qualname__, disaggregation_mode.value,
                       ", ".join(SERVED))  # fmt: skip

    def send_kvcache(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: np.ndarray,
        dst_kv_ptrs: list[int],
        dst_kv_indices: np.ndarray,
        executor: Any,
        dst_layer_ids: list[int] | None = None,
        dst_device_kv_indices: np.ndarray | None = None,
        dst_kv_item_len: int | None = None,
        dst_attn_tp_size: int | None = None,
    ) -> int:
        """Whole pages, in one or two index spaces."""
        if self._failed(self.current.room):
            return 0
        two = dst_device_kv_indices is not None
        try:
            pairing = self.peers.kept(mooncake_session_id, two, dst_kv_ptrs)
            if pairing is None:
                self._validate_envelope_kv_layout(dst_kv_ptrs, dst_kv_item_len, dst_attn_tp_size)
                made = self._pair_kv(mooncake_session_id, dst_kv_ptrs, dst_layer_ids or [], two)
                pairing = self.peers.keep(mooncake_session_id, two, dst_kv_ptrs, made)
            lists: dict[str, Any]
            if not two:
                lists = {DEVICE: dst_kv_indices}
            elif len(pairing.space_names) == 2:
                lists = {HOST: dst_kv_indices, DEVICE: dst_device_kv_indices}
            else:  # what decode has beside, this side does not send
                lists = {space: {HOST: dst_kv_indices, DEVICE: dst_device_kv_indices}[space]
                         for space in pairing.space_names}  # fmt: skip
            batches = self._plan(pairing, prefill_kv_indices, lists)
        except (*REFUSALS, RuntimeError) as error:
            return self._refuse(error)
        self.notes.plan("send_kvcache")
        return self._send(mooncake_session_id, batches, executor)

    def send_kvcache_slice(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: np.ndarray,
        dst_kv_ptrs: list[int],
        dst_kv_indices: np.ndarray,
        dst_tp_rank: int,
        dst_attn_tp_size: int,
        dst_kv_item_len: int,
        executor: Any,
        dst_layer_ids: list[int] | None = None,
    ) -> int:
        """Rows of which only some heads go to this decode rank."""
        if self._failed(self.current.room):
            return 0

        def make() -> Pairing:
            src, dst, _ = self._kv_buffers(mooncake_session_id, dst_kv_ptrs, dst_layer_ids or [], dst_kv_item_len)
            return regions.heads(src, dst, self.kv_args.page_size, *self._heads(dst_attn_tp_size, dst_tp_rank))

        try:
            key = ("heads", dst_tp_rank, dst_attn_tp_size, dst_kv_item_len)
            pairing = self.peers.pairing(mooncake_session_id, key, dst_kv_ptrs, make)
            plan = pairing.plan(prefill_kv_indices, {DEVICE: dst_kv_indices})
        except REFUSALS as error:
            return self._refuse(error)
        self.notes.plan("send_kvcache_slice")
        return self._hand_over(mooncake_session_id, plan.table.numpy())

    def send_kvcache_dcp(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: np.ndarray,
        dst_kv_ptrs: list[int],
        dst_kv_indices: np.ndarray,
        *,
        dcp_token_item_lens: list[int],
        dst_dcp_size: int,
        dst_dcp_rank: int,
        src_page_offset: int,
        decode_prefix_len: int,
        num_kv_tokens: int,
        executor: Any,
        dst_layer_ids: list[int],
        pack_buffer: Any = None,
        dst_kv_item_lens: list[int] | None = None,
        dst_tp_rank: int = 0,
        dst_attn_tp_size: int | None = None,
    ) -> int:
        """Rows for one rank of decode context parallelism."""
        room = self.current.room
        if self._failed(room):
            return 0
        info = None if room is None else self.transfer_infos.get(room, {}).get(mooncake_session_id)
        device_ids = getattr(info, "kvplan_device_ids", None)
        two = device_ids is not None
        page_size = self.kv_args.page_size

        def make() -> Pairing:
            dst_tp = self.attn_tp_size if dst_attn_tp_size is None else dst_attn_tp_size
            if not dst_kv_item_lens and self.kv_args.num_draft_entries and dst_tp != self.attn_tp_size:
                raise NotToldError("decode does not say how wide a draft row is, and its TP size differs")
            draft = regions.Draft(
                self.attn_tp_size, self.kv_args.engine_rank, dst_tp, dst_tp_rank, not self.is_mla_backend
            )
            if getattr(self.kv_args, "mla_compression_ratios", None):
                raise NotToldError("rows of compressed pages cannot be told apart, and DCP moves rows")
            src, dst, _ = self._kv_buffers(
                mooncake_session_id, dst_kv_ptrs, dst_layer_ids or [], None, dst_kv_item_lens
            )
            if not dst_kv_item_lens:
                scale = [page_size * (dst_dcp_size if name == "draft" else 1) for name, _ in dst.keys]
                row = dict(zip(src.keys, dcp_token_item_lens, strict=True))
                widths = [row.get(key, 0) * each for key, each in zip(dst.keys, scale, strict=True)]
                dst = Buffers(dst.keys, dst.bases, widths, [None] * len(widths)).without(lambda key: key not in row)
            return regions.interleaved(src, dst, page_size, Interleave(dst_dcp_size, dst_dcp_rank), draft, two)

        try:
            if num_kv_tokens is None:
                raise PlanError("rows are to be sent, and SGLang does not say how many tokens the chunk has")
            key = ("dcp", dst_dcp_size, dst_dcp_rank, dst_tp_rank, dst_attn_tp_size, two)
            pairing = self.peers.pairing(mooncake_session_id, key, dst_kv_ptrs, make)
            given = {HOST: dst_kv_indices, DEVICE: device_ids} if two else {DEVICE: dst_kv_indices}
            plan = pairing.plan(
                prefill_kv_indices,
                {space: given[space] for space in pairing.space_names},
                src_start=decode_prefix_len + src_page_offset * page_size,
                dst_start=decode_prefix_len,
                num_tokens=num_kv_tokens,
            )
        except REFUSALS as error:
            return self._refuse(error)
        self.notes.plan("send_kvcache_dcp")
        return self._send(mooncake_session_id, [plan], executor)

    def _send_kvcache_generic(
        self,
        mooncake_session_id: str,
        src_data_ptrs: list[int],
        dst_data_ptrs: list[int],
        item_lens: list[int],
        prefill_data_indices: np.ndarray,
        dst_data_indices: np.ndarray,
        executor: Any,
        state_type: Any = None,
        force_flat: bool = False,
        src_layer_ids: list[int] | None = None,
        dst_layer_ids: list[int] | None = None,
        dst_device_data_indices: np.ndarray | None = None,
        dst_device_data_ptrs: set[int] | None = None,
        dst_item_lens: list[int] | None = None,
        bootstrap_room: int | None = None,
    ) -> int:
        """State components that move in whole pages."""
        if self._failed(self.current.room):
            return 0
        kind = getattr(state_type, "value", state_type)

        def make() -> Pairing:
            flat = _uses_flat_entry_layout(
                mla_backend=self.is_mla_backend or self.is_hybrid_mla_backend, force_flat=force_flat,
                has_layer_ids=bool(src_layer_ids or dst_layer_ids), state_type=state_type,
                num_src_entries=len(src_data_ptrs), num_dst_entries=len(dst_data_ptrs),
            )  # fmt: skip
            keys, other_keys = names.of_state(
                self._model(flat), kind, len(src_data_ptrs), len(dst_data_ptrs), src_layer_ids or [],
                dst_layer_ids or [],
            )  # fmt: skip
            return self._pair_state(
                kind, keys, other_keys, src_data_ptrs, dst_data_ptrs, item_lens, dst_item_lens, flat
            )

        try:
            pairing = self.peers.pairing(mooncake_session_id, ("state", kind, id(src_data_ptrs)), dst_data_ptrs, make)
            batches = self._plan(pairing, prefill_data_indices, {DEVICE: dst_data_indices})
        except REFUSALS as error:
            return self._refuse(error)
        self.notes.plan("_send_kvcache_generic")
        return self._send(mooncake_session_id, batches, executor)

    def _send_swa_state_slice(
        self,
        req: Any,
        prefill_swa_page_indices: list[int],
        src_state_data_ptrs: list[int],
        src_state_item_lens: list[int],
        dst_state_data_ptrs: list[int],
        dst_swa_page_indices: list[int],
        dst_state_item_lens: list[int],
        dst_tp_rank: int,
        dst_attn_tp_size: int,
        executor: Any,
    ) -> int:
        """Heads of the sliding window's rows."""
        session = req.mooncake_session_id

        def make() -> Pairing:
            if self.pp_size > 1:
                raise NotToldError("the sliding window's entries have no layers, and this is a pipeline stage")
            if self.kv_args.swa_kv_cache_layout != "nhd":
                raise NotToldError(f"the sliding window's pages are {self.kv_args.swa_kv_cache_layout}, not nhd")
            keys, other_keys = names.of_state(
                self._model(False), "swa", len(src_state_data_ptrs), len(dst_state_data_ptrs), [], []
            )
            src = self._state(keys, src_state_data_ptrs, src_state_item_lens)
            dst = Buffers(other_keys, dst_state_data_ptrs, dst_state_item_lens, [None] * len(other_keys))
            return regions.heads(src, dst, self.kv_args.page_size, *self._heads(dst_attn_tp_size, dst_tp_rank))

        try:
            key = ("state heads", id(src_state_data_ptrs), dst_tp_rank, dst_attn_tp_size)
            pairing = self.peers.pairing(session, key, dst_state_data_ptrs, make)
            plan = pairing.plan(list(prefill_swa_page_indices), {DEVICE: list(dst_swa_page_indices)})
        except REFUSALS as error:
            return self._refuse(error)
        self.notes.plan("_send_swa_state_slice")
        return self._hand_over(session, plan.table.numpy())

    def _send_mamba_state_slice(
        self,
        req: Any,
        prefill_mamba_index: list[int],
        src_state_data_ptrs: list[int],
        src_state_item_lens: list[int],
        src_state_dim_per_tensor: list[int],
        dst_state_data_ptrs: list[int],
        dst_mamba_index: list[int],
        dst_state_item_lens: list[int],
        dst_state_dim_per_tensor: list[int],
        dst_tp_rank: int,
        dst_attn_tp_size: int,
        src_state_conv_shard_groups: list[Any] | None = None,
        src_state_slice_outer_counts: list[int] | None = None,
        src_layer_ids: list[int] | None = None,
        dst_layer_ids: list[int] | None = None,
    ) -> int:
        """Parts of one slot a side: sub-blocks of the convolution, heads of the recurrent state."""
        if not src_state_dim_per_tensor or not dst_state_dim_per_tensor:
            self.notes.leave("_send_mamba_state_slice", "no slice dimensions are given")
            return super()._send_mamba_state_slice(
                req, prefill_mamba_index, src_state_data_ptrs, src_state_item_lens, src_state_dim_per_tensor,
                dst_state_data_ptrs, dst_mamba_index, dst_state_item_lens, dst_state_dim_per_tensor, dst_tp_rank,
                dst_attn_tp_size, src_state_conv_shard_groups, src_state_slice_outer_counts, src_layer_ids,
                dst_layer_ids,
            )  # fmt: skip
        session = req.mooncake_session_id

        def blocks(i: int, j: int) -> list[tuple[int, int, int]]:
            groups, outer = src_state_conv_shard_groups or [], src_state_slice_outer_counts or []
            return compute_mamba_state_slice_byte_blocks(
                src_item_len=src_state_item_lens[i], dst_item_len=dst_state_item_lens[j],
                src_dim=src_state_dim_per_tensor[i], dst_dim=dst_state_dim_per_tensor[j],
                outer_count=outer[i] if i < len(outer) else 1, src_attn_tp_size=self.state_tp_size,
                dst_attn_tp_size=dst_attn_tp_size, dst_tp_rank_in_group=dst_tp_rank % dst_attn_tp_size,
                local_tp_rank_in_group=self.kv_args.engine_rank % self.state_tp_size,
                conv_shard_groups=groups[i] if i < len(groups) else None,
            )  # fmt: skip

        def make() -> Pairing:
            keys, other_keys = names.of_state(
                self._model(False), "mamba", len(src_state_data_ptrs), len(dst_state_data_ptrs), src_layer_ids or [],
                dst_layer_ids or [],
            )  # fmt: skip
            src = self._state(keys, src_state_data_ptrs, src_state_item_lens)
            dst = Buffers(other_keys, dst_state_data_ptrs, dst_state_item_lens, [None] * len(other_keys))
            return regions.blocks(src, dst, blocks)

        try:
            key = ("mamba", id(src_state_data_ptrs), dst_tp_rank, dst_attn_tp_size)
            pairing = self.peers.pairing(session, key, dst_state_data_ptrs, make)
            plan = (
                pairing.plan(list(prefill_mamba_index), {DEVICE: list(dst_mamba_index)})
                if pairing.space_names
                else None
            )
        except (*REFUSALS, ValueError) as error:
            return self._refuse(error)
        self.notes.plan("_send_mamba_state_slice")
        return 0 if plan is None else self._hand_over(session, plan.table.numpy())

    def _plan(self, pairing: Pairing, source: np.ndarray, lists: dict[str, Any]) -> list[Plan]:
        """The whole chunk's plans, before the first is sent: one, or one for each batch of indices."""
        if not pairing.space_names:
            return []
        most = self.max_transfer_batch_indices
        if most <= 0 or len(source) <= most or self._by_entry():
            return [pairing.plan(source, lists)]
        starts = range(0, len(source), most)
        for space, ids in lists.items():
            if len(ids) != len(source):
                raise PlanError(f"{len(source)} source pages, and {len(ids)} of space {space!r}")
        plan = pairing.plan_batch(
            [Request(source[at : at + most], {space: ids[at : at + most] for space, ids in lists.items()})
             for at in starts]
        )  # fmt: skip
        return [plan.request(number) for number in range(len(starts))]

    def _by_entry(self) -> bool:
        """Whether SGLang makes a call a layer: with a memory pool of its own."""
        return self.enable_custom_mem_pool and self.custom_mem_pool_type != "INTRA_NODE_NVLINK"

    def _send(self, session: str, plans: Sequence[Plan], executor: Any) -> int:
        if not self._by_entry():
            for plan in plans:
                code = self._hand_over(session, plan.table.numpy())
                if code != 0:
                    return code
            return 0
        parts: deque[np.ndarray] = deque()
        for plan in plans:
            table = plan.table.numpy()
            parts += [table[:, start:stop] for start, stop in itertools.pairwise(plan.entry_cuts()) if stop > start]
        # A future a thread, not a future a call: with few pages, futures would cost more than planning.
        threads = min(len(parts), getattr(executor, "_max_workers", 1))
        return self._await_transfer_futures(
            [executor.submit(self._hand_over_parts, session, parts) for _ in range(threads)]
        )

    def _hand_over_parts(self, session: str, parts: deque[np.ndarray]) -> int:
        """Hand over parts of tables, a call each, until none is left or a call fails. Threads share the parts."""
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                return 0
            code = self._hand_over(session, part)
            if code != 0:
                parts.clear()
                return code

    def _hand_over(self, session: str, table: np.ndarray) -> int:
        if self.handed is None:
            self.handed = handover.Engine(self.engine, self._sglang is MooncakeKVManager)
        code = self.handed.send(session, table)
        if code != 0:
            self.peers.forget(session)
        return code
