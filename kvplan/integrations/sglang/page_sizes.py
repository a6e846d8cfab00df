"""Prefill and decode processes whose pages have different sizes. SGLang refuses them; its messages do not fit them.

Decode's own page ids travel in a frame behind SGLang's. Where SGLang looks for page ids, the message holds as many as
the prefill side has pages, and none that any pool has. So a prefill process without kvplan fails the room, as Mooncake
finds no such page, and one with kvplan cuts its chunks as ever.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import StateType
from sglang.srt.disaggregation.utils import DisaggregationMode

from kvplan import Pairing, PlanError

from . import frames
from .names import NotToldError
from .regions import Buffers, paged

_MOST_WAITING = 4096  # rooms whose page ids have come; beyond that, those that SGLang has dropped are dropped here too

Paged = tuple[int, np.ndarray]  # tokens of a decode page, and decode's page ids, int32 [pages]


class _AnyPageSize(int):
    """This side's page size, but for one question: `other != size` is answered with no.

    That question, in `try_ensure_parallel_info`, is SGLang's refusal.
    """

    def __ne__(self, _other: object) -> bool:
        return False

    __eq__ = int.__eq__
    __hash__ = int.__hash__


class PageSizes:
    """What a manager does where the other side's page size differs. Goes before SGLang's manager among base classes."""

    kv_args: Any
    dcp_size: int
    disaggregation_mode: Any
    prefill_info_table: dict[str, Any]
    addr_to_rooms_tracker: dict[str, set[int]]
    transfer_infos: dict[int, Any]
    current: Any

    def set_up_pages(self) -> None:
        """Make what this class adds."""
        self._pages: dict[tuple[int, str], Paged] = {}

    # --- decode

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """What SGLang does; a prefill server with another page size passes where kvplan can serve it."""
        args = self.kv_args
        if bootstrap_addr in self.prefill_info_table or self._why_same_pages() is not None:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))  # type: ignore[misc]
        mine = args.page_size
        args.page_size = _AnyPageSize(mine)
        try:
            return bool(super().try_ensure_parallel_info(bootstrap_addr))  # type: ignore[misc]
        finally:
            args.page_size = mine

    def _why_same_pages(self) -> str | None:
        """Why this side takes pages of its own size only, if so."""
        args = self.kv_args
        if self.disaggregation_mode != DisaggregationMode.DECODE:
            return "it is no decode process"
        if self.dcp_size > 1:
            return "rows are shared out by DCP"
        if getattr(args, "mla_compression_ratios", None):
            return "rows of compressed pages cannot be told apart"
        if any(kind != StateType.MAMBA for kind in args.state_types):
            return "state components move in whole pages"
        return None

    def _other_page_size(self, room: int) -> int | None:
        """The page size of the prefill server of a room, where it is not this side's."""
        for address, info in list(self.prefill_info_table.items()):
            differs = info.page_size not in (None, int(self.kv_args.page_size))
            if differs and room in self.addr_to_rooms_tracker.get(address, ()):
                return int(info.page_size)
        return None

    def build_receiver_metadata_message(self, **fields: Any) -> list[bytes]:
        """SGLang's frames. With another page size on the prefill side there is one more, and no page in SGLang's."""
        message: list[bytes] = super().build_receiver_metadata_message(**fields)  # type: ignore[misc]
        theirs = None if fields["is_dummy"] else self._other_page_size(fields["bootstrap_room"])
        if theirs is None:
            return message
        mine, ids = int(self.kv_args.page_size), np.ascontiguousarray(fields["kv_indices"], np.int32)
        nowhere = frames.no_pages(-(-len(ids) * mine // theirs))
        message[frames.IDS] = nowhere
        if message[frames.DEVICE_IDS]:
            message[frames.DEVICE_IDS] = nowhere
        return [*message, frames.pages_frame(mine, ids)]

    # --- prefill

    def _note_pages(self, message: Any) -> None:
        """Keep the page ids in a room's extra frame, until SGLang has made what it keeps of that room."""
        key = (int(message[0]), message[3].decode("ascii"))
        self._pages.pop(key, None)
        if len(message) > frames.ROOM:
            self._pages[key] = frames.read_pages(message[frames.ROOM])
            if len(self._pages) > _MOST_WAITING:
                for each in [each for each in self._pages if each != key and each[0] not in self.transfer_infos]:
                    del self._pages[each]

    def _attach_pages(self, infos: dict[str, Any]) -> None:
        """Give SGLang's TransferInfos of a room the page ids that came for it."""
        for session, info in infos.items():
            info.kvplan_pages = self._pages.pop((info.room, session), None)

    def _pages_of(self, session: str) -> Paged | None:
        """Page size and page ids of a decode process for this thread's room, where its page size differs."""
        room = self.current.room
        info = None if room is None else self.transfer_infos.get(room, {}).get(session)
        return getattr(info, "kvplan_pages", None)

    def _positions(self, session: str, count: int) -> dict[str, Any]:
        """Where in the request this thread's chunk of `count` pages lies: arguments of `Pairing.plan`.

        Raises:
            PlanError: SGLang does not say, or the chunk does not begin where a page does.
        """
        chunk, page_size = self.current.chunk, self.kv_args.page_size
        where = chunk.index_slice
        if not isinstance(where, slice) or where.step not in (None, 1) or chunk.num_kv_tokens is None:
            raise PlanError("decode's pages have another size, and this chunk's pages do not lie behind one another")
        prefix = self.transfer_infos[chunk.room][session].decode_prefix_len or 0
        if prefix % page_size:
            raise PlanError(f"decode holds {prefix} tokens, which is no multiple of prefill's {page_size} a page")
        start = prefix + (where.start or 0) * page_size
        return {"src_start": start, "dst_start": prefix, "num_tokens": min(chunk.num_kv_tokens, count * page_size)}

    def _pair_pages(self, src: Buffers, dst: Buffers, page_size: int, heads: tuple[Any, Any]) -> Pairing:
        """Rows between pages of two sizes.

        Raises:
            NotToldError: rows cannot be told apart.
        """
        if getattr(self.kv_args, "mla_compression_ratios", None):
            raise NotToldError("decode's pages have another size, and rows of compressed pages cannot be told apart")
        return paged(src, dst, self.kv_args.page_size, page_size, heads)
