"""SGLang's Ascend manager, planning with kvplan: Mooncake's functions, Ascend's pools, and DCP by whole pages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.disaggregation.ascend.conn import AscendKVManager, AscendStateType
from sglang.srt.disaggregation.utils import TransferBackend

from kvplan import Interleave, Pairing, PlanError

from . import gate, regions
from .mooncake import PlannedMooncakeManager
from .names import NotToldError
from .regions import DEVICE
from .sending import REFUSALS

_NO_HEADS = regions.Draft(1, 0, 1, 0, sliced=False)


class PlannedAscendManager(PlannedMooncakeManager, AscendKVManager):
    """AscendKVManager whose descriptors kvplan plans.

    SGLang's class is a MooncakeKVManager with functions of its own. What plans for Mooncake comes before both, so it
    plans here as well; what it leaves to SGLang is left to AscendKVManager.
    """

    _sglang = AscendKVManager

    def __init__(self, args: Any, disaggregation_mode: Any, *rest: Any, **more: Any) -> None:
        super().__init__(args, disaggregation_mode, *rest, **more)
        gate.open_for(disaggregation_mode, TransferBackend.ASCEND, PlannedAscendManager)

    def _pool(self) -> dict[str, Any]:
        apart = AscendStateType.DSV4_C4_STATE in (getattr(self.kv_args, "state_types", None) or ())
        return super()._pool() | {"npu": True, "state_apart": apart}

    def _why_same_pages(self) -> str | None:
        return "pages of other sizes were not tried over Ascend"

    def send_kvcache_dcp(
        self,
        mooncake_session_id: str,
        prefill_kv_indices: np.ndarray,
        dst_kv_ptrs: list[int],
        dst_kv_indices: np.ndarray,
        **call: Any,
    ) -> int:
        """For one rank of decode context parallelism: rows, or whole pages where the pool holds index keys."""
        send = self._send_pages_dcp if self._is_npu_dsa_layout() else super().send_kvcache_dcp
        return send(mooncake_session_id, prefill_kv_indices, dst_kv_ptrs, dst_kv_indices, **call)

    def _send_pages_dcp(
        self,
        session: str,
        source: np.ndarray,
        pointers: list[int],
        ids: np.ndarray,
        *,
        dst_dcp_size: int,
        dst_dcp_rank: int,
        src_page_offset: int,
        decode_prefix_len: int,
        num_kv_tokens: int,
        executor: Any,
        dst_layer_ids: Sequence[int],
        dst_kv_item_lens: Sequence[int] | None = None,
        **_: Any,
    ) -> int:
        """Pages in turn for each rank; of index keys and draft entries decode holds them all.

        A page counts as one row here: the last one moves whole, as SGLang moves it.
        """
        room, page = self.current.room, self.kv_args.page_size
        if self._failed(room):
            return 0
        info = None if room is None else self.transfer_infos.get(room, {}).get(session)

        def make() -> Pairing:
            src, dst, _ = self._kv_buffers(session, pointers, dst_layer_ids or [], None, dst_kv_item_lens)
            whole = dict(zip(src.keys, self._get_dcp_remote_decode_layout(), strict=True))
            dst = dst.without(lambda key: key not in whole)
            own = dict(zip(src.keys, src.page_bytes, strict=True))
            want = [own[key] * (dst_dcp_size if whole[key] else 1) for key in dst.keys]
            if not dst_kv_item_lens:  # all that SGLang itself goes by
                dst = regions.Buffers(dst.keys, dst.bases, want, dst.num_pages)
            for (name, layer), found, right in zip(dst.keys, dst.page_bytes, want, strict=True):
                if found != right:
                    raise NotToldError(
                        f"{name} layer {layer}: a decode page takes {found} bytes, and must take {right}"
                    )
            share = Interleave(dst_dcp_size, dst_dcp_rank)
            return regions.interleaved(src, dst, 1, share, _NO_HEADS, False, whole=whole.__getitem__)

        try:
            if getattr(info, "kvplan_device_ids", None) is not None:
                raise NotToldError("index keys lie among the KV entries, and SGLang does not say which page ids "
                                   "number them")  # fmt: skip
            if num_kv_tokens is None:
                raise PlanError("pages are to be sent, and SGLang does not say how many tokens the chunk has")
            if decode_prefix_len % (page * dst_dcp_size):
                raise PlanError(f"a prefix of {decode_prefix_len} tokens does not end with a decode page, of "
                                f"{page * dst_dcp_size}")  # fmt: skip
            if len(source) > -(-num_kv_tokens // page):
                raise PlanError(f"{len(source)} source pages, and a chunk of {num_kv_tokens} tokens, {page} a page")
            need = -(-(src_page_offset + len(source)) // dst_dcp_size)
            if len(source) and len(ids) < need:
                raise PlanError(f"the destination list is {len(ids)} pages, and prefill pages {src_page_offset} to "
                                f"{src_page_offset + len(source) - 1} take {need}")  # fmt: skip
            key = ("dcp pages", dst_dcp_size, dst_dcp_rank)
            pairing = self.peers.pairing(session, key, pointers, make)
            prefix = decode_prefix_len // page
            plan = pairing.plan(source, {DEVICE: ids}, src_start=prefix + src_page_offset, dst_start=prefix,
                                num_tokens=len(source))  # fmt: skip
        except (*REFUSALS, RuntimeError) as error:
            return self._refuse(error)
        self.notes.plan("send_kvcache_dcp")
        return self._send(session, [plan], executor)
