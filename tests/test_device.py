"""Plans made by `plan_`, as on a GPU; here on CPU tensors, which take the same way but for the waiting."""

import pytest
import torch
from hypothesis import given
from strategies import clusters, profile

import kvplan
from kvplan import PlanError, Request
from kvplan.planning import make
from kvplan.planning.requests import PageLists

CPU = torch.device("cpu")


def pairing(pages=9):
    src = kvplan.Layout([kvplan.Region("kv", k, 1 << 20 | k << 12, 64, pages) for k in range(2)], page_size=4)
    dst = kvplan.Layout(
        [
            kvplan.Region("kv", 0, 1 << 30, 64, pages, space="host"),
            kvplan.Region("kv", 1, 1 << 31, 64, pages, memory=kvplan.Memory.VRAM(0)),
        ],
        page_size=4,
    )
    return kvplan.pair(src, dst)


@given(clusters(nulls=False))
@profile(100)
def test_plans_are_those_of_the_cpu(cluster):
    for src, dst in cluster.pairs():
        made = kvplan.pair(src, dst, allow_unsent=cluster.allow_unsent)
        request = Request(cluster.src_pages, cluster.dst_pages, **cluster.positions)
        want = made.plan_batch([request])
        got = made.planner([request], device="cpu").run()
        assert torch.equal(got.table, want.table) and int(got.count) == len(want)
        assert (got.segments, got.offsets, got.requests) == (want.segments, want.offsets, want.requests)
        assert (got.total_bytes, got.lists()) == (want.total_bytes, want.lists())


def test_many_requests():
    made = pairing()
    requests = [Request([k, k + 1, 8 - k], {"host": [3 * k + j for j in range(3)], "device": [k, 8 - k, k + 3]})
                for k in (0, 1, 2)]  # fmt: skip
    requests[1:1] = [Request([], {"host": [], "device": []})]
    want, got = made.plan_batch(requests), made.planner(requests, device="cpu").run()
    assert (got.lists(), got.offsets, got.segments) == (want.lists(), want.offsets, want.segments)
    assert [got.request(k).lists() for k in range(4)] == [want.request(k).lists() for k in range(4)]
    assert len(made.planner([], device="cpu").run()) == 0


def test_the_count_is_that_of_the_last_run():
    src, targets = torch.tensor([1, 5, 3]), torch.tensor([0, 2, 4])
    planner = pairing().planner([Request(src, {"host": targets, "device": targets})], device="cpu")
    plan = planner.run()
    assert int(plan.count) == 6
    src.copy_(torch.tensor([1, 2, 3])), targets.copy_(torch.tensor([4, 5, 6]))
    planner.run()
    assert int(plan.count) == 2  # a graph that copies by it goes with the replay


def test_a_run_reads_the_lists_anew():
    src, host, device = torch.tensor([1, 2, 7]), torch.tensor([0, 1, 2]), torch.tensor([8, 7, 6])
    made = pairing()
    planner = made.planner([Request(src, {"host": host, "device": device})], device="cpu")
    assert planner.run().lists() == made.plan(src, {"host": host, "device": device}).lists()
    src.copy_(torch.tensor([4, 5, 6]))
    device.copy_(torch.tensor([3, 4, 5]))
    plan = planner.run()
    assert plan.lists() == made.plan(src, {"host": host, "device": device}).lists()
    assert [len(part) for part in plan.segments] == [1, 1] and plan.request(0).lists() == plan.lists()


def test_a_refused_plan_raises_when_it_is_read_and_moves_nothing():
    made = pairing()
    plan = made.planner(
        [Request([1], {"host": [0], "device": [0]}), Request([1, 2], {"host": [3, 9], "device": [5, 6]})], device="cpu"
    ).run()
    assert int(plan.count) == 0
    text = "request 1: space 'host': destination page id 9 at position 1 is out of range"
    for read in (plan.wait, lambda: len(plan), plan.lists, lambda: plan.segments):
        with pytest.raises(PlanError, match=text):
            read()


def test_lengths_are_refused_before_anything_runs():
    with pytest.raises(PlanError, match="request 1: space 'host': the length of the destination list is 1"):
        made = pairing()
        made.planner(
            [Request([], {"host": [], "device": []}), Request([1, 2], {"host": [1], "device": [3, 4]})], device="cpu"
        )


def test_a_device_must_be_known():
    with pytest.raises(PlanError, match="say on which device"):
        pairing().planner([Request([1], {"host": [1], "device": [3]})])


def test_execute_takes_a_plan_that_nobody_has_read():
    src, dst = torch.arange(8 * 4).view(8, 4), torch.zeros(9, 4, dtype=torch.int64)
    layouts = [kvplan.Layout([kvplan.Region.from_tensor(pool, "kv", layer=0)], page_size=4) for pool in (src, dst)]
    planner = kvplan.pair(*layouts).planner([Request([5, 6, 2], [7, 8, 1])], device="cpu")
    plan = planner.run()
    kvplan.execute(plan)
    assert plan._read is None and torch.equal(dst[[7, 8, 1]], src[[5, 6, 2]])


def test_an_engine_reads_a_plan_and_refuses_a_refused_one():
    src, dst = torch.arange(8 * 4).view(8, 4), torch.zeros(9, 4, dtype=torch.int64)
    layouts = [kvplan.Layout([kvplan.Region.from_tensor(pool, "kv", layer=0)], page_size=4) for pool in (src, dst)]
    source, targets = torch.tensor([5, 6, 2]), torch.tensor([7, 8, 1])
    planner = kvplan.pair(*layouts).planner([Request(source, targets)], device="cpu")
    with kvplan.engines.LocalEngine() as prefill, kvplan.engines.LocalEngine() as decode:
        prefill.register(layouts[0])
        decode.register(layouts[1])
        prefill.submit(planner.run(), decode.session).wait(timeout=10)
        assert torch.equal(dst[targets], src[source])
        targets[2] = 7
        with pytest.raises(PlanError, match="destination page 7 is given twice, at positions 0 and 2"):
            prefill.submit(planner.run(), decode.session)


def test_a_page_that_two_requests_write_is_told_where_it_is_written():
    """The list of request 0 holds page 9 too, but for what it does not write."""
    layout = kvplan.Layout([kvplan.Region("kv", 0, 1 << 20, 64, 19)], page_size=4)
    requests = [Request([1], [9, 1], src_start=4, dst_start=0), Request([2], [9], dst_start=0),
                Request([3], [9], dst_start=0)]  # fmt: skip
    made = kvplan.pair(layout, layout)
    for refused in (lambda: made.plan_batch(requests), lambda: made.planner(requests, device="cpu").run().wait()):
        with pytest.raises(PlanError, match="page 9 is given twice, at positions 0 of request 1 and 0"):
            refused()


def test_lists_on_another_device_are_refused():
    made = pairing()
    meta = torch.empty(1, dtype=torch.int64, device="meta")
    lists = PageLists(made).add([1], {"host": [2], "device": [3]}, 0, None, None)
    lists.lists[1] = meta  # a device that is here: no page id can be read from it, so `planner` does not let it in
    with pytest.raises(PlanError, match="page ids are on meta, and the plan is to be made on cpu"):
        make.planner(lists, torch.device("cpu"), pinned=False)
    with pytest.raises(PlanError, match=r"request 0: src_pages holds no page ids: it is a meta tensor"):
        made.planner([Request(meta, {"host": meta, "device": meta})], device="cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_here_is_refused():
    with pytest.raises(PlanError, match="cannot plan on cuda: "):
        pairing().planner([Request([1], {"host": [1], "device": [3]})], device="cuda")
