"""SGLang's NIXL manager, guarded: messages are checked, and what is refused fails its own room alone."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.nixl.conn import NixlKVManager

from kvplan import LayoutError, Memory, PairingError, Plan, PlanError

from . import frames, names, nixl_frames, rooms
from .frames import FrameError
from .names import NotToldError
from .notes import Notes
from .peers import Peers
from .regions import Buffers

logger = logging.getLogger("kvplan.sglang")

REFUSALS = (PlanError, PairingError, LayoutError, NotToldError)

_MOST_WAITING = 4096  # rooms with device page ids; beyond that, those that SGLang has dropped are dropped here as well


class _Current(rooms.Current):
    """The room that this thread transfers a chunk of, and the chunk's plans by decode agent."""

    def __init__(self) -> None:
        self.plans: dict[str, Plan] = {}


class _CheckedSocket:
    """A ZMQ socket whose messages are checked; those that are malformed are dropped."""

    def __init__(self, socket: Any, accept: Any) -> None:
        self._socket, self._accept = socket, accept

    def recv_multipart(self, *args: Any, **more: Any) -> Any:
        """The next message that is accepted."""
        while True:
            message = self._accept(self._socket.recv_multipart(*args, **more))
            if message is not None:
                return message

    def __getattr__(self, name: str) -> Any:
        return getattr(self._socket, name)


class GuardedNixlManager(NixlKVManager):
    """NixlKVManager that checks what peers send, and reads and writes kvplan's frames."""

    def set_up(self) -> None:
        """Make what this class adds to SGLang's manager."""
        self.notes = Notes()
        self.peers = Peers()
        self.current = _Current()
        self._layout_frames: dict[str, bytes] = {}
        self._device_ids: dict[tuple[int, str], np.ndarray] = {}

    # --- what decode processes send

    server_socket: Any

    def _start_bootstrap_thread(self) -> None:
        self.server_socket = _CheckedSocket(self.server_socket, self._accept)
        super()._start_bootstrap_thread()

    def _accept(self, message: Sequence[bytes]) -> Sequence[bytes] | None:
        """The message as SGLang is to read it, or None. One that is malformed fails its room, if it has one."""
        if nixl_frames.is_checked_elsewhere(message):
            return message
        if not message or message[0] != nixl_frames.GUARD:
            logger.warning("kvplan drops a message that is not SGLang's: it begins with %r", list(message[:1]))
            return None
        guard, *rest = message
        try:
            nixl_frames.check(rest)
        except FrameError as error:
            self._reject(rest, str(error))
            return None
        agent = rest[3].decode("ascii")
        if rest[0] == b"None":
            if len(rest) > nixl_frames.REGISTRATION and agent not in self.decode_kv_args_table:
                self._layout_frames[agent] = rest[nixl_frames.REGISTRATION]
            return message
        key = (int(rest[0]), agent)
        self._device_ids.pop(key, None)
        if len(rest) > nixl_frames.ROOM:
            host, self._device_ids[key] = nixl_frames.read_ids(rest[nixl_frames.ROOM])
            rest[nixl_frames.IDS] = host.tobytes()
            if len(self._device_ids) > _MOST_WAITING:
                gone = [each for each in self._device_ids if each != key and each[0] not in self.transfer_infos]
                for each in gone:
                    del self._device_ids[each]
        return [guard, *rest]

    def _reject(self, message: Sequence[bytes], reason: str) -> None:
        logger.warning("kvplan drops a message of a decode process: %s", reason)
        room = frames.room_of(message)
        if room is not None:
            self._conclude(room, f"decode's message about this room is malformed: {reason}")
        elif len(message) > 3 and message[0] == b"None":
            self.peers.reject(message[3].decode("ascii", "replace"), reason)

    def _add_remote_peer(self, decode_kv_args: Any) -> None:
        """Take a registration. What SGLang would raise of it ends its thread; it refuses this peer's rooms instead."""
        agent = decode_kv_args.agent_name
        frame = self._layout_frames.pop(agent, None)
        if agent in self.decode_kv_args_table:
            super()._add_remote_peer(decode_kv_args)
            return
        told = None
        if frame is not None:
            try:
                told = frames.read_layout(frame, decode_kv_args.dst_kv_ptrs)
            except FrameError as error:
                logger.warning("kvplan goes without the layout of %s: %s", agent, error)
        self.peers.register(agent, told)
        try:
            super()._add_remote_peer(decode_kv_args)
        except Exception as error:
            logger.warning("kvplan drops the registration of %s: %s", agent, error)
            self.decode_kv_args_table.pop(agent, None)
            self.peers.register(agent, None)
            self.peers.reject(agent, str(error))

    def resolve_kv_replica_factor(self, transfer_infos: dict[str, Any]) -> None:
        """Runs when all decode ranks of a room have sent their page ids, before anything is sent."""
        for agent, info in transfer_infos.items():
            info.dst_device_kv_indices = self._device_ids.pop((info.room, agent), None)
        super().resolve_kv_replica_factor(transfer_infos)

    # --- what this decode process sends

    def build_receiver_registration_message(self) -> list[bytes]:
        """SGLang's frames, and one more with this decode process's layout. SGLang alone ignores it."""
        message = super().build_receiver_registration_message()
        args = self.kv_args
        if (self.pp_size or 1) > 1 or len(message) != 1 + nixl_frames.REGISTRATION or not args.kv_data_ptrs:
            return message
        try:
            keys = names.of_decode(
                len(args.kv_data_ptrs), args.num_draft_entries, args.kv_layer_ids,
                getattr(args, "mla_compression_ratios", None), self._flat(), **self._pool(),
            )  # fmt: skip
            own = Buffers.own(keys, args.kv_data_ptrs, args.kv_item_lens, args.kv_data_lens)
            layout = own.layout(1, rows=1, memory=memories(args.kv_data_mem_kinds, args.gpu_id))
            return [*message, frames.layout_frame(layout)]
        except (NotToldError, LayoutError) as error:
            self.notes.leave("the layout frame", str(error))
            return message

    def build_receiver_metadata_message(self, **fields: Any) -> list[bytes]:
        """SGLang's frames. With device page ids there is one more, and none of any pool where SGLang looks for them."""
        message = super().build_receiver_metadata_message(**fields)
        device, host = fields.get("device_kv_indices"), fields["kv_indices"]
        if device is None or fields["is_dummy"]:
            return message
        if len(message) != 1 + nixl_frames.ROOM:
            raise NotImplementedError(f"SGLang's message about a room has {len(message)} frames: device page ids have "
                                      f"no place in it")  # fmt: skip
        message[1 + nixl_frames.IDS] = frames.no_pages(len(host))
        return [*message, nixl_frames.ids_frame(host, device)]

    # --- rooms

    def transfer_worker(self, queue: Any, *rest: Any, **more: Any) -> None:
        super().transfer_worker(rooms.WatchedQueue(queue, self.current, self._check_chunk), *rest, **more)

    def _check_chunk(self, chunk: Any) -> None:
        raise NotImplementedError

    def _failed(self, room: int) -> bool:
        return self.request_status.get(room) == KVPoll.Failed

    def _conclude(self, room: int, reason: str) -> None:
        self.notes.refuse(room, reason)
        self.conclude_failure(bootstrap_room=room, failure_reason=f"kvplan: {reason}")

    def _flat(self) -> bool:
        return bool(self.is_mla_backend or self.is_hybrid_mla_backend)


def memories(kinds: Sequence[str], device: int) -> list[Memory]:
    """Where buffers lie, given SGLang's word for each and the number of the device."""
    return [Memory(kind, device if kind == "VRAM" else 0) for kind in kinds]
