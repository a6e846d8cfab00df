"""SGLang's NIXL manager, planning with kvplan what SGLang's prepared lists cannot say."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
from sglang.srt.disaggregation.nixl.conn import NixlKVManager
from sglang.srt.disaggregation.utils import TransferBackend

from kvplan import Interleave, Memory, Pairing, Plan, PlanError, pair

from . import gate, regions, rooms
from .names import NotToldError
from .nixl_guarded import REFUSALS, GuardedNixlManager, memories
from .pairings import Pairings
from .regions import DEVICE, HOST, Buffers

logger = logging.getLogger("kvplan.sglang")

#: What is planned by kvplan; the rest is named in docs/sglang.md.
SERVED = (
    "send_kvcache_mixed with device page ids or a draft of decode's own",
    "send_kvcache_dcp to host and device memory",
    "send_kvcache_slice to host memory",
)


class PlannedNixlManager(GuardedNixlManager, Pairings):
    """NixlKVManager that also serves what it refuses alone; the rest goes by SGLang's prepared lists, as before.

    A request that cannot be planned fails its own room, with the reason, before anything of the chunk is sent.
    """

    def __init__(self, args: Any, disaggregation_mode: Any, *rest: Any, **more: Any) -> None:
        self.set_up()  # before SGLang starts its threads
        self._planned: set[str] = set()  # decode agents that SGLang alone refuses
        super().__init__(args, disaggregation_mode, *rest, **more)
        logger.warning("kvplan plans for %s (%s): %s", NixlKVManager.__qualname__, disaggregation_mode.value,
                       ", ".join(SERVED))  # fmt: skip
        gate.open_for(disaggregation_mode, TransferBackend.NIXL, PlannedNixlManager)

    # --- pairings

    def _prepare_payload_xfer(self, peer_info: Any) -> None:
        """Prepare SGLang's lists; where SGLang refuses that, a pairing."""
        agent = peer_info.agent_name
        self._planned.discard(agent)
        self.peers.forget(agent)
        try:
            super()._prepare_payload_xfer(peer_info)
            return
        except NotImplementedError as error:
            refusal = error
        try:
            self._pairing(peer_info, False)
        except REFUSALS as error:
            raise NotToldError(f"{refusal}; kvplan cannot plan it either: {error}") from None
        peer_info.kv_xfer_segments = [None]  # SGLang then calls send_kvcache_mixed
        self._planned.add(agent)

    def _pairing(self, peer: Any, two: bool) -> Pairing:
        pointers = peer.dst_kv_ptrs
        return self.peers.pairing(peer.agent_name, two, pointers, lambda: self._pair(peer, two))

    def _pair(self, peer: Any, two: bool) -> Pairing:
        src, dst, model = self._kv_buffers(peer.agent_name, peer.dst_kv_ptrs, peer.dst_kv_layer_ids, None)
        here = memories(self.kv_args.kv_data_mem_kinds, self.kv_args.gpu_id)
        there = memories(peer.dst_kv_mem_kinds, peer.gpu_id)
        if peer.requires_dcp_relayout:
            return self._pair_rows(peer, src, dst, (here, there), two)
        spaces = [DEVICE] * len(there)
        if two:
            spaces = [HOST if memory == Memory.DRAM else DEVICE for memory in there]
            for number, (key, space) in enumerate(zip(dst.keys, spaces, strict=True)):
                if space != regions.space_of(model, number, key, len(spaces)):
                    raise NotToldError(f"decode has device page ids, and {key[0]} layer {key[1]} is in {space} memory")
        if self._by_heads(peer):
            if two or len(set(there)) > 1:
                raise NotToldError("the TP sizes differ, and decode has buffers in host memory and on the device")
            page, (mine, theirs) = self.kv_args.page_size, self._heads(peer.decode_tp_size, peer.decode_tp_rank)
            return pair(src.layout(page, rows=page, heads=mine, memory=here),
                        dst.layout(page, rows=page, heads=theirs, memory=there))  # fmt: skip
        # A page of a host pool may be followed by bytes that are not KV: its stride is what decode registers.
        own = dict(zip(src.keys, src.page_bytes, strict=True))
        wide = [own[key] if memory == Memory.DRAM and key in own and own[key] < each else each
                for key, memory, each in zip(dst.keys, there, dst.page_bytes, strict=True)]  # fmt: skip
        narrow = dataclasses.replace(dst, page_bytes=wide)
        return pair(
            src.layout(1, rows=1, memory=here),
            narrow.layout(1, rows=1, memory=there, space=spaces, page_stride=list(dst.page_bytes)),
        )

    def _pair_rows(self, peer: Any, src: Buffers, dst: Buffers, memory: tuple[Any, Any], two: bool) -> Pairing:
        """For a rank of decode context parallelism."""
        if getattr(self.kv_args, "mla_compression_ratios", None):
            raise NotToldError("rows of compressed pages cannot be told apart, and DCP moves rows")
        draft = regions.Draft(self.attn_tp_size, self.kv_args.engine_rank, peer.decode_tp_size, peer.decode_tp_rank,
                              not self.is_mla_backend)  # fmt: skip
        share = Interleave(peer.dst_dcp_size, peer.dst_dcp_rank)
        return regions.interleaved(src, dst, self.kv_args.page_size, share, draft, two, memory)

    def _by_heads(self, peer: Any) -> bool:
        return not self._flat() and peer.decode_tp_size != self.attn_tp_size

    # --- rooms

    def _check_chunk(self, chunk: Any) -> None:
        """Plan a chunk for all its decode ranks, or fail its room, before SGLang looks at it."""
        self.current.plans = {}
        room = chunk.room
        if room not in self.request_status or self._failed(room):
            return
        infos = [info for info in list(self.transfer_infos.get(room, {}).values()) if not info.is_dummy]
        try:
            for info in infos:
                plan = self._plan_of(chunk, info)
                if plan is not None:
                    self.current.plans[info.agent_name] = plan
        except Exception as error:  # any other would end the worker's thread
            if not isinstance(error, REFUSALS):
                logger.exception("kvplan cannot plan room %s", room)
            self.current.plans = {}
            self._conclude(room, str(error))

    def _plan_of(self, chunk: Any, info: Any) -> Plan | None:
        """The plan of a chunk for one decode rank; None where SGLang's own lists serve."""
        agent = info.agent_name
        peer = self.decode_kv_args_table.get(agent)
        if peer is None:
            why = self.peers.rejection(agent) or "it has not registered"
            raise NotToldError(f"decode agent {agent} is not taken: {why}")
        if not hasattr(info, "dst_device_kv_indices"):
            raise NotToldError(f"decode agent {agent} has sent its page ids anew while they were in use")
        source, device = chunk.prefill_kv_indices, info.dst_device_kv_indices
        if not len(source) or not self.kv_args.kv_data_ptrs:
            return None
        if peer.requires_dcp_relayout:
            return self._rows_of(chunk, info, peer) if device is not None or agent in self._planned else None
        reason = rooms.short_lists(chunk, [info])
        if reason is not None:
            raise NotToldError(reason)
        ids = info.dst_kv_indices[chunk.index_slice][: len(source)]
        if device is None and agent not in self._planned:
            self._check_slots(source, ids, peer)
            self.notes.leave("whole pages and heads over NIXL", "its prepared lists serve them")
            return None
        pairing = self._pairing(peer, device is not None)
        given = {HOST: ids, DEVICE: ids if device is None else device[chunk.index_slice][: len(source)]}
        if not pairing.space_names:
            raise NotToldError("no buffer of this process belongs to one of decode's")
        return pairing.plan(source, {space: given[space] for space in pairing.space_names})

    def _rows_of(self, chunk: Any, info: Any, peer: Any) -> Plan:
        """The plan of a chunk for one rank of decode context parallelism."""
        if chunk.num_kv_tokens is None:
            raise PlanError("rows are to be sent, and SGLang does not say how many tokens the chunk has")
        device, prefix = info.dst_device_kv_indices, info.decode_prefix_len or 0
        pairing = self._pairing(peer, device is not None)
        given = {HOST: info.dst_kv_indices, DEVICE: info.dst_kv_indices if device is None else device}
        return pairing.plan(
            chunk.prefill_kv_indices,
            {space: given[space] for space in pairing.space_names},
            src_start=prefix + (chunk.index_slice.start or 0) * self.kv_args.page_size,
            dst_start=prefix,
            num_tokens=chunk.num_kv_tokens,
        )

    def _check_slots(self, source: np.ndarray, ids: np.ndarray, peer: Any) -> None:
        """SGLang reckons places in its lists from page ids: one past a buffer's end is another buffer's page to it."""
        there = self._num_slots_src if peer.dst_num_slots is None else peer.dst_num_slots
        for what, each, end in (("source", source, self._num_slots_src), ("destination", ids, there)):
            array = np.asarray(each)
            outside = np.flatnonzero((array < 0) | (array >= end))
            if len(outside):
                at = int(outside[0])
                raise NotToldError(f"{what} page id {array[at]} at position {at} is out of range: pages 0 to {end - 1}")

    # --- sending

    def send_kvcache(self, peer_name: str, *rest: Any, **more: Any) -> Any:
        """SGLang's; a peer with two lists of page ids is served by `send_kvcache_mixed`."""
        plan = self.current.plans.get(peer_name)
        return super().send_kvcache(peer_name, *rest, **more) if plan is None else self._one(peer_name, plan)

    def send_kvcache_mixed(self, peer_name: str, *rest: Any, **more: Any) -> Any:
        """Whole pages to host and device memory, in one or two index spaces."""
        plan = self.current.plans.get(peer_name)
        if plan is None:
            return super().send_kvcache_mixed(peer_name, *rest, **more)
        self.notes.plan("send_kvcache_mixed")
        return self._post(peer_name, plan)

    def _pack_dcp_rank_once(self, pack_buffer: Any, dst_info: Any, *rest: Any) -> Any:
        """SGLang's; nothing for a chunk that is planned, whose rows are sent from where they lie."""
        planned = dst_info.agent_name in self.current.plans
        return None if planned else super()._pack_dcp_rank_once(pack_buffer, dst_info, *rest)

    def send_kvcache_dcp(self, peer_name: str, *rest: Any, **more: Any) -> Any:
        """Rows for one rank of decode context parallelism."""
        plan = self.current.plans.get(peer_name)
        if plan is None:
            return super().send_kvcache_dcp(peer_name, *rest, **more)
        self.notes.plan("send_kvcache_dcp")
        return self._post(peer_name, plan)

    def send_kvcache_slice(self, peer_name: str, *rest: Any, **more: Any) -> Any:
        """Heads of each row."""
        plan = self.current.plans.get(peer_name)
        if plan is None:
            return super().send_kvcache_slice(peer_name, *rest, **more)
        self.notes.plan("send_kvcache_slice")
        return self._one(peer_name, plan)

    def _one(self, peer_name: str, plan: Plan) -> Any:
        (handle,) = self._post(peer_name, plan)
        return handle

    def _post(self, peer_name: str, plan: Plan) -> Iterator[Any]:
        """Post a NIXL transfer for each pair of memories, once all could be made.

        Yields each handle when it is posted: then SGLang awaits those before one that fails.
        """
        made = []
        for segment in plan.segments:
            table = plan.table.numpy().view(np.uint64)[:, segment.start : segment.stop]
            sides = [
                self.agent.get_xfer_descs(_rows(addresses, table[2], memory), memory.kind)
                for addresses, memory in ((table[0], segment.src_memory), (table[1], segment.dst_memory))
            ]
            made.append(self.agent.initialize_xfer("WRITE", *sides, peer_name))
        for handle in made:
            self._post_xfer(handle, "KVSender failed to post planned transfer")
            yield handle


def _rows(addresses: np.ndarray, nbytes: np.ndarray, memory: Memory) -> np.ndarray:
    """NIXL's rows, uint64 [N, 3]: address, bytes, device."""
    return np.column_stack((addresses, nbytes, np.full_like(addresses, memory.device)))
