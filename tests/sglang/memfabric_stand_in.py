"""memfabric_hybrid without an NPU: the engine behind SGLang's Ascend back end, with Mooncake's over TCP in its place.

SGLang's AscendTransferEngine, manager, sender, receiver and bootstrap server are its own. What stands in is the package
that moves bytes between NPUs: the calls that SGLang makes, with the signatures of memfabric_hybrid 1.3.0. Bytes go from
process to process by Mooncake over TCP, which refuses addresses that are not registered. No NPU has any part in this.
"""

from __future__ import annotations

import enum
import os
import sys
import types

PIECE = 1024  # Mooncake's queue over TCP ends at about 2,048 descriptors


class TransDataOpType(enum.Enum):
    """Names of memfabric's ways to move data."""

    SDMA = 1
    HOST_RDMA = 2
    DEVICE_RDMA = 4


class TransferEngine:
    """memfabric's engine, as far as SGLang calls it."""

    TransDataOpType = TransDataOpType

    def __init__(self) -> None:
        from mooncake.engine import TransferEngine as Mooncake

        self._mooncake = Mooncake()
        self._started = False
        self.calls: list[int] = []  # descriptors of each call

    def get_rpc_port(self) -> int:
        """0 before `initialize`: SGLang then asks again."""
        return int(self._mooncake.get_rpc_port()) if self._started else 0

    def initialize(self, store_url: str, session_id: str, role: str, device: int, op: TransDataOpType) -> int:
        """Start, under the host of `session_id`."""
        if role not in ("Prefill", "Decode") or not store_url.startswith("tcp://") or op is not TransDataOpType.SDMA:
            return -1
        code = int(self._mooncake.initialize(session_id.rpartition(":")[0], "P2PHANDSHAKE", "tcp", ""))
        self._started = code == 0
        return code

    def batch_register_memory(self, addresses: list[int], sizes: list[int]) -> int:
        """Register buffers."""
        return int(self._mooncake.batch_register_memory(addresses, sizes))

    def batch_transfer_sync_write(
        self, session: str, buffers: list[int], peer_buffers: list[int], lengths: list[int]
    ) -> int:
        """Write; lists of plain ints alone are taken."""
        columns = (buffers, peer_buffers, lengths)
        if not all(type(column) is list and all(type(each) is int for each in column) for column in columns):
            raise TypeError("incompatible function arguments")
        self.calls.append(len(buffers))
        for start in range(0, len(buffers), PIECE):
            part = (column[start : start + PIECE] for column in columns)
            code = int(self._mooncake.batch_transfer_sync_write(session, *part))
            if code != 0:
                return code
        return 0


def install() -> None:
    """Let `import memfabric_hybrid` find this."""
    os.environ["ASCEND_MF_STORE_URL"] = "tcp://127.0.0.1:1"
    module = types.ModuleType("memfabric_hybrid")
    module.TransferEngine, module.TransDataOpType = TransferEngine, TransDataOpType  # type: ignore[attr-defined]
    sys.modules["memfabric_hybrid"] = module
