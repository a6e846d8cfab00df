"""CUDA graphs: captured once, replayed with other page ids, right each time."""

from __future__ import annotations

import random

import pytest
import torch
from jobs import RUBBISH, large_job, one_region
from on_device import DEVICE, finish, needs_gpu, there
from stage_inputs import random_cuts, random_pairs, same
from test_device_execute import Machine

import kvplan
from kvplan import Request, ops

pytestmark = [pytest.mark.gpu, needs_gpu]


def captured(call):
    """(graph of `call`, what `call` returned). It runs before on another stream, as CUDA graphs require."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    finish()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def test_plans_and_copies_of_other_page_ids():
    machine = Machine(64, "device", "host")
    request = machine.ids(0, 40, 64)
    src = torch.tensor(request[0], device=DEVICE)
    dst = {space: torch.tensor(ids, device=DEVICE) for space, ids in request[1].items()}
    planner = machine.pairing.planner([Request(src, dst)])

    def call() -> None:
        planner.run()
        ops.copy_(planner.table, planner.info[-1:])

    graph, _ = captured(call)
    for _, target in machine.pools:
        target.bytes.copy_(target.before)
    for seed in range(1, 12):
        new, targets = machine.ids(seed, 40, 64)
        bad = seed % 4 == 0
        src.copy_(torch.tensor([*new[:-1], 64] if bad else new))
        for space, ids in targets.items():
            dst[space].copy_(torch.tensor(ids))
        graph.replay()
        finish()
        assert int(planner.info[0]) == (1 if bad else 0)
        if bad:
            assert planner.info.tolist() == [1, 0, 0, 39, 64] + [0] * (len(planner.info) - 5)
            machine.check([], {"host": [], "device": []})
        else:
            want = machine.pairing.plan(new, targets)
            same([planner.table[:, : len(want)]], [want.table])
            machine.check(new, targets)
        for _, target in machine.pools:
            target.bytes.copy_(target.before)


@pytest.mark.parametrize("in_host_memory", [False, True])
def test_a_batch_replayed(in_host_memory):
    requests, pages = 16, 200
    pairing = one_region(pages=10_000, layers=7)
    lists = [[torch.empty(pages, dtype=torch.int32, device=DEVICE) for _ in range(2)] for _ in range(requests)]
    draw = random.Random(1)

    def fill():
        sides = [draw.sample(range(10_000), requests * pages) for _ in range(2)]
        ids = [[side[k * pages : (k + 1) * pages] for side in sides] for k in range(requests)]
        for tensors, new in zip(lists, ids, strict=True):
            for tensor, values in zip(tensors, new, strict=True):
                tensor.copy_(torch.tensor(values, dtype=torch.int32))
        return pairing.plan_batch(Request(*new) for new in ids)

    fill()
    planner = pairing.planner([Request(*tensors) for tensors in lists], pinned=in_host_memory)
    graph, _ = captured(planner.run)
    for _ in range(5):
        want = fill()
        planner.table.fill_(-1)
        graph.replay()
        finish()
        assert planner.info[0] == 0 and int(planner.info[-1]) == len(want)
        same([planner.table[:, : len(want)]], [want.table])


def test_a_job_replayed():
    """The op alone. Scratch memory that it allocates during capture must stay the graph's own."""
    job, other = (large_job(3000, 2, scattered=scattered, rows=True, seed=4) for scattered in (True, False))
    tables, words, pages = there(job.tables), there(job.job), there(job.pages)
    table, info = map(there, job.outputs())
    graph, _ = captured(lambda: ops.plan_(tables, words, pages, job.sizes, table, info))
    for now in (job, other, job):
        rubbish = torch.full((1 << 20,), -1, dtype=torch.int64, device=DEVICE)  # over freed memory
        pages.copy_(now.pages)
        table.fill_(RUBBISH)
        graph.replay()
        same([table, info], now.with_pages(now.pages).expected())
        del rubbish


def test_all_stages_in_one_graph():
    count, size = 300, 16
    src, dst = (torch.randint(0, 256, (1000 * 64,), dtype=torch.uint8, device=DEVICE) for _ in range(2))
    entries = torch.tensor([[src.data_ptr(), 64, dst.data_ptr(), 64, 64, 0]], device=DEVICE)
    steps, slots = (
        torch.ones(1, 2, dtype=torch.int64, device=DEVICE),
        torch.empty(2, count * size, device=DEVICE).long(),
    )
    cuts = there(random_cuts(count, 4, 1))

    def call():
        pages, bad = ops.page_indices(slots, size)
        runs, indptr = ops.find_runs(pages[0], pages[1])
        table, number = ops.expand(entries, runs, indptr, steps, count)
        ops.copy_(table, number, read=[src], written=[dst])
        return bad, pages, ops.find_runs(pages[0], pages[1], cuts)

    ids = torch.stack([torch.randperm(1000)[:count] for _ in range(2)])
    slots.copy_((ids[:, :, None] * size + torch.arange(size)).reshape(2, -1))
    graph, (bad, pages, pieces) = captured(call)
    for seed in range(5):
        noise = torch.Generator().manual_seed(seed)
        ids = torch.stack([torch.randperm(1000, generator=noise)[:count] for _ in range(2)])
        ids[:, 100:150] = torch.arange(50) + 100 * seed
        if len(ids[1].unique()) < count:
            ids[1] = torch.randperm(1000, generator=noise)[:count]
        slots.copy_((ids[:, :, None] * size + torch.arange(size)).reshape(2, -1))
        want = dst.cpu().reshape(1000, 64)
        want[ids[1]] = src.cpu().reshape(1000, 64)[ids[0]]
        graph.replay()
        finish()
        assert bad.tolist() == [-1, -1]
        same([pages], [ids])
        same(pieces, ops.find_runs(ids[0].contiguous(), ids[1].contiguous(), cuts.cpu()))
        same([dst], [want.reshape(-1)])


def test_two_graphs_and_a_plan_between():
    pairing = one_region(pages=500, layers=3)
    ids = [torch.randperm(500)[:80] for _ in range(6)]
    first, second = (pairing.planner([Request(there(ids[k]), there(ids[k + 1]))]) for k in (0, 2))
    graphs = [captured(planner.run)[0] for planner in (first, second)]
    for _ in range(20):
        graphs[0].replay()
        between = pairing.plan(there(ids[4]), there(ids[5]))
        graphs[1].replay()
        for planner, k in ((first, 0), (second, 2)):
            want = pairing.plan(ids[k], ids[k + 1])
            same([planner.table[:, : len(want)]], [want.table])
        same([between.table], [pairing.plan(ids[4], ids[5]).table])


def test_runs_of_any_length_replayed():
    n = 100_000
    src, dst = (torch.empty(n, dtype=torch.int64, device=DEVICE) for _ in range(2))
    src.zero_(), dst.zero_()
    graph, got = captured(lambda: ops.find_runs(src, dst))
    for seed in range(4):
        pairs = random_pairs(n, seed)
        src.copy_(pairs[0]), dst.copy_(pairs[1])
        graph.replay()
        same(got, ops.find_runs(*pairs))


def test_a_plan_made_while_capturing_is_read_after_a_replay():
    pairing = kvplan.pair(*(one_region().src, one_region().dst))
    src, dst = there(torch.tensor([1, 2])), there(torch.tensor([5, 7]))
    planner = pairing.planner([Request(src, dst)])
    graph, plan = captured(planner.run)
    graph.replay()
    finish()
    assert plan.lists() == pairing.plan([1, 2], [5, 7]).lists()
