"""The ops under torch's own checks and its compiler, on CPU tensors."""

import numpy as np
import pytest
import torch
from jobs import job_of, large_job
from stage_inputs import random_cuts, random_pairs, same
from torch.library import opcheck

import kvplan
from kvplan import ops

OPS = torch.ops.kvplan


def plan_args(job):
    return job.tables, job.job, job.pages, job.sizes, *job.outputs()


def copy_args():
    memory = torch.arange(32, dtype=torch.uint8)
    table = torch.tensor([[memory.data_ptr()], [memory.data_ptr() + 16], [8]])
    return table, torch.tensor([1]), [memory], [memory], [memory.data_ptr()] * 2


@pytest.mark.parametrize("wide", [False, True])
def test_plan_(wide):
    opcheck(OPS.plan_.default, plan_args(large_job(5, 2, scattered=True, rows=True, narrow=not wide)))


def test_a_refused_plan_():
    job = large_job(5, 1, scattered=True, rows=False)
    opcheck(OPS.plan_.default, plan_args(job.with_pages(torch.full_like(job.pages, -1))))


def test_the_other_stages():
    slots = torch.arange(24, dtype=torch.int32)
    opcheck(OPS.page_indices.default, (slots, 4))
    opcheck(OPS.page_indices.default, (slots.view(3, 8), 4, torch.tensor([2, 0]), torch.tensor([8, 3])))
    pairs = random_pairs(20, 1)
    opcheck(OPS.find_runs.default, pairs)
    opcheck(OPS.find_runs.default, (*pairs, random_cuts(20, 3, 1)))
    runs, indptr = ops.find_runs(*pairs)
    entries = torch.tensor([[0, 8, 1 << 40, 8, 8, 0], [64, 8, 1 << 41, 16, 8, 0]])
    opcheck(OPS.expand.default, (entries, runs, indptr, torch.ones(1, 2).long(), 40))
    opcheck(OPS.copy_.default, copy_args())
    opcheck(OPS.check_pages.default, (torch.arange(4), 9, True))


def test_what_runs_on_the_cpu_alone():
    job = large_job(5, 1, scattered=True, rows=False)
    windows = [0, 5, 5, 5, 0, -1, -1, 0, 5, 10, 5, 0, -1, -1]
    opcheck(OPS.plan.default, (job.tables, job.pages, windows))
    opcheck(OPS.prepare.default, (job.tables, windows, len(job.pages)))


def send(slots, job, sizes, tables, pool, homes, dst_ids, table, info):
    """What a serving stack would trace: token slots to page ids, a plan of them, and the copy."""
    pages, bad = ops.page_indices(slots, 4)
    ids = torch.cat([pages, dst_ids])
    ops.plan_(tables, job, ids, sizes, table, info)
    ops.copy_(table, info[-1:], read=[pool[0]], written=[pool[1]], homes=homes)
    return bad, pool[1] + 0


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_the_whole_path_compiles_without_a_break(compiler, dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(send, fullgraph=True, dynamic=dynamic, backend=compiler)
    for pages in range(2, 12) if dynamic else (2, 3, 5):  # more sizes than a compiler would make graphs for
        src, dst = torch.randint(0, 99, (24, 4)), torch.zeros(24, 4, dtype=torch.int64)
        layouts = [kvplan.Layout([kvplan.Region.from_tensor(pool, "kv", layer=0)], page_size=4) for pool in (src, dst)]
        ids = np.random.default_rng(pages).permutation(24)[:pages]
        targets = torch.arange(pages) * 2
        job = job_of(kvplan.pair(*layouts), [kvplan.Request(ids, targets)])
        table, info = job.outputs()
        slots = (torch.from_numpy(ids)[:, None] * 4 + torch.arange(4)).reshape(-1)
        homes = [src.data_ptr(), dst.data_ptr()]
        bad, after = compiled(slots, job.job, job.sizes, job.tables, [src, dst], homes, targets, table, info)
        assert bad.tolist() == [-1] and torch.equal(after, dst)
        want = torch.zeros_like(dst)
        want[targets] = src[torch.from_numpy(ids)]
        assert torch.equal(dst, want)  # moved once, and where it says


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_copy_finds_tensors_that_a_compiler_has_moved(compiler):
    """What comes before and after a copy uses the same memory, by names that only the tensors tie to the table."""
    torch._dynamo.reset()
    src, dst = torch.zeros(16, dtype=torch.int64), torch.zeros(16, dtype=torch.int64)
    table = torch.tensor([[src.data_ptr()], [dst.data_ptr() + 64], [64]])

    def step(src, dst, table, value, homes):
        src.fill_(value)
        before = dst.view(-1).float()  # of the old value, wanted later
        ops.copy_(table, read=[src], written=[dst], homes=homes)
        src.fill_(-1)
        middle = dst + 0
        dst[0] = 7
        ops.copy_(table, read=[src], written=[dst], homes=homes)
        return before, middle, dst + 0

    compiled = torch.compile(step, fullgraph=True, backend=compiler)
    homes = [src.data_ptr(), dst.data_ptr()]
    last = torch.zeros(16, dtype=torch.int64)
    for value in (3, 4):
        before, middle, after = compiled(src, dst, table, value, homes)
        assert torch.equal(before, last.float())
        assert middle.tolist() == [*last[:8].tolist(), *[value] * 8]
        assert after.tolist() == dst.tolist() == [7, *[0] * 7, *[-1] * 8]
        assert src.tolist() == [-1] * 16
        last = dst.clone()


def test_a_copy_within_one_tensor():
    torch._dynamo.reset()
    pool = torch.arange(16)
    table = torch.tensor([[pool.data_ptr()], [pool.data_ptr() + 64], [64]])

    def step(pool, table, homes):
        pool.add_(1)
        ops.copy_(table, read=[pool], written=[pool], homes=homes)
        return pool.sum()

    for compiler in ("aot_eager", "inductor"):
        pool.copy_(torch.arange(16))
        total = torch.compile(step, fullgraph=True, backend=compiler)(pool, table, [pool.data_ptr()] * 2)
        assert pool.tolist() == [*range(1, 9)] * 2 and int(total) == 72


def test_while_compiling_the_homes_must_be_given():
    pool = torch.zeros(4)
    with pytest.raises(Exception, match="copy_ needs homes"):
        torch.compile(lambda t: ops.copy_(t, written=[pool]), backend="eager", fullgraph=True)(torch.zeros(3, 0).long())


def test_a_copy_that_names_nothing_is_not_dropped():
    torch._dynamo.reset()
    src, dst = torch.full((16,), 5), torch.zeros(16, dtype=torch.int64)
    table = torch.tensor([[src.data_ptr()], [dst.data_ptr()], [128]])

    def bare(table):
        ops.copy_(table)
        return table + 0

    torch.compile(bare, fullgraph=True)(table)
    assert dst.tolist() == [5] * 16


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_table_is_packed_while_compiled(compiler, dynamic):
    torch._dynamo.reset()

    def step(table, read, edges):
        copies, merged, pieces, info = ops.pack(table, [0, 4, table.shape[1]], read, 40, edges)
        return copies + 1, merged, pieces[2], info

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic, backend=compiler)
    edges = torch.tensor([1 << 20, (1 << 20) + 32])
    for count in (4, 6, 9):
        numbers = torch.arange(count)
        table = torch.stack([4096 + 100 * numbers, (1 << 20) + 16 * numbers, torch.full_like(numbers, 16)])
        for read in (False, True):
            same(compiled(table, read, edges), step(table, read, edges))
    opcheck(OPS.pack.default, (table, [0, 4, 9], False, 40, edges))
    opcheck(OPS.pack.default, (torch.full((3, 2), -1), [0, 2], True, 40, edges))


def test_plan_into_is_plan_with_memory_of_the_callers():
    layouts = [kvplan.Layout([kvplan.Region("kv", k, base + (k << 16), 64, 9) for k in range(3)], page_size=4)
               for base in (1 << 20, 1 << 30)]  # fmt: skip
    tables, pages = kvplan.pair(*layouts).tables, torch.tensor([5, 6, 2, 7, 8, 1])
    window = [0, 3, 3, 3, 0, -1, -1]
    table, info = ops.plan(tables, pages, window)
    words = torch.full((9,), 77)
    assert torch.equal(ops.plan_into(tables, pages, window, words), table)
    assert torch.equal(words[: len(info)], info) and words[len(info) :].tolist() == [77] * (9 - len(info))
    pages[1] = 9
    assert ops.plan_into(tables, pages, window, words).shape == (3, 0) and words[:5].tolist() == [1, 0, 0, 1, 9]
    with pytest.raises(RuntimeError, match="info has 4 words, and 5 are needed"):
        ops.plan_into(tables, pages, window, torch.zeros(4, dtype=torch.int64))
    pages[1] = 6
    opcheck(OPS.plan_into.default, (tables, pages, window, words))
