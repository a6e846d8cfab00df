"""What kvplan makes of messages from SGLang's decode processes; no SGLang is needed."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from kvplan import Layout
from kvplan.integrations.sglang import frames, names, rooms
from kvplan.integrations.sglang.frames import FrameError


def test_sglang_s_other_processes_import_nothing_heavy() -> None:
    code = "import sys, kvplan.integrations.sglang; print({'torch', 'numpy', 'kvplan.planning'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


def lists(*columns: list[int], width: str = "Q") -> bytes:
    """Lists as SGLang packs them into one frame."""
    packed = [struct.pack(f"<{len(column)}{width}", *column) for column in columns]
    return struct.pack(f"<{len(packed) + 1}I", len(packed), *map(len, packed)) + b"".join(packed)


def registration() -> list[bytes]:
    return [
        b"None", b"10.0.0.2", b"4711", b"10.0.0.2:15000", struct.pack("<2Q", 4096, 8192), struct.pack("<Q", 64),
        lists([1 << 40, 1 << 41]), b"1", b"2", b"64", lists([32, 32], width="I"), lists([]), struct.pack("<2I", 3, 4),
        lists([0, 1], width="I"), b"", b"", b"2", b"1", b"", struct.pack("<2Q", 64, 128),
    ]  # fmt: skip


def room() -> list[bytes]:
    ids = np.arange(5, dtype=np.int32).tobytes()
    return [b"77", b"10.0.0.2", b"4711", b"10.0.0.2:15000", ids, b"3", lists([1, 2], width="i"), b"1", b"0", ids]


def test_messages_as_sglang_sends_them_are_taken() -> None:
    frames.check(registration())
    frames.check([*registration(), b"more"])
    frames.check(registration()[:10])  # older peers send fewer
    frames.check(room())
    frames.check(room()[:8])
    frames.check([b"77", b"h", b"1", b"h:1", b"", b"", b"", b"2"])  # a rank that takes no part
    frames.check([b"ABORT", b"7"])


def test_page_ids_of_another_page_size() -> None:
    ids = np.array([5, -1, 1 << 30], np.int32)
    frame = frames.pages_frame(48, ids)
    frames.check([*room(), frame])
    page_size, found = frames.read_pages(frame)
    assert page_size == 48 and found.tolist() == ids.tolist()
    for malformed in (
        b"", b"more", frame[:-1], frame + b"\0\0\0\0", frame.replace(b"1\n", b"2\n"), frames.pages_frame(0, ids),
        frames.pages_frame(1 << 20, ids), frame[:20],
    ):  # fmt: skip
        with pytest.raises(FrameError, match="page id frame"):
            frames.check([*room(), malformed])
    assert set(np.frombuffer(frames.no_pages(7), np.int32).tolist()) == {2**31 - 1}


@pytest.mark.parametrize(
    "place, frame, reason",
    [
        (2, b"65536", "port is b'65536'"), (3, b"nowhere", "does not end in a port"), (3, b"\xff", "no ASCII"),
        (4, b"\0" * 15, "KV pointers: 15 bytes are no multiple of 8"), (4, b"\0" * 8, "1 KV buffers and 2 page sizes"),
        (6, b"\x02\0\0\0", "2 lists do not fit into 4 bytes"), (6, lists([5]) + b"\0", "the lists in them take 16"),
        (7, b"-1", "TP rank is b'-1'"), (8, b"0", "TP size is 0"), (9, b"1e3", "KV page bytes"),
        (9, b"63", "do not fit the first one, 63"), (10, lists([1], width="I"), "2 buffers and 1 page sizes"),
        (12, b"\0" * 4, "2 KV buffers are registered, and 1 layer ids"), (13, b"abc", "3 bytes hold no lists"),
        (16, b"0", "DCP rank 1 of 0"), (17, b"2", "DCP rank 2 of 2"), (19, b"\0" * 9, "no multiple of 8"),
    ],
)  # fmt: skip
def test_malformed_registrations_are_named(place: int, frame: bytes, reason: str) -> None:
    message = registration()
    message[place] = frame
    with pytest.raises(FrameError, match=reason):
        frames.check(message)


@pytest.mark.parametrize(
    "place, frame, reason",
    [
        (0, b"7x", "room is b'7x'"), (4, b"\0" * 6, "page ids: 6 bytes"), (5, b"None", "auxiliary index is b'None'"),
        (6, b"\xff" * 8, "lists do not fit"), (7, b"", "number of decode ranks"), (8, b"-16", "prefix length"),
        (9, b"\0" * 2, "device page ids: 2 bytes"),
    ],
)  # fmt: skip
def test_malformed_rooms_are_named(place: int, frame: bytes, reason: str) -> None:
    message = room()
    message[place] = frame
    with pytest.raises(FrameError, match=reason):
        frames.check(message)


def test_any_bytes_are_taken_or_refused() -> None:
    rng = random.Random(3)
    refused = 0
    for _ in range(4000):
        message = rng.choice([registration, room])()
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(message))
            message[place] = rng.choice(
                [rng.randbytes(rng.randrange(40)), message[place][:-1], b"9" * 30, b"\xb2", b"0"]
            )
        message = message[: rng.randrange(len(message) + 1)]
        try:
            frames.check(message)
        except FrameError:
            refused += 1
    assert 1000 < refused < 4000


def made(*bases: int) -> Layout:
    keys = names.halves(len(bases) // 2)
    return Layout.from_columns(
        [n for n, _ in keys], [k for _, k in keys], list(bases), [64] * len(bases), 9, page_size=1
    )


def test_a_layout_frame_is_read_back() -> None:
    layout = made(4096, 8192, 12288, 16384)
    assert frames.read_layout(frames.layout_frame(layout), [4096, 8192, 12288, 16384]) == layout


@pytest.mark.parametrize(
    "frame, reason",
    [
        (b"", "none of this version"), (b"kvplan layout 2\n{}", "none of this version"),
        (b"kvplan layout 1\n{", "does not hold a layout"), (b"kvplan layout 1\n" + b"[" * 100_000, "does not hold"),
        (b"kvplan layout 1\n{}", "missing fields"), (frames.layout_frame(made(4096, 4160)), "different buffers"),
        (b"kvplan layout 1\n" + json.dumps({"page_size": 1, "regions": [{"name": "k"}]}).encode(), "region number 0"),
    ],
)  # fmt: skip
def test_other_layout_frames_are_refused(frame: bytes, reason: str) -> None:
    with pytest.raises(FrameError, match=reason):
        frames.read_layout(frame, [4096, 8192])


def test_lists_that_sglang_would_cut_are_found() -> None:
    def info(count: int, device: int | None = None) -> SimpleNamespace:
        ids = None if device is None else np.arange(device)
        return SimpleNamespace(dst_kv_indices=np.arange(count), dst_device_kv_indices=ids)

    chunk = SimpleNamespace(prefill_kv_indices=np.arange(5), index_slice=slice(10, 15))
    assert rooms.short_lists(chunk, [info(15), info(20, 15)]) is None
    assert "decode gave 4 pages there, 14 in all" in str(rooms.short_lists(chunk, [info(15), info(14)]))
    assert "decode gave 2 device pages there, 12 in all" in str(rooms.short_lists(chunk, [info(15, 12)]))
    chunk.index_slice = np.array([1, 2, 30, 3, 4])
    assert "no pages for" in str(rooms.short_lists(chunk, [info(15)]))
