"""What a peer might send: JSON values that are right, nearly right, and wrong. All is drawn from a `random.Random`."""

from __future__ import annotations

import random
from typing import Any

import kvplan

#: Where integers of this project turn over, and what is just beside.
EDGES = sorted({edge + by for edge in (0, 16, 1 << 16, 1 << 31, 1 << 32, 1 << 53, 1 << 62, 1 << 63, 1 << 64)
                for by in (-1, 0, 1)})  # fmt: skip
DEEP = 3_000  # levels; Python's recursion ends at 1,000
HUGE = (10**5000, -(10**5000), 1 << 100_000)  # more digits than Python will print


def deep(levels: int, kind: str = "list") -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value] if kind == "list" else {"regions": value}
    return value


def scalar(rng: random.Random) -> Any:
    match rng.randrange(8):
        case 0 | 1:
            return rng.choice([1, -1]) * rng.choice(EDGES)
        case 2:
            return rng.randrange(64)
        case 3:
            return rng.choice([1 << rng.randrange(80), *HUGE])
        case 4:
            return rng.choice([None, True, False])
        case 5:
            return rng.choice([0.0, -0.0, 1.0, 16.0, 1.5, 1e308, float("nan"), float("inf"), -float("inf")])
        case 6:
            return rng.choice(["", "kv", "device", "host", "DRAM", "VRAM", "16", "None", "é", "☃" * 200])
        case _:
            return rng.choice(["\x00", "a\nb", "\x1b[2J", "\ud800", "\u202e", "x" * 257, "x" * 100_000, " "])


def value(rng: random.Random, depth: int = 3) -> Any:
    """Any JSON value."""
    match rng.randrange(8) if depth else 0:
        case 1:
            return [value(rng, depth - 1) for _ in range(rng.randrange(5))]
        case 2:
            return {key(rng): value(rng, depth - 1) for _ in range(rng.randrange(4))}
        case 3:
            return _shapes(rng.randrange(7))
        case _:
            return scalar(rng)


def key(rng: random.Random) -> str:
    return rng.choice(["kv", "memory", "page_size", "regions", "host", "device", "x" * 300, "\ud800", "", "\n"])


def _shapes(number: int) -> Any:
    match number:
        case 0 | 1:
            return deep(DEEP, ("list", "dict")[number])
        case 2:
            return deep(900)
        case 3:
            return [0] * 100_000
    return ([[]], [{}], {"kv": 1})[number - 4]


def layout(rng: random.Random) -> dict[str, Any]:
    """One that is right."""
    match rng.randrange(8):
        case 0:
            made = kvplan.Layout.deepseek_v4(
                1 << 40, num_pages=9, layers=range(2, 6), num_host_pages=rng.choice([None, 5])
            )
            return made.to_dict()
        case 1:
            heads = rng.choice([None, kvplan.Heads(0, 2, 8)])
            made = kvplan.Layout.mha(1 << 40, layers=2, num_pages=9, heads=heads or kvplan.Heads(0, 8, 8), page_size=4,
                                     head_bytes=16)  # fmt: skip
            return made.to_dict()
        case _:
            tokens = 1 << rng.randrange(6)
            return {
                "page_size": tokens,
                "replica": rng.choice([[0, 1], [1, 2]]),
                "regions": [region(rng, number, tokens) for number in range(rng.randrange(6))],
            }


def region(rng: random.Random, number: int, tokens: int) -> dict[str, Any]:
    """One that is right, and apart from those of other numbers."""
    rows = rng.choice([1, tokens])
    page_bytes = rows * 8 * rng.randrange(1, 5)
    made: dict[str, Any] = {
        "name": rng.choice(["kv", "indexer"]), "layer": number, "base": (number + 1) << 20, "page_bytes": page_bytes,
        "num_pages": rng.randrange(1, 20),
    }  # fmt: skip
    optional = {
        "page_stride": page_bytes + rng.choice([0, 8, 24]), "tokens": tokens, "rows": rows,
        "row_bytes": rng.choice([0, page_bytes // rows]), "space": rng.choice(["device", "host"]),
        "memory": rng.choice([["DRAM", 0], ["VRAM", 1]]), "heads": rng.choice([None, [0, 2, 4], [2, 4, 4]]),
        "interleave": rng.choice([None, [1, 0]]),
    }  # fmt: skip
    return made | {key: rng.choice([entry, entry, None if key != "memory" else entry])
                   for key, entry in optional.items() if rng.randrange(3)}  # fmt: skip


def spoiled(rng: random.Random, data: Any) -> Any:
    """`data` with one thing changed somewhere, in place."""
    places = list(_places(data))
    if not places:
        return value(rng)
    holder, at = rng.choice(places)
    match rng.randrange(10):
        case 0 | 1 | 2:
            holder[at] = value(rng)
        case 3:
            del holder[at]
        case 4:
            if isinstance(holder, dict):
                holder[key(rng)] = value(rng)
            else:
                holder.insert(rng.randrange(len(holder) + 1), value(rng))
        case 5:
            other, its = rng.choice(places)
            if not isinstance(holder[at], (list, dict)) and not isinstance(other[its], (list, dict)):
                holder[at], other[its] = other[its], holder[at]
        case 6:
            if isinstance(holder, list) and len(holder) < 50:
                holder *= rng.choice([0, 2, 50_000])
        case 7:
            holder[at] = [holder[at]]
        case _:  # the sort of lie that is told on purpose
            if isinstance(holder[at], int) and not isinstance(holder[at], bool):
                holder[at] = rng.choice([holder[at] + rng.choice([-1, 1]), holder[at] * rng.choice([-1, 2, 1 << 40]),
                                          rng.choice(EDGES)])  # fmt: skip
    return data


def _places(data: Any) -> list[tuple[Any, Any]]:
    """(holder, key) of values within; of long lists and deep ones only the first."""
    found: list[tuple[Any, Any]] = []
    todo = [(data, 0)]
    while todo and len(found) < 2000:
        holder, depth = todo.pop()
        keys = (
            list(holder)[:50]
            if isinstance(holder, dict)
            else range(min(50, len(holder)))
            if isinstance(holder, list)
            else ()
        )
        for key in keys:
            found.append((holder, key))
            if depth < 6:
                todo.append((holder[key], depth + 1))
    return found


def layouts(rng: random.Random) -> Any:
    """What may be given to `Layout.from_dict`."""
    if rng.randrange(12) == 0:
        return value(rng)
    data: Any = layout(rng)
    for _ in range(rng.choice([0, 1, 1, 1, 2, 3])):
        data = spoiled(rng, data)
    return data


def pages(rng: random.Random, spaces: tuple[str, ...], num_pages: int) -> Any:
    """What may be given as page lists: often right but for one thing."""

    def ids() -> Any:
        return rng.sample(range(num_pages), rng.randrange(min(6, num_pages) + 1))

    data: Any = {space: ids() for space in spaces} if rng.randrange(4) else ids()
    for _ in range(rng.choice([0, 1, 1, 2])):
        data = spoiled(rng, data)
    return data


def session(rng: random.Random) -> Any:
    right = rng.choice([
        "127.0.0.1:1", "[::1]:65535", "host-7.example:80", "local:0",
        "nixl:kvplan-0:" + "0" * 32 + ":AAAA",
    ])  # fmt: skip
    match rng.randrange(4):
        case 0:
            return value(rng)
        case 1:
            return right * rng.choice([1, 2, 2000])
        case _:
            letters = list(right)
            for _ in range(rng.randrange(3)):
                letters[rng.randrange(len(letters))] = chr(
                    rng.choice([0, 10, 45, 46, 48, 58, 255, 0x660, 0xD800, 0x1F600])
                )
            return "".join(letters)


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(8, "little") + value + b"|"


def metadata(rng: random.Random) -> bytes:
    """A NIXL agent's metadata: right, or with a few bytes or fields changed."""
    port = rng.randbytes(2)
    tcp = b"\0\x06\0\2\x7f\0\0\1\xcf\x19" + bytes.fromhex("17b751389763344bd7e0373700132300") + b"\x82" + port
    newer = b"\0\x86\0\2\x7f\0\0\1\xcf\x19" + bytes.fromhex("0c015a0080008b00") + b"\x82" + port
    address = rng.choice([b"\x20" + rng.randbytes(8) + tcp + b"\x87\x80", b"\x71\2" + rng.randbytes(8) + newer])
    parts = [_field(b"Agent", b"kvplan-0"), _field(b"Conns", (1).to_bytes(8, "little")), _field(b"t", b"UCX"),
             _field(b"c", address), _field(b"", b"MemSection")]  # fmt: skip
    kinds = rng.sample([0, 1], rng.randrange(3))
    parts.append(_field(b"nixlSecElms", len(kinds).to_bytes(8, "little")))
    for kind in kinds:
        count = rng.randrange(1, 5)
        parts += [_field(b"bknd", b"UCX"), _field(b"nixlDList", b"nixlSDList")]
        parts += [_field(b"t", kind.to_bytes(4, "little")), _field(b"n", count.to_bytes(8, "little"))]
        key = rng.choice([bytes(9), b"\1" + bytes(8) + b"\0\xff", b"\3" + bytes(8) + b"\4abcd\0\1\2\3\4\xff"])
        for number in range(count):
            region = [(number + 1) << 20, rng.choice([64, 1 << 20]), rng.randrange(2)]
            parts.append(_field(b"", b"".join(n.to_bytes(8, "little") for n in region) + key))
    for _ in range(rng.choice([0, 1, 1, 2])):
        at = rng.randrange(len(parts))
        part = bytearray(parts[at])
        place = rng.randrange(len(part)) if part else 0
        match rng.randrange(6):
            case 0:
                part[place : place + 1] = rng.randbytes(1)
            case 1:
                part[place : place + 8] = (rng.choice(EDGES) % (1 << 64)).to_bytes(8, "little")
            case 2:
                del part[place : place + rng.choice([1, 8])]
            case 3:
                part[place:place] = rng.randbytes(rng.choice([1, 8]))
            case 4:
                parts.insert(at, bytes(part))
            case 5:
                del part[place:]
        parts[at] = bytes(part)
    return b"nixlSerDes|" + b"".join(parts)
