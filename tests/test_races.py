"""Another thread writes a tensor while an op reads it: the op refuses or goes on with what it has checked."""

import contextlib
import sys
import threading

import numpy as np
import pytest
import torch
from jobs import job_of

import kvplan
from kvplan import Layout, Region, Request, ops

PAGES, ENTRIES, CALLS = 1 << 14, 3, 150
STRIDE, SRC, DST = 64, 1 << 40, 1 << 44
WILD = [-1, 1 << 40, (1 << 63) - 1, -(1 << 63), PAGES, 7]


@contextlib.contextmanager
def written(tensor):
    """`tensor` while another thread puts wild words in the place of some, and then the right ones again."""
    words = tensor.reshape(-1).numpy()
    right = words.copy()
    kinds = np.iinfo(words.dtype)
    wild = [word for word in WILD if kinds.min <= word <= kinds.max]
    rng = np.random.default_rng(0)
    stop = threading.Event()

    def write():
        while not stop.is_set():
            places = rng.integers(0, len(words), 1 + len(words) // 64)
            words[places] = wild[int(rng.integers(len(wild)))]
            words[int(rng.integers(len(words)))] = wild[int(rng.integers(len(wild)))]
            words[:] = right

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
        words[:] = right


def pairing(num_pages=PAGES):
    layouts = [
        Layout([Region("kv", k, base + (k << 32), STRIDE, num_pages) for k in range(ENTRIES)], page_size=4)
        for base in (SRC, DST)
    ]
    return kvplan.pair(*layouts)


def random_ids(dtype):
    rng = np.random.default_rng(1)
    return [torch.from_numpy(rng.permutation(PAGES).astype(dtype)) for _ in range(2)]


def assert_inside(table):
    """No descriptor may lie outside of the registered regions."""
    for row, base in ((0, SRC), (1, DST)):
        offset = (table[row] - base) % (1 << 32)
        assert int(offset.max()) <= (PAGES - 1) * STRIDE and int(offset.remainder(STRIDE).max()) == 0
    assert int(table[2].min()) >= STRIDE and int(table[2].max()) <= PAGES * STRIDE


def calls(tensor, call):
    """Results of an op while `tensor` is written; those it refuses are left out."""
    right = call()
    with written(tensor):
        for _ in range(CALLS):
            with contextlib.suppress(RuntimeError):
                yield call()
    for got, want in zip(call(), right, strict=True):  # nothing is kept from one call to the next
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("num_pages", [PAGES, 1 << 31])  # the duplicates of few ids in a large pool are found otherwise
def test_check_pages(dtype, num_pages):
    ids, _ = random_ids(dtype)
    for status, *_ in calls(ids, lambda: ops.check_pages(ids, num_pages, True)):
        assert status in (0, 2, 3)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_plan_and_its_pages(dtype):
    pages = torch.cat(random_ids(dtype))
    windows = [0, PAGES, PAGES, PAGES, 0, -1, -1]
    tables = pairing().tables
    for table, info in calls(pages, lambda: ops.plan(tables, pages, windows)):
        assert info[0] in (0, 1, 2, 3)
        if info[0] == 0:
            assert_inside(table)


def test_plan_and_its_tables():
    pages = torch.cat(random_ids("int64"))
    tables = pairing().tables.clone()
    for _ in calls(tables, lambda: ops.plan(tables, pages, [0, PAGES, PAGES, PAGES, 0, -1, -1])):
        pass
    for _ in calls(tables, lambda: ops.prepare(tables, [0, PAGES, PAGES, PAGES, 0, -1, -1], 2 * PAGES)):
        pass


@pytest.mark.parametrize("what", ["pages", "tables", "job"])
def test_plan_(what):
    job = job_of(pairing(), [Request(*random_ids("int64"))])
    tensors = {name: getattr(job, name).clone() for name in ("tables", "job", "pages")}

    def call():
        table, info = job.outputs()
        ops.plan_(tensors["tables"], tensors["job"], tensors["pages"], job.sizes, table, info)
        return table, info

    for table, info in calls(tensors[what], call):
        if what == "pages" and info[0] == 0:
            assert_inside(table[:, : int(info[-1])])


def test_a_job_that_leads_outside_is_refused():
    job = job_of(pairing(), [Request(*random_ids("int64"))])
    for place in range(ops.SIZES, len(job.job)):
        for word in WILD:
            wrong = job.job.clone()
            wrong[place] = word
            table, info = job.outputs()
            ops.plan_(job.tables, wrong, job.pages, job.sizes, table, info)
            assert info[0] in (0, 1, 2, 3, 13), (place, word)
    wrong = job.job.clone()
    wrong[ops.SIZES + 1] = len(job.pages)  # List.src_offset of the first
    ops.plan_(job.tables, wrong, job.pages, job.sizes, table, info)
    assert info.tolist() == [13, *[0] * (len(info) - 1)]


@pytest.mark.parametrize("which", [0, 1])
def test_find_runs(which):
    src, dst = (torch.arange(PAGES) for _ in range(2))
    indptr = torch.arange(0, PAGES + 1, 64)
    for runs, cuts in calls((src, indptr)[which], lambda: ops.find_runs(src, dst, indptr)):
        assert int(runs[2].sum()) == PAGES and cuts[0] == 0 and bool((cuts.diff() > 0).all())


@pytest.mark.parametrize("which", range(4))
def test_expand(which):
    src, dst = random_ids("int64")
    runs, indptr = ops.find_runs(src, dst)
    tensors = [torch.tensor([[SRC, 64, DST, 128, 64, 0]]), runs, indptr, torch.ones(1, 2, dtype=torch.int64)]
    for table, count in calls(tensors[which], lambda: ops.expand(*tensors, PAGES + 7)):
        assert int(count) >= 0 and int((table[2] != 0).sum()) <= PAGES + 7


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_page_indices(which, dtype):
    slots = torch.arange(64 * 256, dtype=dtype).reshape(64, 256)
    rows, lengths = torch.arange(64), torch.full((64,), 256)
    for pages, bad in calls((slots, rows, lengths)[which], lambda: ops.page_indices(slots, 16, rows, lengths)):
        assert pages.shape == (64, 16) and int(bad.min()) >= -2 and int(bad.max()) < 256


def test_copy_and_its_count():
    src, dst = torch.arange(PAGES), torch.zeros(PAGES, dtype=torch.int64)
    places = torch.arange(PAGES) * 8
    table = torch.stack([src.data_ptr() + places, dst.data_ptr() + places, torch.full((PAGES,), 8)])
    count = torch.tensor([PAGES])

    def call():
        dst.zero_()
        ops.copy_(table, count)
        return (dst.clone(),)

    for (copied,) in calls(count, call):
        some = int((copied != 0).sum())
        assert torch.equal(copied[: some + 1], src[: some + 1]) and not copied[some + 1 :].any()


def test_copy_and_its_sizes():
    """A moved tensor: what was checked to end within it is what is copied."""
    src, dst = torch.ones(PAGES, dtype=torch.int64), torch.zeros(PAGES, dtype=torch.int64)
    home = 1 << 50
    places = torch.arange(PAGES) * 8
    table = torch.stack([home + places, dst.data_ptr() + places, torch.full((PAGES,), 8)])
    for _ in calls(table[2], lambda: ops.copy_(table, read=[src], homes=[home]) or (dst.clone(),)):
        assert set(dst.unique().tolist()) <= {0, 1}
