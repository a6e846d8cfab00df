"""The address of a UCX worker, checked before UCX reads it.

UCX is not given the length of an address: it follows the lengths inside, and ends the process on values that it does
not expect. The form is that of `src/ucp/wireup/address.c` of UCX 1.20 to 1.23, versions 1 and 2, without
UCX_UNIFIED_MODE:

    header:     version and flags, 64-bit id of the worker, its name where a flag says so
    a device:   number of its memory domain, length and flags, paths and system device where flags say so, address
    a transport of the device:  16-bit sum of its name, attributes, length and flags, address
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import TypeAlias

# Sums (CRC-16/X-25) of the names of transports: "tcp", and those that map memory: "sysv", "posix" and "xpmem".
_TCP = 0x19CF
_SHARED = frozenset({0x538D, 0xD3A7, 0x83DD})
_MAX_TRANSPORTS = 128  # UCX keeps no more of one address
_MAX_DOMAINS = 64
_MAX_NAME = 32
_LAST = 0x80


class Reader:
    """Takes fields from the front of `data`. Every method raises ValueError where `data` ends too early."""

    def __init__(self, data: bytes, what: str) -> None:
        self._data, self._what = data, what
        self.at = 0  # bytes taken

    def take(self, count: int) -> bytes:
        if count > len(self._data) - self.at:
            raise self.wrong(f"{count} bytes are wanted, {len(self._data) - self.at} are left")
        self.at += count
        return self._data[self.at - count : self.at]

    def ahead(self, count: int) -> bytes:
        """The next bytes, or what is left of them; they are still to be taken."""
        return self._data[self.at : self.at + count]

    def byte(self) -> int:
        return self.take(1)[0]

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "little")

    def expect(self, text: bytes) -> None:
        found = self.take(len(text))
        if found != text:
            raise self.wrong(f"{found!r} stands where {text!r} should")

    @property
    def left(self) -> int:
        return len(self._data) - self.at

    def wrong(self, why: str) -> ValueError:
        return ValueError(f"{self._what}, byte {self.at}: {why}")


Place: TypeAlias = tuple[int, bytes, bytes]  # sum of a transport's name, its device's address, its own


@dataclasses.dataclass(frozen=True)
class _Device:
    start: int
    flags: int  # where they lie
    stop: int
    last: bool
    places: list[Place]


def check(address: bytes) -> frozenset[Place]:
    """Where `address` leads to: the places that no other worker has at the same time.

    Raises:
        ValueError: UCX would not read it, or read past its end; names the place.
    """
    places = [place for device in _devices(address)[1] for place in device.places if place[0] not in _SHARED]
    if not places:
        raise ValueError("address of the peer's UCX worker: no transport but shared memory")
    # A TCP port, or what a transport within a host calls itself; others may be the same for all processes of a host.
    return frozenset(place for place in places if place[0] == _TCP or len(place[2]) >= 8)


def under(address: bytes, worker: bytes) -> bytes:
    """The same address, which has passed `check`, with another id of the worker (8 bytes), without shared memory.

    UCX finds the connection that a peer has made to it by this id alone. Under an id of its own, what an address says
    cannot take the place of another's connection. What an address says of shared memory UCX maps and trusts.
    """
    head, devices = _devices(address)
    data = bytearray(address)
    at = 2 if address[0] & 15 else 1
    data[at : at + 8] = worker
    kept = [device for device in devices if not device.places or device.places[0][0] not in _SHARED]
    for device in kept:
        data[device.flags] &= ~_LAST
    data[kept[-1].flags] |= _LAST
    return bytes(data[:head]) + b"".join(bytes(data[device.start : device.stop]) for device in kept)


def _devices(address: bytes) -> tuple[int, list[_Device]]:
    """(length of the header, all devices)."""
    reader = Reader(address, "address of the peer's UCX worker")
    first = reader.byte()
    version = first & 15
    if version > 1:
        raise reader.wrong(f"version {version}; it is 0 or 1")
    flags = reader.byte() if version else first >> 4
    if flags & ~1 != 2:
        raise reader.wrong(f"flags {flags:#x}; the id of the worker is wanted, its name allowed, and nothing else")
    reader.take(8)  # id of the worker
    if flags & 1:
        length = reader.byte()
        if length >= _MAX_NAME:
            raise reader.wrong(f"a name of {length} bytes; at most {_MAX_NAME - 1} are taken")
        reader.take(length)
    head = reader.at
    devices = [_device(reader, version)]
    while not devices[-1].last:
        devices.append(_device(reader, version))
    if reader.left:
        raise reader.wrong(f"{reader.left} bytes behind its end")
    if sum(len(device.places) for device in devices) > _MAX_TRANSPORTS:
        raise reader.wrong(f"more than {_MAX_TRANSPORTS} transports")
    return head, devices


def _extended(reader: Reader, mask: int, version: int) -> tuple[int, int]:
    """(flags, value) of a byte; in version 2 a value of all ones says that it follows in a byte of its own."""
    byte = reader.byte()
    value = byte & mask
    return byte & ~mask, reader.byte() if version and value == mask else value


def _device(reader: Reader, version: int) -> _Device:
    start = reader.at
    empty, domain = _extended(reader, 0x7F, version)
    if domain >= _MAX_DOMAINS:
        raise reader.wrong(f"memory domain {domain}; UCX has at most {_MAX_DOMAINS}")
    at = reader.at
    flags, length = _extended(reader, 0x1F, version)
    if flags & 0x40 and not reader.byte():
        raise reader.wrong("a device without paths")
    if flags & 0x20:
        reader.byte()  # system device
    address = reader.take(length)
    places: list[Place] = []
    last = bool(empty)
    while not last:
        place, last = _transport(reader, version, address)
        places.append(place)
    if len({place[0] in _SHARED for place in places}) > 1:
        raise reader.wrong("shared memory and another transport of one device")
    return _Device(start, at, reader.at, bool(flags & _LAST), places)


def _transport(reader: Reader, version: int, device: bytes) -> tuple[Place, bool]:
    """Read one transport of the device with this address: its place, and whether it is the last."""
    name = reader.number(2)
    if version:
        _overhead, rate8, _latency, _priority, segment, flags16 = struct.unpack("<BBBBHH", reader.take(8))
        if not rate8:
            raise reader.wrong("a transport without bandwidth")
        # In units of 64 bytes. UCX ends the process where its keys do not fit into a message.
        if flags16 & 2 and segment * 64 < 1024:
            raise reader.wrong(f"messages of {segment * 64} bytes; UCX sends at least 1024")
    else:
        overhead, rate, latency, _flags32 = struct.unpack("<fffI", reader.take(16))
        # UCX compares what it computes of these, and ends the process where equal things compare as unequal.
        for what, value, most in (("overhead", overhead, 1.0), ("bandwidth", rate, 1e16), ("latency", latency, 1.0)):
            if not (math.isfinite(value) and 0 <= value <= most) or (what == "bandwidth" and value < 1.0):
                raise reader.wrong(f"{what} {value} of a transport")
    flags, length = _extended(reader, 0x3F, version)
    if flags & 0x40:
        raise reader.wrong("an endpoint's address, which no worker's address has")
    address = reader.take(length)
    if name == _TCP:
        _check_tcp(reader.wrong, device, address)
    return (name, device, address), bool(flags & _LAST)


def _check_tcp(wrong: Callable[[str], ValueError], device: bytes, address: bytes) -> None:
    """TCP trusts its lengths. A device is: flags, family, and an IP address; or where it is loopback, the host."""
    if len(address) != 2:
        raise wrong(f"a TCP port of {len(address)} bytes")
    families = {2: 4, 10: 16}
    if len(device) < 2 or device[0] > 1 or device[1] not in families:
        raise wrong(f"{device[:2]!r} is no TCP address")
    length = 2 + (12 if device[0] else families[device[1]])
    if len(device) != length:
        raise wrong(f"a TCP address of {len(device)} bytes instead of {length}")
