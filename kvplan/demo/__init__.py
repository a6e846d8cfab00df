"""The demo: a prefill and a decode process on loopback move DeepSeek-V4 requests through a real transfer engine.

    run.py        starts both processes, shows progress, prints the table
    prefill.py    owns the source pages; plans and sends, chunk by chunk
    decode.py     owns the destination pages; checks every byte of them afterwards
    allocator.py  page allocators, and the request churn that fragments them

This module holds what both processes share: the channel they talk over, and the pools with their pattern. The pattern
gives every 8 bytes of every page of every region of either side a value of their own, so a page that lands in the wrong
place, in part or whole, cannot look right, and what lies in the wrong place tells where it came from.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

from .. import Layout, Memory, Region

MAX_MESSAGE = 64 << 20  # bytes; a page table of 4,096 pages is about 25 KB
SOURCE, GUARD = 0, 1  # whose pattern: the prefill side's pages, or what the decode side's hold before anything arrives


class Channel:
    """JSON objects over a connected stream socket, each preceded by its length (4 bytes, big endian)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Raises OSError when the other end is gone, ValueError when the message is too long."""
        body = json.dumps({"kind": kind, **fields}).encode()
        if len(body) > MAX_MESSAGE:
            raise ValueError(f"message {kind!r} has {len(body)} bytes, more than {MAX_MESSAGE}")
        self.sock.sendall(len(body).to_bytes(4, "big") + body)

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for one message. Raises EOFError when the other end is gone, TimeoutError after `timeout` seconds
        without a byte, ValueError when the message is too long or malformed."""
        self.sock.settimeout(timeout)
        length = int.from_bytes(self._exactly(4), "big")
        if length > MAX_MESSAGE:  # before anything is allocated for it
            raise ValueError(f"a message announces {length} bytes, more than {MAX_MESSAGE}")
        message = json.loads(self._exactly(length))
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError("a message is not an object with a kind")
        return message

    def expect(self, kind: str, timeout: float | None = None) -> dict[str, Any]:
        """As `receive`, and ValueError when the message is of another kind."""
        message = self.receive(timeout)
        if message["kind"] != kind:
            raise ValueError(f"expected message {kind!r}, got {message['kind']!r}")
        return message

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self.sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError("the other process closed the channel")
            parts += part
        return bytes(parts)


Serve = Callable[[dict[str, Any], Channel, Channel], None]
REPORTED = 4  # exit code of a child that has told the parent what failed


def run_child(*serves: Serve) -> None:
    """Main of a child process: call each `serve(config, parent, peer)`, with its two channels from argv and the
    configuration from the parent. Several run in threads. An error is sent to the parent and ends the process; nor does
    it outlive the parent."""
    # Both children and the engine's own threads share the cores. Where these are busy, a second thread that must be
    # waited for makes passes over memory ten times slower than one thread is.
    torch.set_num_threads(1)
    fds = iter(map(int, sys.argv[1:]))
    threads = [
        threading.Thread(target=_run, args=(serve, *(Channel(socket.socket(fileno=next(fds))) for _ in range(2))))
        for serve in serves
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run(serve: Serve, parent: Channel, peer: Channel) -> None:
    try:
        config = parent.expect("config", timeout=60)
        parent.sock.settimeout(None)  # from here on this thread only sends on it, the other only receives
        threading.Thread(target=_leave_with_parent, args=(parent.sock,), daemon=True).start()
        serve(config, parent, peer)
    except Exception as error:  # whatever it is, the parent shall show it
        traceback.print_exc()
        # That the peer is gone is a consequence: the peer's own error is the one worth showing.
        consequence = isinstance(error, (EOFError, ConnectionError))
        with contextlib.suppress(OSError):
            parent.send("error", text=f"{type(error).__name__}: {error}", consequence=consequence)
        sys.stderr.flush()
        os._exit(REPORTED)  # now: a thread that is stuck in an engine would hold up an orderly exit for ever


def _leave_with_parent(lifeline: socket.socket) -> None:
    try:
        lifeline.recv(1)  # the parent sends nothing after the configuration: this returns when it is gone
    finally:
        os._exit(3)


def make_engine(name: str) -> Any:
    """The engine called `name` ("mooncake" or "local")."""
    from .. import engines  # here, so that what needs no engine runs without one

    if name == "mooncake":
        return engines.MooncakeEngine("127.0.0.1", protocol="tcp")
    return engines.LocalEngine()


# ---- the pattern: word = mix(side, region, page, word index), a bijection

_WORD_BITS, _PAGE_BITS, _REGION_BITS = 20, 28, 14  # of a key; the side is the bit above
_MASK = (1 << 64) - 1
_ODD, _ODD2 = 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93  # any odd factor is a bijection of 64-bit words
_UNDO, _UNDO2 = pow(_ODD, -1, 1 << 64), pow(_ODD2, -1, 1 << 64)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value  # torch multiplies signed words; the product wraps alike


def page_keys(side: int, region: int, pages: torch.Tensor) -> torch.Tensor:
    """What distinguishes the words of `pages` (int64 [P]) of region number `region`: int64 [P], for `pattern`."""
    head = (side << _REGION_BITS | region) << _PAGE_BITS
    return ((pages + head) << _WORD_BITS) * _signed(_ODD)


def pattern(keys: torch.Tensor, num_words: int) -> torch.Tensor:
    """The words of the pages with `keys` (int64 [P]): int64 [P, num_words], each value unlike any other page's."""
    index = torch.arange(num_words, device=keys.device) * _signed(_ODD)
    words = keys[:, None] + index  # (page part + word index) * _ODD, the product taken apart
    # A product's low bytes know nothing of its factor's high ones. Folded in twice, every byte depends on all of the
    # key: else two pages would have bytes in common, and the count of wrong bytes would be too low.
    words ^= (words >> 32) & 0xFFFFFFFF
    words *= _signed(_ODD2)
    words ^= (words >> 32) & 0xFFFFFFFF
    return words


def identify(word: int) -> tuple[int, int, int, int]:
    """The (side, region number, page, word index) whose pattern is `word`; arbitrary numbers if it is nobody's."""
    key = word & _MASK
    key = (key ^ key >> 32) * _UNDO2 & _MASK
    key = (key ^ key >> 32) * _UNDO & _MASK
    index, key = key & (1 << _WORD_BITS) - 1, key >> _WORD_BITS
    page, key = key & (1 << _PAGE_BITS) - 1, key >> _PAGE_BITS
    return key >> _REGION_BITS, key & (1 << _REGION_BITS) - 1, page, index


# ---- pools


class Pools:
    """The memory of one side: one buffer a space, all of it covered by the regions of a DeepSeek-V4-Flash layout.

    `num_host_pages` makes it a decode side: C4 KV lies in the host buffer. The device buffer is CUDA memory where there
    is a GPU, else ordinary memory (and is declared as what it is).
    """

    def __init__(self, num_pages: int, num_host_pages: int | None = None) -> None:
        cuda = torch.cuda.is_available()
        memory = Memory.VRAM(0) if cuda else Memory.DRAM
        sizes = Layout.deepseek_v4(0, num_pages=num_pages, num_host_pages=num_host_pages)
        space_of = {region.key: region.space for region in sizes.regions}
        nbytes = dict.fromkeys(sizes.spaces, 0)
        for region in sizes.regions:
            nbytes[region.space] += region.page_bytes * region.num_pages
        self.buffers = {  # int64 words
            space: torch.zeros(size // 8, dtype=torch.int64, device="cuda:0" if cuda and space != "host" else "cpu")
            for space, size in nbytes.items()
        }
        taken = dict.fromkeys(sizes.spaces, 0)

        def place(name: str, layer: int, size: int) -> int:
            space = space_of[name, layer]
            taken[space] += size
            return self.buffers[space].data_ptr() + taken[space] - size

        self.layout = Layout.deepseek_v4(place, num_pages=num_pages, num_host_pages=num_host_pages, memory=memory)
        if taken != {space: buffer.nbytes for space, buffer in self.buffers.items()}:
            raise AssertionError("the regions do not cover the pools: a check of the regions would miss bytes")
        self.number = {key: n for n, key in enumerate(sorted(space_of))}  # the same on both sides, whatever their order

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.buffers.values())

    def pages(self, region: Region) -> torch.Tensor:
        """The pages of `region`, a view: int64 [num_pages, page_bytes / 8]."""
        buffer = self.buffers[region.space]
        offset = (region.base - buffer.data_ptr()) // 8
        shape, stride = (region.num_pages, region.page_bytes // 8), (region.page_stride // 8, 1)  # type: ignore[operator]
        return buffer.as_strided(shape, stride, offset)

    def fill(self, side: int, pages: torch.Tensor | None = None) -> None:
        """Write the pattern of `side` into `pages` (int64, on the CPU) of every region; default all pages."""
        for region in self.layout.regions:
            view = self.pages(region)
            chosen = torch.arange(region.num_pages) if pages is None else pages
            for block in blocks(chosen, view.shape[1]):
                block = block.to(view.device)
                view[block] = pattern(page_keys(side, self.number[region.key], block), view.shape[1])
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # an engine does not wait for torch's stream


def blocks(values: torch.Tensor, num_words: int) -> tuple[torch.Tensor, ...]:
    """`values` (one a page) in parts of about 2 MB worth of pages, so that passes over a part stay in the cache."""
    return values.split(max(1, (1 << 18) // num_words))
