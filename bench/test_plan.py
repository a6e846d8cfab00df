"""Planning: from page ids to the descriptor table, and to what an engine takes. Run by python -m bench."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from bench import inputs
from kvplan import Layout, Pairing, Region, pair


def layout(start: int, *, host: bool) -> Layout:
    names = ["c4_kv"] * inputs.C4[0] + ["c4_indexer"] * inputs.INDEXER[0] + ["c128_kv"] * inputs.C128[0]
    regions = [
        Region(
            name,
            number,
            inputs.base(start, number),
            inputs.PAGE_BYTES[number],
            inputs.NUM_PAGES,
            space="host" if host and name == "c4_kv" else "device",
        )
        for number, name in enumerate(names)
    ]
    return Layout(regions, page_size=256)


@pytest.fixture(scope="module")
def pairing() -> Pairing:
    return pair(layout(inputs.SRC_BASE, host=False), layout(inputs.DST_BASE, host=True))


each_input = pytest.mark.parametrize(
    ("n", "pattern"), [(n, pattern) for n in inputs.PAGES for pattern in inputs.PATTERNS]
)


def run(benchmark, call, what, n, pattern, descriptors):
    benchmark.extra_info.update(what=what, pages=n, pattern=pattern, descriptors=descriptors)
    benchmark(call)


@each_input
def test_table(benchmark, pairing, n, pattern):
    source, host, device = inputs.request(n, pattern)
    plan = pairing.plan(source, {"host": host, "device": device})
    run(benchmark, lambda: pairing.plan(source, {"host": host, "device": device}), "kvplan", n, pattern, len(plan))


@each_input
def test_lists(benchmark, pairing, n, pattern):
    """What an engine without array calls takes: three lists of Python ints."""
    source, host, device = inputs.request(n, pattern)
    plan = pairing.plan(source, {"host": host, "device": device})
    call = lambda: pairing.plan(source, {"host": host, "device": device}).lists()  # noqa: E731
    run(benchmark, call, "kvplan, lists", n, pattern, len(plan))


def numpy_broadcast(entries, source, lists):
    """The table as NumPy users write it: one descriptor a page and entry, runs not grouped, nothing checked."""
    src_base, src_stride, dst_base, dst_stride, nbytes, group = entries
    src = src_base[:, None] + source[None, :] * src_stride[:, None]
    dst = dst_base[:, None] + lists[group] * dst_stride[:, None]
    return np.stack([src.ravel(), dst.ravel(), np.repeat(nbytes, len(source))])


@pytest.mark.parametrize("n", inputs.PAGES)
def test_numpy_broadcast(benchmark, pairing, n):
    source, host, device = (pages.astype(np.int64) for pages in inputs.request(n, "scattered"))
    entries, lists = pairing.entries.numpy().T.copy(), np.stack([host, device])
    plan = pairing.plan(source, {"host": host, "device": device})
    assert np.array_equal(numpy_broadcast(entries, source, lists), plan.table.numpy())
    call = lambda: numpy_broadcast(entries, source, lists)  # noqa: E731
    run(benchmark, call, "NumPy broadcast", n, "scattered", len(plan))


@pytest.mark.parametrize("n", inputs.PAGES)
def test_memset(benchmark, n):
    """The floor: the bytes of the table written once, into memory that is warm."""
    table = torch.zeros(3, n * len(inputs.PAGE_BYTES), dtype=torch.int64)
    call = lambda: ctypes.memset(table.data_ptr(), 0, table.nbytes)  # noqa: E731
    run(benchmark, call, "memset", n, "scattered", table.shape[1])
