"""torch.compile(fullgraph=True) of all stages on CUDA tensors, static and dynamic, against the CPU's results."""

from __future__ import annotations

import pytest
import torch
from jobs import RUBBISH, large_job
from on_device import finish, needs_device, there
from stage_inputs import same

from kvplan import ops

pytestmark = [pytest.mark.gpu, needs_device]

SIZE = 16  # tokens a page


def stages(slots, entries, steps, src, dst, homes, capacity: int):
    """All stages, from slots to copied bytes. Reads `dst` before and after, so that a dropped or moved copy shows."""
    before = dst.sum(dtype=torch.int64)
    pages, bad = ops.page_indices(slots, SIZE)
    runs, indptr = ops.find_runs(pages[0], pages[1])
    table, count = ops.expand(entries, runs, indptr, steps, capacity)
    ops.copy_(table, count, read=[src], written=[dst], homes=homes)
    return before, bad, pages, runs, indptr, count, dst.clone()


def inputs(count: int, seed: int):
    noise = torch.Generator().manual_seed(seed)
    src, dst = (torch.randint(0, 256, (400, 24), dtype=torch.uint8, generator=noise) for _ in range(2))
    ids = torch.stack([torch.randperm(400, generator=noise)[:count] for _ in range(2)])
    ids[:, : count // 2] = torch.arange(count // 2) + seed
    ids[:, count // 2 :] = torch.arange(count - count // 2).flip(0) * 2 % 100 + 250
    slots = (ids[:, :, None] * SIZE + torch.arange(SIZE)).reshape(2, -1).to(torch.int32)
    return slots, ids, src, dst


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_all_stages(dynamic, compiler):
    torch._dynamo.reset()
    compiled = torch.compile(stages, fullgraph=True, dynamic=dynamic, backend=compiler)
    steps = torch.ones(1, 2, dtype=torch.int64)
    for count, seed in ((40, 1), (40, 2), *([(64, 3), (90, 4)] if dynamic else [])):
        slots, ids, src, dst = inputs(count, seed)
        before, want = dst.sum(dtype=torch.int64), dst.clone()
        want[ids[1]] = src[ids[0]]
        src, dst = there(src), there(dst)
        entries = torch.tensor([[src.data_ptr(), 24, dst.data_ptr(), 24, 24, 0]])
        homes = [src.data_ptr(), dst.data_ptr()]
        got = compiled(there(slots), there(entries), there(steps), src, dst, homes, count)
        finish()
        runs, indptr = ops.find_runs(ids[0].contiguous(), ids[1].contiguous())
        same(got, (before, torch.tensor([-1, -1]), ids, runs, indptr, indptr[-1:], want))


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_plans(dynamic, compiler):
    torch._dynamo.reset()
    sizes: list[int] = []

    def plan(tables, job, pages, table, info):
        table.fill_(RUBBISH)
        ops.plan_(tables, job, pages, sizes, table, info)
        return table + 1, info.clone()

    compiled = torch.compile(plan, fullgraph=True, dynamic=dynamic, backend=compiler)
    job = large_job(300, 2, scattered=True, rows=True)
    sizes[:] = job.sizes
    for pages in (job.pages, large_job(300, 2, scattered=True, rows=True, seed=5).pages):
        now = job.with_pages(pages)
        table, info = now.expected()
        outputs = map(there, now.outputs())
        same(compiled(there(now.tables), there(now.job), there(pages), *outputs), (table + 1, info))
