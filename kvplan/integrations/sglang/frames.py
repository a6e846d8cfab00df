"""Messages from decode peers, checked before SGLang reads them, and the frame that kvplan adds to a registration.

SGLang reads frames by their position and ignores any behind those that it knows. So a peer without kvplan reads a
registration with the extra frame as any other.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvplan import Layout

#: Frames of a registration of SGLang 0.5.23; kvplan's own comes behind them.
REGISTRATION = 20

#: Frames of a room's page ids, and where the page ids and the device page ids are; kvplan's own frame comes behind.
ROOM, IDS, DEVICE_IDS = 10, 4, 9

_MAGIC = b"kvplan layout 1\n"
_PAGES = b"kvplan pages 1\n"
_MOST_BYTES = 1 << 25  # of the extra frame
MOST_BUFFERS = 1 << 16
INT32_END = 1 << 31
INT64_END = 1 << 63
_NO_PAGE = INT32_END - 1  # no pool has this many pages: they would take 2 GiB and more a byte of a page


class FrameError(ValueError):
    """A message from a peer is malformed."""


def layout_frame(layout: Layout) -> bytes:
    """The extra frame: what this decode process holds, by name and layer."""
    return _MAGIC + json.dumps(layout.to_dict(), separators=(",", ":")).encode()


def read_layout(frame: bytes, pointers: Sequence[int]) -> Layout:
    """The layout in an extra frame, in the order of the pointers that the same message registers.

    Raises:
        FrameError: it is none, or names other buffers.
    """
    if not frame.startswith(_MAGIC) or len(frame) > _MOST_BYTES:
        raise FrameError(f"the layout frame of {len(frame)} bytes is none of this version")
    try:
        layout = Layout.from_dict(json.loads(frame[len(_MAGIC) :]))
    except (ValueError, RecursionError) as error:  # LayoutError is a ValueError
        raise FrameError(f"the layout frame does not hold a layout: {str(error)[:300]}") from None
    if [region.base for region in layout.regions] != list(pointers):
        raise FrameError("the layout frame and the pointers of the registration name different buffers")
    return layout


def pages_frame(page_size: int, ids: np.ndarray) -> bytes:
    """The extra frame of a room where page sizes differ: decode's page size in tokens, and its page ids, int32."""
    return _PAGES + struct.pack("<II", page_size, len(ids)) + np.ascontiguousarray(ids, np.int32).tobytes()


def read_pages(frame: bytes) -> tuple[int, np.ndarray]:
    """The page size and the page ids in a room's extra frame.

    Raises:
        FrameError: it is none.
    """
    start = len(_PAGES) + 8
    if not frame.startswith(_PAGES) or len(frame) < start:
        raise FrameError(f"the page id frame of {len(frame)} bytes is none of this version")
    page_size, count = struct.unpack_from("<II", frame, len(_PAGES))
    if start + 4 * count != len(frame) or not 0 < page_size < 1 << 20:
        raise FrameError(f"the page id frame has {len(frame)} bytes, {count} page ids, and pages of {page_size} tokens")
    return page_size, np.frombuffer(frame, np.int32, offset=start)


def check(message: Sequence[bytes]) -> None:
    """Check a message to a prefill process: a registration, or the page ids of a room.

    Raises:
        FrameError: a frame is missing, has a wrong length, or a number in it is out of range.
    """
    if not message:
        raise FrameError("the message has no frames")
    first = message[0]
    if first in (b"ABORT", b"WATERMARK", b"STAGING_RSP", b"BOOTSTRAP"):
        return  # SGLang checks these, or they come with its staging buffers
    if len(message) < 8:
        raise FrameError(f"the message has {len(message)} frames, and needs 8 or more")
    read_text(message[1], "endpoint")
    read_number(message[2], "port", 1 << 16)
    session = read_text(message[3], "session")
    if not session.rpartition(":")[2].isdecimal():  # SGLang sorts rooms into queues by this number
        raise FrameError(f"session {session[:80]!r} does not end in a port")
    if first == b"None":
        _check_registration(message)
    else:
        read_number(first, "room", INT64_END)
        _check_room(message)


def _check_registration(message: Sequence[bytes]) -> None:
    if len(message) < 10:
        raise FrameError(f"the registration has {len(message)} frames, and needs 10 or more")
    pointers = words(message[4], 8, "KV pointers")
    if len(pointers) > MOST_BUFFERS:
        raise FrameError(f"the registration names {len(pointers)} KV buffers, more than {MOST_BUFFERS}")
    words(message[5], 8, "auxiliary pointers")
    states = lists(message[6], 8, "state pointers")
    read_number(message[7], "TP rank", INT32_END)  # SGLang counts it over all groups: it may pass the size
    if not read_number(message[8], "TP size", INT32_END):
        raise FrameError("TP size is 0")
    item = read_number(message[9], "KV page bytes", INT64_END)
    lengths = frame_at(message, 19)
    if lengths:
        sizes = words(lengths, 8, "KV page sizes")
        if len(sizes) != len(pointers):
            raise FrameError(f"{len(pointers)} KV buffers and {len(sizes)} page sizes are registered")
        if any(not 0 <= each < INT64_END for each in sizes) or (sizes and sizes[0] != item):
            raise FrameError(f"KV page sizes {sizes[:4]}... do not fit the first one, {item}")
    layers = frame_at(message, 12)
    if layers and len(words(layers, 4, "KV layer ids")) != len(pointers):
        raise FrameError(f"{len(pointers)} KV buffers are registered, and {len(layers) // 4} layer ids")
    for place, what in ((10, "state page sizes"), (11, "state dimensions"), (13, "state layer ids")):
        lists(frame_at(message, place), 4, what)
    if frame_at(message, 10):
        sizes_of = lists(message[10], 4, "state page sizes")
        for number, (bases, each) in enumerate(zip(states, sizes_of, strict=False)):
            if each and len(each) != len(bases):
                raise FrameError(f"state {number} has {len(bases)} buffers and {len(each)} page sizes")
    if frame_at(message, 15):
        read_number(message[15], "staging size", INT64_END)
    dcp = [read_number(frame_at(message, place), what, 1 << 16) if frame_at(message, place) else default
           for place, what, default in ((16, "DCP size", 1), (17, "DCP rank", 0))]  # fmt: skip
    if not dcp[1] < max(dcp[0], 1) or not dcp[0]:
        raise FrameError(f"DCP rank {dcp[1]} of {dcp[0]}")
    if frame_at(message, 18):
        words(message[18], 8, "staging layer ids")


def _check_room(message: Sequence[bytes]) -> None:
    read_number(message[7], "number of decode ranks", 1 << 20)
    if frame_at(message, 8):
        read_number(message[8], "prefix length", INT64_END)
    if message[4] == b"" and message[5] == b"":
        return  # a rank that takes no part
    words(message[4], 4, "page ids")
    read_number(message[5], "auxiliary index", INT32_END)
    lists(message[6], 4, "state page ids")
    words(frame_at(message, DEVICE_IDS), 4, "device page ids")
    if len(message) > ROOM:
        read_pages(message[ROOM])


def no_pages(count: int) -> bytes:
    """As many page ids, none of which is in any pool, as a frame of SGLang's holds them."""
    return np.full(count, _NO_PAGE, np.int32).tobytes()


def frame_at(message: Sequence[bytes], place: int) -> bytes:
    """A frame, empty where the message ends before it."""
    return message[place] if len(message) > place else b""


def read_text(frame: bytes, what: str) -> str:
    """The printable ASCII text of a frame.

    Raises:
        FrameError: it holds none.
    """
    try:
        text = frame.decode("ascii")
    except UnicodeDecodeError:
        raise FrameError(f"{what} is no ASCII text") from None
    if not text or len(text) > 256 or not text.isprintable():
        raise FrameError(f"{what} is {text[:80]!r}")
    return text


def read_number(frame: bytes, what: str, end: int) -> int:
    """The decimal number from 0 to `end` - 1 in a frame.

    Raises:
        FrameError: it holds none.
    """
    if not frame.isdigit() or len(frame) > 20 or not int(frame) < end:
        raise FrameError(f"{what} is {frame[:40]!r}, and must be a number from 0 to {end - 1}")
    return int(frame)


def words(frame: bytes, width: int, what: str) -> list[int]:
    """The little-endian unsigned numbers of `width` bytes that a frame holds.

    Raises:
        FrameError: it does not hold whole numbers.
    """
    count, rest = divmod(len(frame), width)
    if rest:
        raise FrameError(f"{what}: {len(frame)} bytes are no multiple of {width}")
    return list(struct.unpack(f"<{count}{'Q' if width == 8 else 'I'}", frame))


def lists(frame: bytes, width: int, what: str) -> list[list[int]]:
    """Several lists in one frame: how many, the bytes of each, then all of them behind one another.

    Raises:
        FrameError: they do not fit the frame.
    """
    if not frame:
        return []
    if len(frame) < 4:
        raise FrameError(f"{what}: {len(frame)} bytes hold no lists")
    (count,) = struct.unpack_from("<I", frame)
    start = 4 + 4 * count
    if count > MOST_BUFFERS or start > len(frame):
        raise FrameError(f"{what}: {count} lists do not fit into {len(frame)} bytes")
    sizes = struct.unpack_from(f"<{count}I", frame, 4)
    if start + sum(sizes) != len(frame):
        raise FrameError(f"{what}: {len(frame)} bytes, and the lists in them take {start + sum(sizes)}")
    found = []
    for size in sizes:
        found.append(words(frame[start : start + size], width, what))
        start += size
    return found


def room_of(message: Sequence[Any]) -> int | None:
    """The room that a message is about, where that can be read."""
    first = message[0] if message else b""
    return int(first) if isinstance(first, bytes) and first.isdigit() and len(first) < 20 else None
