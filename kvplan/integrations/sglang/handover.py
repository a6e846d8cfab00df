"""Plans handed to SGLang's engine: as arrays, else as views of the table, else as lists in pieces."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from kvplan.planning.plan import lists_of

# Over TCP Mooncake queues 1,024 descriptors a peer, lets 1,024 more wait and fails on more.
_TCP_PIECE = 1024

#: Descriptors of a call that takes lists: they fit a core's cache, so that the next piece finds warm memory.
LIST_PIECE = 8192

#: Descriptors of a call that takes arrays or views.
PIECE = 65_536


class Engine:
    """SGLang's MooncakeTransferEngine, handed plans.

    Mooncake 0.3.14 and newer take arrays. Older ones take any sequence: a view of the table gives them its numbers one
    by one, sooner than lists are made and read. An engine that is not Mooncake's own gets lists.

    Args:
        engine: SGLang's engine.
        mooncake: whether Mooncake is behind it. SGLang's Ascend engine is of the same class, with memfabric behind it.
    """

    def __init__(self, engine: Any, mooncake: bool = True) -> None:
        self._engine = engine
        behind = getattr(engine, "engine", None) if mooncake else None
        self._arrays = getattr(behind, "batch_transfer_sync_write_arrays", None)
        self._views = getattr(behind, "batch_transfer_sync_write", None)
        tcp = os.environ.get("MC_FORCE_TCP") == "1" or os.environ.get("MOONCAKE_PROTOCOL") == "tcp"
        self._piece, self._list_piece = (_TCP_PIECE, _TCP_PIECE) if tcp and mooncake else (PIECE, LIST_PIECE)

    def send(self, session: str, table: np.ndarray) -> int:
        """Write what a plan's table says to a peer, piece by piece.

        Args:
            session: the peer.
            table: int64 [3, N], source addresses, destination addresses and bytes, as `Plan.table` holds them.

        Returns:
            int: 0, or what the first call that failed returned.
        """
        if self._arrays is None and self._views is None:
            return self._send_lists(session, table)
        count = table.shape[1]
        words = table.view(np.uint64)
        for start in range(0, count, self._piece):
            src, dst, nbytes = words if count <= self._piece else words[:, start : start + self._piece]
            try:
                if self._arrays is not None:
                    code = self._arrays(session, src, dst, nbytes)
                else:
                    assert self._views is not None
                    code = self._views(session, src.data, dst.data, nbytes.data)
            except TypeError:  # of the arguments: nothing has been sent
                self._arrays = self._views = None
                return self._send_lists(session, table[:, start:])
            except Exception:  # as SGLang's own call does
                code = -1
            if code != 0:
                return code
        return 0

    def _send_lists(self, session: str, table: np.ndarray) -> int:
        for start in range(0, table.shape[1], self._list_piece):
            code = self._engine.batch_transfer_sync(session, *lists_of(table[:, start : start + self._list_piece]))
            if code != 0:
                return code
        return 0
