"""Sessions of a NIXL engine as a peer might forge them: each whole, under a digest of its own."""

from __future__ import annotations

import base64
import random
import struct
from collections.abc import Iterator

from kvplan.engines.nixl_session import session_of

PATTERNS = (b"\xff" * 8, b"\0" * 8, b"\xff", b"\0", b"\x80", b"\x01\0\0\0\0\0\0\0", b"\0\0\0\0\0\0\0\x80")
NUMBERS = (0, 1, 1 << 20, 1 << 31, 1 << 32, 1 << 40, 1 << 62, 1 << 63, (1 << 64) - 1)


def parts(session: str) -> tuple[str, bytes]:
    """The agent's name and its metadata."""
    return session.split(":")[1], base64.b64decode(session.split(":")[3])


def address_of(metadata: bytes) -> slice:
    """Where the address of the UCX worker lies."""
    start = metadata.index(b"UCX|c") + 13
    return slice(start, start + int.from_bytes(metadata[start - 8 : start], "little"))


def with_address(metadata: bytes, address: bytes) -> bytes:
    at = address_of(metadata)
    return metadata[: at.start - 8] + len(address).to_bytes(8, "little") + address + metadata[at.stop :]


def everywhere(metadata: bytes) -> Iterator[bytes]:
    """Each pattern at each place, each bit turned, each length cut off."""
    for at in range(len(metadata)):
        for pattern in PATTERNS:
            yield (metadata[:at] + pattern + metadata[at + len(pattern) :])[: max(len(metadata), at + len(pattern))]
        for bit in range(8):
            yield metadata[:at] + bytes([metadata[at] ^ (1 << bit)]) + metadata[at + 1 :]
        yield metadata[:at]


def lengths(metadata: bytes) -> Iterator[bytes]:
    """Each length and count one off, and as large as can be."""
    for at in range(len(metadata) - 8):
        number = int.from_bytes(metadata[at : at + 8], "little")
        if number <= len(metadata):
            for other in {number - 1, number + 1, *NUMBERS} - {number}:
                yield metadata[:at] + (other % (1 << 64)).to_bytes(8, "little") + metadata[at + 8 :]


def spoiled(rng: random.Random, metadata: bytes) -> bytes:
    """With some bytes changed, put in, taken out or repeated, in the address or anywhere."""
    at = address_of(metadata)
    inside = rng.randrange(3) > 0
    data = bytearray(metadata[at] if inside else metadata)
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        place = rng.randrange(len(data)) if data else 0
        match rng.randrange(8):
            case 0:
                data[place : place + 1] = bytes([rng.randrange(256)])
            case 1:
                data[place : place + 8] = rng.choice(PATTERNS)
            case 2:
                data[place : place + 8] = struct.pack("<Q", rng.choice(NUMBERS))
            case 3:
                data[place : place + 4] = struct.pack("<f", rng.choice([0.0, -1.0, 1e-9, 1e15, 1e38, float("nan")]))
            case 4:
                del data[place : place + rng.choice([1, 2, 8, 14, 23, 37])]
            case 5:
                data[place:place] = rng.randbytes(rng.choice([1, 2, 8, 64]))
            case 6:
                start = rng.randrange(len(data)) if data else 0
                data[place:place] = data[start : start + rng.choice([2, 14, 23, 37, 48, 200])]
            case 7:
                data = data[: place + 1]
    return with_address(metadata, bytes(data[:1000])) if inside else bytes(data)


def forged(session: str, metadata: bytes) -> str:
    """Other metadata under the same name."""
    return session_of(parts(session)[0], metadata)
