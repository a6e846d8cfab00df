"""SGLang's Mooncake manager, guarded: messages are checked, and what is refused fails its own room alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.mooncake import conn
from sglang.srt.disaggregation.mooncake.conn import KVArgsRegisterInfo, MooncakeKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode

from kvplan import LayoutError, PlanError

from . import frames, handover, names, rooms
from .frames import FrameError
from .names import NotToldError
from .notes import Notes
from .page_sizes import PageSizes
from .peers import Peers
from .regions import Buffers

logger = logging.getLogger("kvplan.sglang")


class GuardedManager(PageSizes, MooncakeKVManager):
    """MooncakeKVManager that checks what peers send, and fails a room alone where SGLang would end a thread."""

    #: A failed room's reason goes to the decode side. SGLang reads it there where it is sent, but its Mooncake
    #: manager does not send it.
    kv_status_msg_carries_reason = True

    def set_up(self) -> None:
        """Make what this class adds to SGLang's manager."""
        self.notes = Notes()
        self.peers = Peers()
        self.current = rooms.Current()
        self._extra_frame: bytes | None = None
        self.set_up_pages()
        self.handed: handover.Engine | None = None

    # --- peers: what they send, and what is kept of them

    def _make_worker_recv(self, socket: Any, timeout_ms: int = 500) -> Callable[[], Any]:
        receive = super()._make_worker_recv(socket, timeout_ms)
        if self.disaggregation_mode != DisaggregationMode.PREFILL:
            return receive

        def checked() -> Any:
            message = receive()
            return message if message is not None and self._accept(message) else None

        return checked

    def _accept(self, message: Sequence[bytes]) -> bool:
        """Whether a message may be read. One that is malformed fails its room, if it has one, and is dropped."""
        try:
            frames.check(message)
            if message[0] == b"None":
                self._try_registration(message)
                self._extra_frame = message[frames.REGISTRATION] if len(message) > frames.REGISTRATION else None
            elif frames.room_of(message) is not None:
                self._note_pages(message)
        except (FrameError, RuntimeError, ValueError) as error:  # SGLang refuses topologies by RuntimeError
            self._reject(message, str(error))
            return False
        return True

    def _try_registration(self, message: Sequence[bytes]) -> None:
        """What SGLang would raise of a registration ends its thread: so it is tried first."""
        info = KVArgsRegisterInfo.from_zmq(message)
        if self.requires_dcp_relayout(info.dst_dcp_size, info.dst_dcp_rank):
            draft = self.kv_args.num_draft_entries
            targets = len(self.kv_args.kv_item_lens) - draft
            self.prepare_dcp_token_item_lens([info.dst_kv_item_len] * targets + [None] * draft, info.dst_dcp_size)

    def _reject(self, message: Sequence[bytes], reason: str) -> None:
        logger.warning("kvplan drops a message of a decode process: %s", reason)
        room = frames.room_of(message)
        if room is not None:
            self._conclude(room, f"decode's message about this room is malformed: {reason}")
        elif len(message) > 3 and message[0] == b"None":
            session = message[3].decode("ascii", "replace")
            self.peers.register(session, None)
            self.peers.reject(session, reason)
            self.decode_kv_args_table.pop(session, None)

    def _publish_peer_registration(self, mooncake_session_id: str, decode_kv_args: Any) -> Any:
        told = None
        if self._extra_frame is not None:
            try:
                told = frames.read_layout(self._extra_frame, decode_kv_args.dst_kv_ptrs)
            except FrameError as error:
                logger.warning("kvplan goes without the layout of %s: %s", mooncake_session_id, error)
        self.peers.register(mooncake_session_id, told)
        return super()._publish_peer_registration(mooncake_session_id, decode_kv_args)

    def build_receiver_registration_message(self) -> list[bytes]:
        """SGLang's frames, and one more with this decode process's layout. SGLang alone ignores it."""
        message = super().build_receiver_registration_message()
        args = self.kv_args
        if self.pp_size > 1 or len(message) != frames.REGISTRATION or not args.kv_data_ptrs:
            return message
        try:
            keys = names.of_decode(
                len(args.kv_data_ptrs), args.num_draft_entries, args.kv_layer_ids,
                getattr(args, "mla_compression_ratios", None), self._flat(), **self._pool(),
            )  # fmt: skip
            own = Buffers.own(keys, args.kv_data_ptrs, args.kv_item_lens, args.kv_data_lens)
            return [*message, frames.layout_frame(own.layout(1, rows=1))]
        except (NotToldError, LayoutError) as error:
            self.notes.leave("the layout frame", str(error))
            return message

    def resolve_kv_replica_factor(self, transfer_infos: dict[str, Any]) -> None:
        """Runs when all decode ranks of a room have sent their page ids, before anything is sent."""
        self._attach_pages(transfer_infos)
        for session, info in transfer_infos.items():
            peer = self.decode_kv_args_table.get(session)
            if info.dst_device_kv_indices is not None and peer is not None and peer.requires_dcp_relayout:
                # SGLang's worker raises on these; send_kvcache_dcp takes them from here.
                info.kvplan_device_ids = info.dst_device_kv_indices
                info.dst_device_kv_indices = None
        super().resolve_kv_replica_factor(transfer_infos)

    def _init_dcp_pack_buffers_once(self, dcp_size: int, *, include_draft: bool = False) -> None:
        """None: rows are planned from where they lie."""

    # --- rooms: a refused request fails its own, and nothing else

    def transfer_worker(self, queue: Any, executor: Any, *rest: Any, **more: Any) -> None:
        watched = rooms.WatchedQueue(queue, self.current, self._check_chunk)
        super().transfer_worker(watched, executor, *rest, **more)

    def _check_chunk(self, chunk: Any) -> None:
        """Fail a room whose lists do not fit, before SGLang cuts them or raises."""
        if chunk.room not in self.request_status or self._failed(chunk.room):
            return
        infos = [info for info in list(self.transfer_infos.get(chunk.room, {}).values()) if not info.is_dummy]
        whole = []
        for info in infos:
            peer = self.decode_kv_args_table.get(info.mooncake_session_id)
            if peer is None:
                why = self.peers.rejection(info.mooncake_session_id) or "it has not registered"
                self._refuse(f"decode session {info.mooncake_session_id} is not taken: {why}")
                return
            if not peer.requires_dcp_relayout:
                whole.append(info)
        if self.kv_args.kv_data_ptrs:
            reason = rooms.short_lists(chunk, whole)
            if reason is not None:
                self._refuse(reason)

    def _failed(self, room: int | None) -> bool:
        return room is not None and self.request_status.get(room) == KVPoll.Failed

    def _refuse(self, reason: str | Exception) -> int:
        """Fail this thread's room, and return SGLang's word for success: then neither session nor thread suffers.

        Outside a transfer worker the error is raised.
        """
        room = self.current.room
        if room is None:
            raise reason if isinstance(reason, Exception) else PlanError(reason)
        self._conclude(room, str(reason))
        return 0

    def _conclude(self, room: int, reason: str) -> None:
        self.notes.refuse(room, reason)
        self.conclude_failure(bootstrap_room=room, failure_reason=f"kvplan: {reason}")

    def send_aux(self, req: Any, prefill_aux_index: int, dst_aux_ptrs: list[int]) -> int:
        """Nothing for a room that has failed: decode may have given its place to another."""
        return 0 if self._failed(req.room) else super().send_aux(req, prefill_aux_index, dst_aux_ptrs)

    def maybe_send_extra(self, req: Any, prefill_state_indices: Any, executor: Any, *rest: Any, **more: Any) -> int:
        """State components. What SGLang raises of them would end its thread; it fails the room instead."""
        if self._failed(req.room):
            return 0
        try:
            return super().maybe_send_extra(req, prefill_state_indices, executor, *rest, **more)
        except Exception as error:
            if self.current.room is None:
                raise
            self._poison_unsettled_send(req.room)
            return self._refuse(error)

    def _flat(self) -> bool:
        return self.is_mla_backend or self.is_hybrid_mla_backend or conn.get_memory().enable_unified_memory
