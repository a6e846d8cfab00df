"""Planning jobs for the tests of every back end: the tables of a pairing, with the page ids of its requests.

The C++ op gives the expected result; tests/test_properties.py compares that with the oracle.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from strategies import Cluster, clusters

import kvplan
from kvplan import ops
from kvplan.planning.nulls import ShortLists
from kvplan.planning.requests import PageLists

RUBBISH = -0x0123456789ABCDEF  # in every word of a table that no kernel has written


@dataclass
class Job:
    """The arguments that `ops.plan_` reads."""

    tables: torch.Tensor
    job: torch.Tensor
    pages: torch.Tensor
    sizes: list[int]
    segments: int

    def outputs(self, room: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(table, info) before planning, full of rubbish. `room`: descriptors they hold; by default enough for all."""
        room = self.sizes[-1] if room is None else room
        table = torch.full((3, room), RUBBISH)
        return table, torch.full((6 + self.segments * self.sizes[0],), 77)

    def expected(self, room: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(table, info) as the C++ op writes them."""
        table, info = self.outputs(room)
        ops.plan_(self.tables, self.job, self.pages, self.sizes, table, info)
        return table, info

    def with_pages(self, pages: torch.Tensor) -> Job:
        """The same job with other page ids."""
        return replace(self, pages=pages)

    def with_header(self, changes: dict[int, int]) -> Job:
        """The same job with numbers added, in 64 bits, to words of the header of its tables."""
        tables = self.tables.clone()
        for word, change in changes.items():
            tables[word] += change
        return replace(self, tables=tables)


# (requests, what is added to words of the header): then the header does not give the numbers of entries, groups, spaces
# and segments in the tables.
OTHER_HEADERS = [
    *((requests, {word: change}) for requests in (0, 2) for word in range(4) for change in (-1, 1)),
    # The length of the tables is right: entries have 6 words, groups 12, spaces 8, segments 1.
    (2, {0: -4, 2: 3}),
    (2, {0: -2, 1: 1}),
    (2, {2: -1, 3: 8}),
    # All that is computed of these numbers is right modulo 2^64: only the bounds on each show that it is wrong.
    (2, {0: -(1 << 63)}),
    (4, {1: 1 << 62}),
    (4, {1: -(1 << 62)}),
    (0, {2: -(1 << 63)}),
    (0, {2: 1, 3: -8}),
    (0, {0: ((1 << 64) + 2) // 6, 3: -2}),
    (0, {2: 1 << 61}),
]


def job_of(pairing: kvplan.Pairing, requests: list[kvplan.Request], narrow: bool = False) -> Job:
    lists = PageLists(pairing).add_all(requests)
    if lists.nulls is not None:
        lists = ShortLists(lists)
    pages = torch.cat([torch.as_tensor(ids) for ids in lists.lists]) if lists.lists else torch.empty(0)
    pages = pages.to(torch.int32 if narrow else torch.int64)
    job, status = ops.prepare(pairing.tables, lists.windows, len(pages))
    assert status[0] == 0, status
    return Job(pairing.tables, job, pages, job[: ops.SIZES].tolist(), len(pairing.segment_memories))


def one_region(size: int = 8, pages: int = 100, layers: int = 1) -> kvplan.Pairing:
    """A pairing of one region a layer, of pages of so many bytes, at made-up addresses."""
    src, dst = (
        kvplan.Layout(
            [kvplan.Region("kv", k, base + k * size * pages, size, pages) for k in range(layers)], page_size=1
        )
        for base in (1 << 12, 1 << 40)
    )
    return kvplan.pair(src, dst)


def request_of(cluster: Cluster) -> kvplan.Request:
    return kvplan.Request(cluster.src_pages, cluster.dst_pages, **cluster.positions)


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """A request between two ranks of a cluster; sometimes a batch, of it and of empty ones."""
    cluster = draw(clusters())
    pairs = list(cluster.pairs())
    src, dst = pairs[draw(st.integers(0, len(pairs) - 1))]
    pairing = kvplan.pair(src, dst, allow_unsent=cluster.allow_unsent)
    requests = [request_of(cluster)]
    if draw(st.booleans()):
        empty = kvplan.Request({key: [] for key in cluster.src_pages}, {space: [] for space in cluster.dst_pages})
        requests = [*[empty] * draw(st.integers(0, 2)), *requests, *[empty] * draw(st.integers(0, 2))]
    return job_of(pairing, requests, narrow=draw(st.booleans()))


def large_job(pages: int, requests: int, *, scattered: bool, rows: bool, seed: int = 0, narrow: bool = True) -> Job:
    """A job of requests to a decode rank with two spaces.

    Args:
        pages: source pages of each request.
        requests: how many there are.
        scattered: page ids are in random order; else they rise by one.
        rows: the decode side interleaves tokens over ranks (DCP), so that rows move one by one.
        seed: of the random order.
        narrow: page ids are int32; else int64.
    """
    draw = random.Random(seed)
    regions = {"kv": (4, 64), "indexer": (4, 36), "state": (2, 512)}
    size = 4 if rows else 1
    tokens = 8
    many = pages * requests + 7
    src, dst = [], []
    for number, (name, (rows_a_page, row_bytes)) in enumerate(regions.items()):
        for layer in range(2):
            src.append(
                kvplan.Region(
                    name, layer, (1 << 63) - 4096 + (1 << 40) * (2 * number + layer), rows_a_page * row_bytes, many,
                    rows=rows_a_page, row_bytes=row_bytes,
                )
            )  # fmt: skip
            dst.append(
                kvplan.Region(
                    name, layer, (1 << 50) * (1 + 2 * number + layer), rows_a_page * row_bytes, many, rows=rows_a_page,
                    row_bytes=row_bytes, tokens=tokens * size, space="host" if name == "kv" else "device",
                    memory=kvplan.Memory.DRAM if name == "kv" else kvplan.Memory.VRAM(0),
                    interleave=kvplan.Interleave(size, 1) if rows else None,
                )
            )  # fmt: skip
    pairing = kvplan.pair(kvplan.Layout(src, page_size=tokens), kvplan.Layout(dst, page_size=tokens * size))
    dst_pages = -(-pages // size)
    ids = {space: list(range(many)) for space in ("src", "host", "device")}
    if scattered:
        for order in ids.values():
            draw.shuffle(order)
    batch = [
        kvplan.Request(
            ids["src"][k * pages : (k + 1) * pages],
            {space: ids[space][k * dst_pages : (k + 1) * dst_pages] for space in ("host", "device")},
        )
        for k in range(requests)
    ]
    return job_of(pairing, batch, narrow)


def shared_job(twice: tuple[int, int] | None, requests: int = 2, pages: int = 300, narrow: bool = False) -> Job:
    """A job of requests to two spaces that share memory: page k of "full" is page k - 3 of "win".

    `twice`: this place of the first request's "full" list and this place of the last one's "win" list are one page.
    """
    many = 2 * pages * requests + 9
    src = kvplan.Layout([kvplan.Region(name, 0, 1 << base, 8, many) for name, base in (("full", 20), ("win", 30))],
                        page_size=1)  # fmt: skip
    dst = [kvplan.Region("full", 0, 1 << 40, 8, many, space="full")]
    dst.append(kvplan.Region("win", 0, (1 << 40) + 3 * 8, 8, many, space="win"))
    free = list(range(3, many))
    random.Random(pages).shuffle(free)
    batch = [
        {"full": [free.pop() for _ in range(pages)], "win": [free.pop() - 3 for _ in range(pages)]}
        for _ in range(requests)
    ]
    if twice is not None:
        batch[-1]["win"][twice[1]] = batch[0]["full"][twice[0]] - 3
    pairing = kvplan.pair(src, kvplan.Layout(dst, page_size=1))
    return job_of(pairing, [kvplan.Request(range(pages), lists) for lists in batch], narrow)
