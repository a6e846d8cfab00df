"""Row-wise plans, batches, pairing, and what the checks cost. Run by python -m bench."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from bench import inputs
from kvplan import Heads, Interleave, Layout, Pairing, Region, Request, ops, pair


def dcp() -> tuple[Pairing, tuple[np.ndarray, np.ndarray]]:
    """One of 8 DCP ranks of a 131,072-token request: 61 layers of 1,152-byte rows, pages of 64."""
    make = {"layers": inputs.LAYERS, "num_pages": inputs.NUM_PAGES, "row_bytes": inputs.DCP_ROW}
    src = Layout.mla(lambda _, layer, __: inputs.base(inputs.SRC_BASE, layer), **make)
    share = Interleave(inputs.DCP_SIZE, inputs.DCP_RANK)
    dst = Layout.mla(lambda _, layer, __: inputs.base(inputs.DST_BASE, layer), interleave=share, **make)
    return pair(src, dst), inputs.dcp_request()


def slices() -> tuple[Pairing, tuple[np.ndarray, np.ndarray]]:
    """Prefill TP 4, decode TP 8, one pair of ranks of a 32,768-token request: K and V of 61 layers, 8 KV heads."""

    def layout(start: int, heads: Heads) -> Layout:
        number = iter(range(2 * inputs.LAYERS))
        return Layout.mha(
            lambda *_: inputs.base(start, next(number)),
            layers=inputs.LAYERS, num_pages=inputs.NUM_PAGES, heads=heads, head_bytes=inputs.HEAD_BYTES,
        )  # fmt: skip

    src, dst = layout(inputs.SRC_BASE, Heads(2, 4, 8)), layout(inputs.DST_BASE, Heads(3, 4, 8))
    return pair(src, dst), inputs.slice_request()


ROWS = {"DCP 8": dcp, "TP 4 to 8": slices}


@pytest.mark.parametrize("what", ROWS)
def test_rows(benchmark, what):
    pairing, (source, target) = ROWS[what]()
    plan = pairing.plan(source, target)
    benchmark.extra_info.update(what="kvplan", case=what, descriptors=len(plan))
    del plan
    benchmark(lambda: pairing.plan(source, target))


@pytest.mark.parametrize("what", ROWS)
def test_rows_memset(benchmark, what):
    pairing, (source, target) = ROWS[what]()
    table = torch.zeros_like(pairing.plan(source, target).table)
    benchmark.extra_info.update(what="memset", case=what, descriptors=table.shape[1])
    benchmark(lambda: ctypes.memset(table.data_ptr(), 0, table.nbytes))


@pytest.mark.parametrize("op", ["write", "read"])
@pytest.mark.parametrize("what", ROWS)
def test_packed(benchmark, what, op):
    """What `Plan.packed` adds to planning."""
    pairing, (source, target) = ROWS[what]()
    plan = pairing.plan(source, target)
    benchmark.extra_info.update(what=f"packed, {op}", case=what, descriptors=len(plan))
    benchmark(lambda: plan.packed(op))


@pytest.mark.parametrize("op", ["write", "read"])
def test_packed_131072(benchmark, op):
    pairing, (source, target) = ROWS["TP 4 to 8"]()
    plan = next(pairing.plan(source, target).chunks(131_072))
    benchmark.extra_info.update(what=f"packed, {op}", case="TP 4 to 8, in part", descriptors=len(plan))
    benchmark(lambda: plan.packed(op))


@pytest.fixture(scope="module")
def pairing() -> Pairing:
    from bench.test_plan import layout

    return pair(layout(inputs.SRC_BASE, host=False), layout(inputs.DST_BASE, host=True))


def requests(n: int) -> list[Request]:
    """64 requests of n scattered pages, no destination page twice."""
    rng = np.random.default_rng([inputs.SEED, n])
    source, host, device = (rng.permutation(inputs.NUM_PAGES)[: 64 * n].reshape(64, n) for _ in range(3))
    return [Request(s, {"host": h, "device": d}) for s, h, d in zip(source, host, device, strict=True)]


@pytest.mark.parametrize("n", [4, 64, 512])
def test_batch(benchmark, pairing, n):
    batch = requests(n)
    benchmark.extra_info.update(what="plan_batch", case=f"64 requests of {n} pages")
    benchmark(lambda: pairing.plan_batch(batch))


@pytest.mark.parametrize("n", [4, 64, 512])
def test_one_by_one(benchmark, pairing, n):
    """The same requests in 64 calls, all plans kept, as the batch keeps them."""
    batch = requests(n)
    benchmark.extra_info.update(what="plan, 64 times", case=f"64 requests of {n} pages")
    benchmark(lambda: [pairing.plan(request.src_pages, request.dst_pages) for request in batch])


def test_checks(benchmark):
    """The checks of one request of 4,096 scattered pages: ranges on four lists, duplicates on the two destinations."""
    source, host, device = (torch.from_numpy(pages) for pages in inputs.request(4096, "scattered"))

    def checks() -> None:
        for pages, distinct in ((source, False), (source, False), (host, True), (device, True)):
            ops.check_pages(pages, inputs.NUM_PAGES, distinct)

    benchmark.extra_info.update(what="checks alone, as four calls", case="4,096 scattered")
    benchmark(checks)


@pytest.mark.parametrize("count", [62, 10_000])
def test_pair(benchmark, count):
    src, dst = (
        Layout([Region("kv", k, start + (k << 20), 64, 1000) for k in range(count)], page_size=16)
        for start in (inputs.SRC_BASE, inputs.DST_BASE)
    )
    benchmark.extra_info.update(what="pair", case=f"{count:,} regions")
    benchmark(lambda: pair(src, dst))
