"""SGLang's Mooncake manager, planning with kvplan."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from kvplan import Interleave, Pairing, PlanError

from . import regions
from .names import NotToldError
from .page_sizes import Paged
from .regions import DEVICE, HOST, Buffers
from .sending import REFUSALS
from .states import PlannedStates

logger = logging.getLogger("kvplan.sglang")

#: What is planned by kvplan; the rest is named in docs/sglang.md.
SERVED = (
    "send_kvcache", "send_kvcache_slice", "send_kvcache_dcp", "_send_kvcache_generic", "_send_swa_state_slice",
    "_send_mamba_state_slice",
)  # fmt: skip


class PlannedMooncakeManager(PlannedStates):
    """MooncakeKVManager whose descriptors kvplan plans.

    A request that cannot be planned fails its own room, with the reason, before anything of the chunk is sent. What the
    engine returns keeps SGLang's meaning. Bytes, calls and threads are otherwise as SGLang has them.
    """

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
        other = self._pages_of(mooncake_session_id)
        if other is not None:
            return self._send_paged("send_kvcache", mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_layer_ids,
                                    other, None, executor, two)  # fmt: skip
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
        other = self._pages_of(mooncake_session_id)
        if other is not None:
            return self._send_paged("send_kvcache_slice", mooncake_session_id, prefill_kv_indices, dst_kv_ptrs,
                                    dst_layer_ids, other, (dst_attn_tp_size, dst_tp_rank), executor)  # fmt: skip

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

    def _send_paged(
        self,
        function: str,
        session: str,
        source: np.ndarray,
        pointers: list[int],
        layer_ids: list[int] | None,
        paged: Paged,
        ranks: tuple[int, int] | None,
        executor: Any,
        two: bool = False,
    ) -> int:
        """Rows, to a decode process with pages of another size. `ranks`: its TP size and rank, where heads differ."""
        page_size, ids = paged

        def make() -> Pairing:
            registered = self.decode_kv_args_table.get(session)
            if registered is None or not registered.dst_kv_item_lens:
                raise NotToldError("decode's pages have another size, and it does not say how many bytes each takes")
            self._validate_envelope_kv_layout(pointers, registered.dst_kv_item_len, registered.dst_attn_tp_size)
            src, dst, _ = self._kv_buffers(session, pointers, layer_ids or [], None, registered.dst_kv_item_lens)
            return self._pair_pages(src, dst, page_size, self._heads(*ranks) if ranks else (None, None))

        try:
            if two:
                raise NotToldError("decode's pages have another size, and host page ids beside device page ids")
            pairing = self.peers.pairing(session, ("pages", page_size, ranks), pointers, make)
            plan = pairing.plan(source, {DEVICE: ids}, **self._positions(session, len(source)))
        except (*REFUSALS, RuntimeError) as error:
            return self._refuse(error)
        self.notes.plan(function)
        return self._send(session, [plan], executor)
