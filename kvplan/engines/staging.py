"""Staging: memory of this process through which small descriptors go as large ones."""

from __future__ import annotations

import ctypes
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..errors import shown
from ..layout import Layout, Memory, Region

if TYPE_CHECKING:
    from ..planning import Segment

PIECE = 16 << 20  #: bytes of a slot by default
_ALIGNED = 4096


class Staging:
    """One arena for all peers of an engine, cut into slots of `piece` bytes. `Engine.submit(..., staging=)` uses it.

    The first `submit` that packs something registers it with its engine, where it stays until the engine is closed. A
    transfer of any size goes through in pieces, a slot each, and has at most two of them at a time. When no slot is
    free, transfers wait for one, in the order in which they came; they can be cancelled meanwhile. A slot is used again
    only when nothing reads or writes it any more: after a failure, when its transfer has settled.

    Args:
        nbytes: size in all, a multiple of `piece`. Two slots for each peer that is sent to at the same time are enough.
        piece: bytes of a slot.
        memory: `Memory.DRAM`; "pinned": DRAM that a GPU reaches, for pages on a GPU; or `Memory.VRAM(device)`, for
            pages on that GPU.

    Attributes:
        nbytes, piece, slots: sizes, and how many slots there are.
        memory: the kind of memory, as engines are told.
        pinned: whether it is pinned DRAM.
        layout: what is registered with the engine.

    Raises:
        ValueError: a size is none; or `memory` is.
        RuntimeError: torch has no such memory here, or not so much of it.
    """

    def __init__(self, nbytes: int, piece: int = PIECE, memory: Memory | Literal["pinned"] = Memory.DRAM) -> None:
        for name, value in (("nbytes", nbytes), ("piece", piece)):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 63:
                raise ValueError(f"{name} is {shown(value)}; it must be a number of bytes from 1 to 2^63 - 1")
        if nbytes % piece:
            raise ValueError(
                f"nbytes is {nbytes}; it must be a multiple of piece, {piece}: the rest would never be used"
            )
        if memory not in ("pinned", Memory.DRAM) and not (isinstance(memory, Memory) and memory.kind == "VRAM"):
            raise ValueError(f"memory is {memory!r}; it must be Memory.DRAM, 'pinned' or Memory.VRAM(device)")
        self.nbytes, self.piece, self.slots = nbytes, piece, nbytes // piece
        self.pinned = memory == "pinned"
        self.memory = memory if isinstance(memory, Memory) else Memory.DRAM
        self._tensor = _allocate(nbytes + _ALIGNED, self.memory, self.pinned)
        start = self._tensor.data_ptr()
        self._base = start + -start % _ALIGNED
        self.layout = Layout([Region("staging", 0, self._base, nbytes, 1, memory=self.memory)], page_size=1)
        self._owner: weakref.ref[Any] | None = None
        self._owning = threading.Lock()
        # From here on guarded by the engine's lock. The slot used last is used next: it is in the cache.
        self._unused = list(range(self.slots))[::-1]
        self._waiting: list[Any] = []  # transfers that found no slot

    @property
    def free(self) -> int:
        """Slots that are free now."""
        return len(self._unused)

    def __repr__(self) -> str:
        kind = "pinned DRAM" if self.pinned else str(self.memory)
        return f"<Staging of {self.nbytes} bytes of {kind}: {self.free} of {self.slots} slots of {self.piece} free>"

    # ---- for the engine

    def _attach(self, engine: Any) -> None:
        """Register it, once. ValueError where it belongs to another engine; else as `Engine.register`."""
        with self._owning:
            if self._owner is None:
                engine.register(self.layout)
                engine._stagings.append(self)  # its memory stays for as long as it is registered
                self._owner = weakref.ref(engine)
            elif self._owner() is not engine:
                raise ValueError(f"{self!r} belongs to another engine; make one for each")

    def _check_reach(self, segment: Segment, op: str) -> None:
        """ValueError where nothing can copy between staging and the pages that lie here."""
        pages = segment.src_memory if op == "write" else segment.dst_memory
        if pages.kind == "DRAM" and self.memory.kind == "DRAM":
            return
        if pages.kind == "VRAM" and (self.pinned or self.memory == pages):
            return
        kind = "pinned DRAM" if self.pinned else str(self.memory)
        raise ValueError(
            f"pages of {pages} cannot go by way of staging in {kind}: pages of a GPU need staging that is 'pinned' "
            f"or on the same GPU, and pages of DRAM need staging in DRAM"
        )

    def _address(self, slot: int) -> int:
        """Where a slot begins; the bit pattern as int64."""
        return ctypes.c_int64(self._base + slot * self.piece).value

    # ---- slots, with the engine's lock held

    def _claim(self, piece: Any, transfer: Any) -> bool:
        """Give a piece a slot. False where none is free: its transfer is queued again when one is.

        No thread waits meanwhile: it may be needed to find out that the slots of a failed transfer are free.
        """
        first = not self._waiting or transfer in self._waiting  # nobody who came before is about to be woken
        if not self._unused or not first:
            if transfer not in self._waiting:
                self._waiting.append(transfer)
            transfer._engine._waiting.watch()
            return False
        piece._slot = self._unused.pop()
        return True

    def _free(self, slot: int, engine: Any) -> None:
        self._unused.append(slot)
        if self._waiting:
            engine._events.append(lambda: self._wake(engine))  # when what frees it is through with its own account

    def _wake(self, engine: Any) -> None:
        """Queue again what waits for slots, first come, first served. Called without the lock."""
        with engine._lock:
            waiting, self._waiting = self._waiting, []
            for transfer in waiting:
                transfer._resume()


def _allocate(nbytes: int, memory: Memory, pinned: bool) -> torch.Tensor:
    if memory.kind == "VRAM":
        count = torch.cuda.device_count()
        if memory.device >= count:
            raise RuntimeError(f"staging in {memory}: torch sees {count} GPUs here")
        return torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", memory.device))
    if pinned and not torch.cuda.is_available():
        raise RuntimeError("pinned staging: memory is pinned for a GPU, and torch sees none here")
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
