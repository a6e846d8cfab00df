"""Planning jobs for the tests of every back end: tables of whole clusters with the page ids of one request or several,
and inputs of the single stages. The C++ op gives the right answer; tests/test_properties.py holds it against the
oracle.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from strategies import Cluster, clusters

import kvplan
from kvplan import ops
from kvplan.planning.requests import PageLists


@dataclass
class Job:
    """The arguments of `ops.plan_`, but for what it writes."""

    tables: torch.Tensor
    job: torch.Tensor
    pages: torch.Tensor
    sizes: list[int]
    segments: int

    def outputs(self, room: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(table, info) full of rubbish; `room` is enough by default."""
        room = self.sizes[-1] if room is None else room
        table = torch.full((3, room), -0x0123456789ABCDEF)
        return table, torch.full((6 + self.segments * self.sizes[0],), 77)

    def expected(self, room: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(table, info) as the C++ op writes them."""
        table, info = self.outputs(room)
        ops.plan_(self.tables, self.job, self.pages, self.sizes, table, info)
        return table, info

    def with_pages(self, pages: torch.Tensor) -> Job:
        return Job(self.tables, self.job, pages, self.sizes, self.segments)


def job_of(pairing: kvplan.Pairing, requests: list[kvplan.Request], narrow: bool = False) -> Job:
    lists = PageLists(pairing).add_all(requests)
    pages = torch.cat([torch.as_tensor(ids) for ids in lists.lists]) if lists.lists else torch.empty(0)
    pages = pages.to(torch.int32 if narrow else torch.int64)
    job, status = ops.prepare(pairing.tables, lists.windows, len(pages))
    assert status[0] == 0, status
    return Job(pairing.tables, job, pages, job[: ops.SIZES].tolist(), len(pairing.segment_memories))


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
    """Requests of so many pages each to a decode rank with two spaces. `rows`: DCP, so that rows move one by one."""
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
                    rows=rows_a_page,
                )
            )  # fmt: skip
            dst.append(
                kvplan.Region(
                    name, layer, (1 << 50) * (1 + 2 * number + layer), rows_a_page * row_bytes, many, rows=rows_a_page,
                    tokens=tokens * size, space="host" if name == "kv" else "device",
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


def random_pairs(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(src, dst) index pairs in which runs of several lengths occur, int64 [n]."""
    draw = random.Random(seed)
    pairs = []
    while len(pairs) < n:
        src, dst, length = draw.randrange(1 << 40), draw.randrange(1 << 40), draw.choice([1, 1, 2, 3, 40, 700])
        pairs += [(src + k, dst + k) for k in range(length)]
    table = torch.tensor(pairs[:n], dtype=torch.int64).reshape(-1, 2)
    return table[:, 0].contiguous(), table[:, 1].contiguous()


def random_cuts(n: int, lists: int, seed: int) -> torch.Tensor:
    """An indptr of so many lists over n pairs, some of them empty."""
    draw = random.Random(seed)
    return torch.tensor([0, *sorted(draw.randrange(n + 1) for _ in range(lists - 1)), n])


def random_entries(groups: int, seed: int) -> torch.Tensor:
    """int64 [E, 6] for `ops.expand`: none, few, or more than a tile."""
    draw = random.Random(seed)
    rows = []
    for _ in range(draw.choice([0, 1, 5, 1100])):
        stride = draw.choice([8, 24, 40])
        rows.append((draw.randrange(1 << 50), stride, draw.randrange(1 << 50), stride, 8, draw.randrange(groups)))
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 6)
