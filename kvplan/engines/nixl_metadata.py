"""A NIXL agent's metadata, checked before NIXL reads it.

NIXL trusts what it reads: a wrong length or kind of memory ends the process. The form is that of NIXL 1.5
(`nixlSerDes`): a mark, then fields, each a tag, a length of 64 bits, that many bytes and a bar.

    Agent, Conns: how many back ends, for each t: its name, c: where it is reached
    MemSection, nixlSecElms: how many kinds of memory, for each
        bknd: back end, nixlDList, t: kind, n: how many regions, for each: address, length, device, key

A key is UCX's (`src/ucp/core/ucp_rkey.c`): a bit for each memory domain, the memory's type, for each domain a length
and bytes, then the system device, and distances of other devices up to a byte of ones.
"""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np

from . import nixl_address
from .nixl_address import Reader

MAX_REGIONS = 65_536  # of one session: as many as a layout may have
_KINDS = {0: "DRAM", 1: "VRAM"}
_MARK = b"nixlSerDes|"
_TYPES = 10  # kinds of memory that UCX knows


@dataclasses.dataclass(frozen=True)
class Metadata:
    """What an agent says of itself.

    Attributes:
        name: of the agent.
        backend: NIXL's plugin that reaches it.
        address: where it is reached, in the back end's own form.
        places: see `nixl_address.check`.
        regions: for each kind of memory uint64 [N, 3]: address, bytes, device.
    """

    name: str
    backend: str
    address: bytes
    places: frozenset[nixl_address.Place]
    regions: dict[str, np.ndarray]
    _rest: bytes  # what follows the address

    @property
    def num_regions(self) -> int:
        return sum(map(len, self.regions.values()))

    def under(self, name: str) -> bytes:
        """The same metadata for an agent of another name, which shares nothing with others within NIXL and UCX."""
        address = self.address
        if self.backend == "UCX":
            address = nixl_address.under(address, hashlib.sha256(name.encode()).digest()[:8])
        fields = ((b"Agent", name.encode()), (b"Conns", (1).to_bytes(8, "little")), (b"t", self.backend.encode()))
        return _MARK + b"".join(_packed(tag, value) for tag, value in (*fields, (b"c", address))) + self._rest

    def outside(self, kind: str, rows: np.ndarray) -> int:
        """Number of the first of `rows` (uint64 [N, 3]: address, bytes, device) that is in none of the regions; -1."""
        regions = self.regions.get(kind, np.empty((0, 3), np.uint64))
        for number, (address, nbytes, device) in enumerate(rows):
            offsets = address - regions[:, 0]
            held = (regions[:, 0] <= address) & (regions[:, 2] == device)
            if not (held & (offsets < regions[:, 1]) & (nbytes <= regions[:, 1] - offsets)).any():
                return number
        return -1


def parse(data: bytes, backend: str) -> Metadata:
    """Read the metadata of an agent that has this back end alone.

    Raises:
        ValueError: it is not what NIXL writes; names the place.
    """
    reader = Reader(data, "metadata of the NIXL agent")
    reader.expect(_MARK)
    name = _field(reader, b"Agent", 64)
    if (count := _count(reader, b"Conns")) != 1:
        raise reader.wrong(f"{count} back ends; it has one")
    _expect_field(reader, b"t", backend.encode())
    address = _field(reader, b"c", 1 << 16)
    rest = data[len(data) - reader.left :]
    _expect_field(reader, b"", b"MemSection")
    ucx = backend == "UCX"
    places = nixl_address.check(address) if ucx else frozenset()
    sections = _count(reader, b"nixlSecElms")
    if sections > len(_KINDS):
        raise reader.wrong(f"{sections} kinds of memory; there are {len(_KINDS)}")
    regions: dict[str, np.ndarray] = {}
    room = MAX_REGIONS
    for _ in range(sections):
        _expect_field(reader, b"bknd", backend.encode())
        _expect_field(reader, b"nixlDList", b"nixlSDList")
        number = int.from_bytes(_field(reader, b"t", 4, 4), "little")
        if number not in _KINDS or _KINDS[number] in regions:
            raise reader.wrong(f"memory of kind {number}; it is 0 or 1, each once")
        length = _count(reader, b"n")
        if not 1 <= length <= room:
            raise reader.wrong(f"{length} regions of one kind; 1 to {MAX_REGIONS} in all are taken")
        room -= length
        regions[_KINDS[number]] = _regions(reader, length, ucx)
    if reader.left:
        raise reader.wrong(f"{reader.left} bytes behind its end")
    try:
        text = name.decode("ascii")
    except UnicodeDecodeError:
        raise reader.wrong(f"the agent's name is {name!r}") from None
    return Metadata(text, backend, address, places, regions, rest)


def _field(reader: Reader, tag: bytes, most: int, least: int = 1) -> bytes:
    reader.expect(tag)
    length = reader.number(8)
    if not least <= length <= most:
        raise reader.wrong(f"{length} bytes of {tag.decode() or 'a field'}; {least} to {most} are taken")
    value = reader.take(length)
    reader.expect(b"|")
    return value


def _packed(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(8, "little") + value + b"|"


def _expect_field(reader: Reader, tag: bytes, value: bytes) -> None:
    found = _field(reader, tag, 64)
    if found != value:
        raise reader.wrong(f"{tag.decode() or 'a field'} is {found!r}, not {value!r}")


def _count(reader: Reader, tag: bytes) -> int:
    return int.from_bytes(_field(reader, tag, 8, 8), "little")


def _regions(reader: Reader, count: int, ucx: bool) -> np.ndarray:
    """Read `count` regions: uint64 [count, 3]."""
    fields, keys = _alike(reader, count) or _one_by_one(reader, count)
    for key in keys if ucx else ():
        _check_key(key)
    rows = np.frombuffer(fields, np.uint64).reshape(count, 3)
    if (rows[:, 1] - np.uint64(1) >= np.uint64((1 << 63) - 1)).any() or (rows[:, 0] + rows[:, 1] < rows[:, 1]).any():
        raise reader.wrong("a region of 0 bytes, of 2**63 and more, or beyond the last address")
    return rows


def _one_by_one(reader: Reader, count: int) -> tuple[bytes, set[bytes]]:
    """Address, bytes and device of each region, and all keys that they have."""
    regions = [_field(reader, b"", 1 << 12, 24) for _ in range(count)]
    return b"".join(region[:24] for region in regions), {region[24:] for region in regions}


def _alike(reader: Reader, count: int) -> tuple[bytes, set[bytes]] | None:
    """The same in one go where all have the same key, as over TCP. None otherwise, with nothing read."""
    length = int.from_bytes(reader.ahead(8), "little")
    if not 24 <= length <= 1 << 12 or reader.left < count * (length + 9):
        return None
    table = np.frombuffer(reader.ahead(count * (length + 9)), np.uint8).reshape(count, -1)
    if (table[:, :8] != table[0, :8]).any() or (table[:, 32:] != table[0, 32:]).any() or table[0, -1] != ord("|"):
        return None
    reader.take(table.size)
    return table[:, 8:32].tobytes(), {table[0, 32:-1].tobytes()}


def _check_key(key: bytes) -> None:
    reader = Reader(key, "key of a region")
    domains, kind = reader.number(8), reader.byte()
    if kind >= _TYPES:
        raise reader.wrong(f"memory of type {kind}; UCX has {_TYPES}")
    for _ in range(domains.bit_count()):
        reader.take(reader.byte())
    # Where there is a system device, UCX reads distances until it finds the end, however far that is.
    if domains and reader.byte() != 0xFF:
        while reader.byte() != 0xFF:
            reader.take(2)
    if reader.left:
        raise reader.wrong(f"{reader.left} bytes behind its end")
