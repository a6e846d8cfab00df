"""State components of SGLang over Mooncake: whole pages, heads of a sliding window, Mamba's sub-blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
from sglang.srt.disaggregation.mooncake.conn import _uses_flat_entry_layout
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_byte_blocks

from kvplan import Pairing

from . import names, regions
from .names import NotToldError
from .regions import DEVICE, Buffers
from .sending import REFUSALS, Sending


class PlannedStates(Sending):
    """SGLang's functions that send state components."""

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
