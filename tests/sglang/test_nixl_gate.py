"""The decode side's gate and the frames of NIXL messages, with SGLang's own readers."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import Any

import numpy as np
import pytest
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.nixl import conn
from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

from kvplan.integrations.sglang import gate, nixl_frames
from kvplan.integrations.sglang.frames import FrameError, no_pages
from kvplan.integrations.sglang.seam import choose

HOST, DEVICE = np.array([5, 3, 9], np.int32), np.array([1, 2], np.int32)


def gate_of_sglang() -> Any:
    """SGLang's own lines that ask for Mooncake, as a function of the queue."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(decode.DecodePreallocQueue.pop_preallocated)))
    found = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "transfer_backend" in ast.dump(node.test)]
    assert len(found) == 1, "pop_preallocated asks for the back end elsewhere as well"
    code = compile(ast.Module(body=[found[0]], type_ignores=[]), decode.__file__, "exec")
    return lambda queue: exec(code, {"TransferBackend": TransferBackend, "self": queue})


class Manager:
    pass


@pytest.mark.parametrize("backend, manager, passes", [
    (TransferBackend.NIXL, Manager(), True), (TransferBackend.NIXL, object(), False),
    (TransferBackend.MORI, Manager(), False), (TransferBackend.MOONCAKE, object(), True),
])  # fmt: skip
def test_nixl_with_kvplan_passes_the_gate_and_no_other(backend: Any, manager: Any, passes: bool) -> None:
    asked = gate_of_sglang()

    class Queue:
        transfer_backend, kv_manager = backend, manager

        def pop_preallocated(self, rids: Any) -> Any:
            asked(self)
            return rids, get_kv_class(self.transfer_backend, KVClassType.RECEIVER)

    gate.open_gate(Queue, TransferBackend.NIXL, Manager)
    gate.open_gate(Queue, TransferBackend.NIXL, Manager)
    queue = Queue()
    if passes:
        assert queue.pop_preallocated(["a"]) == (["a"], get_kv_class(backend, KVClassType.RECEIVER))
    else:
        with pytest.raises(NotImplementedError, match="requires the Mooncake backend"):
            queue.pop_preallocated(["a"])
    assert queue.transfer_backend is backend


def test_the_seam_chooses_for_sglangs_own_nixl_manager_alone() -> None:
    from kvplan.integrations.sglang.nixl import PlannedNixlManager

    class Other(conn.NixlKVManager):
        pass

    assert choose(conn.NixlKVManager, TransferBackend.NIXL, KVClassType.MANAGER) is PlannedNixlManager
    assert choose(Other, TransferBackend.NIXL, KVClassType.MANAGER) is None
    assert choose(conn.NixlKVSender, TransferBackend.NIXL, KVClassType.SENDER) is None


def message(**frames: bytes) -> list[bytes]:
    """The message of a room with both lists of page ids, without GUARD. `frames`: another one at place `at_N`."""
    made = [b"7", b"127.0.0.1", b"4000", b"agent", no_pages(3), b"2", b"1", b"", b"0", b"0",
            nixl_frames.ids_frame(HOST, DEVICE)]  # fmt: skip
    for name, frame in frames.items():
        made[int(name[3:])] = frame
    return made


def test_sglang_alone_reads_the_message_and_finds_pages_of_no_pool() -> None:
    info = conn.TransferInfo.from_zmq(message())
    assert (info.room, info.dst_aux_index, info.is_dummy) == (7, 2, False)
    assert info.dst_kv_indices.tolist() == [(1 << 31) - 1] * 3
    nixl_frames.check(message())
    host, device = nixl_frames.read_ids(message()[nixl_frames.ROOM])
    assert host.tolist() == HOST.tolist() and device.tolist() == DEVICE.tolist()


@pytest.mark.parametrize("wrong, reason", [
    ({"at_0": b"x"}, "room is b'x'"),
    ({"at_1": b""}, "endpoint is ''"),
    ({"at_2": b"65536"}, "port is b'65536'"),
    ({"at_3": b"\xff"}, "agent is no ASCII text"),
    ({"at_4": b"12345"}, "page ids: 5 bytes are no multiple of 4"),
    ({"at_4": b""}, "the room has 0 page ids, and 3 host page ids"),
    ({"at_5": b"-1"}, "auxiliary index"),
    ({"at_6": b""}, "number of decode ranks"),
    ({"at_7": b"\1\0\0\0\3\0\0\0abc"}, "state page ids: 3 bytes are no multiple of 4"),
    ({"at_8": b"1e3"}, "prefix length"),
    ({"at_9": b"2"}, "dummy rank is b'2'"),
    ({"at_10": b"other"}, "none of this version"),
    ({"at_10": nixl_frames.ids_frame(HOST, DEVICE)[:-1]}, "not those of 3 and 2 page ids"),
])  # fmt: skip
def test_malformed_rooms(wrong: dict[str, bytes], reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        nixl_frames.check(message(**wrong))
