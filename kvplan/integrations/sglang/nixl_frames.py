"""Messages to a NIXL prefill process, checked before SGLang reads them, and the frame of a room's two page id lists.

SGLang's NIXL messages have no place for device page ids. They travel in a frame behind SGLang's own, together with the
host page ids; the frame where SGLang looks for page ids then holds ids that no pool has. A prefill process without
kvplan so fails the room, as NIXL finds no such page. With the host page ids there, it would write device buffers under
host page ids.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from .frames import (
    INT32_END,
    INT64_END,
    MOST_BUFFERS,
    FrameError,
    frame_at,
    lists,
    read_number,
    read_text,
    words,
)

#: The first frame of each of SGLang's NIXL messages. The places below count from the frame behind it.
GUARD = b"NixlMsgGuard"

#: Frames of a registration of SGLang 0.5.23, and of a room's page ids; kvplan's own come behind them.
REGISTRATION, ROOM = 24, 10

#: Where a room's page ids are, counted from the frame behind GUARD.
IDS = 4

#: The first frame of messages that SGLang checks itself, or that come with its staging buffers.
_OTHERS = (b"ABORT", b"WATERMARK", b"STAGING_RSP")

_MAGIC = b"kvplan ids 1\n"
_MOST_METADATA = 1 << 26

Ids = np.ndarray  # int32 [pages]


def ids_frame(host: Ids, device: Ids) -> bytes:
    """The extra frame of a room: host page ids and device page ids, int32."""
    host, device = (np.ascontiguousarray(ids, np.int32) for ids in (host, device))
    return _MAGIC + struct.pack("<II", len(host), len(device)) + host.tobytes() + device.tobytes()


def read_ids(frame: bytes) -> tuple[Ids, Ids]:
    """Host page ids and device page ids of a room's extra frame.

    Raises:
        FrameError: it is none.
    """
    start = len(_MAGIC) + 8
    if not frame.startswith(_MAGIC) or len(frame) < start:
        raise FrameError(f"the page id frame of {len(frame)} bytes is none of this version")
    host, device = struct.unpack_from("<II", frame, len(_MAGIC))
    if start + 4 * (host + device) != len(frame):
        raise FrameError(f"the page id frame has {len(frame)} bytes, and not those of {host} and {device} page ids")
    ids = np.frombuffer(frame, np.int32, offset=start)
    return ids[:host], ids[host:]


def is_checked_elsewhere(message: Sequence[bytes]) -> bool:
    """Whether this is neither a registration nor a room's page ids."""
    return bool(message) and message[0] in _OTHERS


def check(message: Sequence[bytes]) -> None:
    """Check a registration, or the page ids of a room: the frames behind GUARD.

    Raises:
        FrameError: a frame is missing, has a wrong length, or a number in it is out of range.
    """
    if len(message) < 7:
        raise FrameError(f"the message has {len(message)} frames, and needs 7 or more")
    read_text(message[1], "endpoint")
    read_number(message[2], "port", 1 << 16)
    read_text(message[3], "agent")
    if message[0] == b"None":
        _check_registration(message)
    else:
        read_number(message[0], "room", INT64_END)
        _check_room(message)


def _check_registration(message: Sequence[bytes]) -> None:
    if len(message) < 12:
        raise FrameError(f"the registration has {len(message)} frames, and needs 12 or more")
    if not 0 < len(message[4]) <= _MOST_METADATA:
        raise FrameError(f"the agent's metadata has {len(message[4])} bytes")
    pointers = words(message[5], 8, "KV pointers")
    if len(pointers) > MOST_BUFFERS:
        raise FrameError(f"the registration names {len(pointers)} KV buffers, more than {MOST_BUFFERS}")
    words(message[6], 8, "auxiliary pointers")
    states = lists(message[7], 8, "state pointers")
    read_number(message[8], "device", 1 << 16)
    if not read_number(message[9], "TP size", INT32_END):
        raise FrameError("TP size is 0")
    read_number(message[10], "TP rank", INT32_END)
    first = read_number(message[11], "KV page bytes", INT64_END)
    for place, what in ((12, "state page sizes"), (13, "state dimensions"), (19, "state layer ids")):
        found = lists(frame_at(message, place), 4, what)
        if place == 12 and found:
            for component, (bases, each) in enumerate(zip(states, found, strict=False)):
                if each and len(each) != len(bases):
                    raise FrameError(f"state {component} has {len(bases)} buffers and {len(each)} page sizes")
    if len(frame_at(message, 14)) not in (0, 8):
        raise FrameError(f"the staging pointer has {len(message[14])} bytes")
    for place, what in ((15, "staging size"), (16, "number of pages")):
        if frame_at(message, place):
            read_number(message[place], what, INT64_END)
    _check_columns(message, pointers, first)
    lists(frame_at(message, 23), 8, "state sizes")
    size, rank = (read_number(frame_at(message, place), what, 1 << 16) if frame_at(message, place) else default
                  for place, what, default in ((21, "DCP size", 1), (22, "DCP rank", 0)))  # fmt: skip
    if not rank < size:
        raise FrameError(f"DCP rank {rank} of {size}")


def _check_columns(message: Sequence[bytes], pointers: Sequence[int], first: int) -> None:
    """What a registration says of each KV buffer."""
    kinds = frame_at(message, 17)
    if kinds:
        found = kinds.split(b",")
        if len(found) != len(pointers) or set(found) - {b"VRAM", b"DRAM"}:
            raise FrameError(f"{len(pointers)} KV buffers are registered, and memory kinds {found[:8]}")
    sizes = words(frame_at(message, 18), 8, "KV page sizes")
    if sizes and (len(sizes) != len(pointers) or sizes[0] != first):
        raise FrameError(f"{len(pointers)} KV buffers of {first} bytes a page, and page sizes {sizes[:4]}...")
    if any(not 0 < each < INT64_END for each in sizes):
        raise FrameError(f"KV page sizes {sizes[:4]}... are out of range")
    layers = words(frame_at(message, 20), 4, "KV layer ids")
    if layers and len(layers) != len(pointers):
        raise FrameError(f"{len(pointers)} KV buffers are registered, and {len(layers)} layer ids")


def _check_room(message: Sequence[bytes]) -> None:
    read_number(message[6], "number of decode ranks", 1 << 20)
    words(message[IDS], 4, "page ids")
    read_number(message[5], "auxiliary index", INT32_END)
    if frame_at(message, 9):
        read_number(message[9], "dummy rank", 2)
    lists(frame_at(message, 7), 4, "state page ids")
    if frame_at(message, 8):
        read_number(message[8], "prefix length", INT64_END)
    if len(message) > ROOM:
        host, _ = read_ids(message[ROOM])
        if len(message[IDS]) != 4 * len(host):
            raise FrameError(f"the room has {len(message[IDS]) // 4} page ids, and {len(host)} host page ids")
