"""A stand-in for memfabric_hybrid 1.3.0, with its signatures and return codes, that copies memory on the CPU.

The real package needs an NPU for everything but being imported. This one refuses what that one is known or documented
to refuse, and every descriptor that is not within memory registered with the engine it belongs to, on either side; it
moves the others with memmove. All engines live in one process. What it cannot show is how fast anything is, or what a
device does on a fault.
"""

from __future__ import annotations

import ctypes
import enum
import sys
import types

ALIGN = 2 << 20  # spans of one batch are widened to this and joined


class TransDataOpType(enum.Enum):
    SDMA = 1
    HOST_RDMA = 2
    DEVICE_RDMA = 4
    DEVICE_URMA = 8
    DEVICE_UBOE = 16


class TransferEngine:
    engines: dict[str, TransferEngine] = {}
    no_driver = False  # as on a machine without an NPU
    batches: list[list[int]] = []  # addresses of every batch that was registered

    def __init__(self) -> None:
        self.session = ""
        self.spans: dict[int, int] = {}  # address -> bytes

    def initialize(
        self,
        store_url: str,
        session_id: str,
        role: str,
        device_id: int,
        data_op_type: TransDataOpType = TransDataOpType.SDMA,
        store_server_role: str = "Decode",
        nic: str = "",
    ) -> int:
        if not isinstance(data_op_type, TransDataOpType):
            raise TypeError("incompatible function arguments")
        if self.no_driver or not store_url.startswith(("tcp://", "etcd://", "reg://")) or session_id in self.engines:
            return -1
        self.session = session_id
        self.engines[session_id] = self
        return 0

    def batch_register_memory(self, buffer_addrs: list[int], capacities: list[int]) -> int:
        if len(buffer_addrs) != len(capacities) or any(a in self.spans for a in buffer_addrs) or 0 in capacities:
            return -1
        if self.session:
            self.batches.append(list(buffer_addrs))
        self.spans.update(zip(map(int, buffer_addrs), map(int, capacities), strict=True))
        return 0  # also without `initialize`, as the real one

    def unregister_memory(self, buffer_addr: int) -> int:
        return 0 if self.spans.pop(buffer_addr, None) else -1

    def holds(self, address: int, length: int) -> bool:
        return any(base <= address and address + length <= base + size for base, size in self.spans.items())

    def batch_transfer_sync_write(
        self, dest_session: str, buffers: list[int], peer_buffers: list[int], lengths: list[int], flags: int = 0
    ) -> int:
        return self._copy(dest_session, buffers, peer_buffers, lengths, False)

    def batch_transfer_sync_read(
        self, dest_session: str, buffers: list[int], peer_buffers: list[int], lengths: list[int], flags: int = 0
    ) -> int:
        return self._copy(dest_session, buffers, peer_buffers, lengths, True)

    def _copy(self, session: str, mine: list[int], theirs: list[int], lengths: list[int], read: bool) -> int:
        peer = self.engines.get(session)
        if not self.session or peer is None or not len(mine) == len(theirs) == len(lengths):
            return -1
        for here, there, length in zip(mine, theirs, lengths, strict=True):
            if type(here) is not int or not length > 0 or not self.holds(here, length) or not peer.holds(there, length):
                return -1
        for here, there, length in zip(mine, theirs, lengths, strict=True):
            ctypes.memmove(*((here, there) if read else (there, here)), length)
        return 0

    def destroy(self) -> None:
        self.engines.pop(self.session, None)
        self.session = ""


def install() -> None:
    """Let `import memfabric_hybrid` find this."""
    module = types.ModuleType("memfabric_hybrid")
    module.TransferEngine, module.TransDataOpType = TransferEngine, TransDataOpType  # type: ignore[attr-defined]
    sys.modules["memfabric_hybrid"] = module
