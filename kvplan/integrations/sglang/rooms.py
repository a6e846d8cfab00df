"""The room that a transfer worker is busy with, and what is checked of a chunk before SGLang looks at it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Current(threading.local):
    """The chunk that this thread transfers, and its room; None outside a transfer worker."""

    room: int | None = None
    chunk: Any = None


class WatchedQueue:
    """A transfer queue of SGLang's that notes the chunk taken from it, and has it checked first."""

    def __init__(self, queue: Any, current: Current, check: Callable[[Any], None]) -> None:
        self._queue, self._current, self._check = queue, current, check

    def get(self) -> Any:
        """The next chunk; None ends the worker."""
        self._current.room = self._current.chunk = None
        chunk = self._queue.get()
        if chunk is not None:
            self._current.room, self._current.chunk = chunk.room, chunk
            self._check(chunk)
        return chunk

    def put(self, item: Any) -> None:
        """Put a chunk back, or any other."""
        self._queue.put(item)


def short_lists(chunk: Any, infos: Any) -> str | None:
    """Why a chunk's page lists do not fit the lists that decode has sent, or None. SGLang would cut the longer one.

    Args:
        chunk: a TransferKVChunk.
        infos: the TransferInfos of its room that take whole pages.
    """
    count = len(chunk.prefill_kv_indices)
    for info in infos:
        for ids, what in ((info.dst_kv_indices, "pages"), (info.dst_device_kv_indices, "device pages")):
            if ids is None:
                continue
            try:
                given = len(ids[chunk.index_slice])
            except IndexError as error:
                return f"prefill sends positions that decode gave no {what} for: {error}"
            if given < count:
                return (
                    f"prefill sends {count} pages from position {getattr(chunk.index_slice, 'start', None)} on, and "
                    f"decode gave {given} {what} there, {len(ids)} in all"
                )
    return None
