"""Several streams, threads and devices."""

from __future__ import annotations

import threading

import pytest
import torch
from jobs import RUBBISH, large_job, one_region
from on_device import DEVICE, finish, needs_gpu, there
from stage_inputs import same

from kvplan import Request, ops

pytestmark = [pytest.mark.gpu, needs_gpu]


def test_plans_on_several_streams_at_once():
    jobs = [large_job(2000, 2, scattered=True, rows=bool(k % 2), seed=k) for k in range(6)]
    streams = [torch.cuda.Stream() for _ in jobs]
    given = [list(map(there, (job.tables, job.job, job.pages))) for job in jobs]
    outputs = [list(map(there, job.outputs())) for job in jobs]
    finish()
    for _ in range(30):
        for job, stream, inputs, (table, info) in zip(jobs, streams, given, outputs, strict=True):
            with torch.cuda.stream(stream):
                table.fill_(RUBBISH)
                ops.plan_(*inputs, job.sizes, table, info)
    finish()
    for job, got in zip(jobs, outputs, strict=True):
        same(got, job.expected())


def test_the_current_stream_is_the_one_used():
    """A plan waits for a slow kernel on its own stream, and not for one on another stream."""
    pairing = one_region(pages=100, layers=2)
    src, dst = there(torch.arange(50)), there(torch.arange(50))
    planner = pairing.planner([Request(src, dst)])
    planner.run().wait()
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    finish()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(1_500_000_000)
        asleep = torch.cuda.Event()
        asleep.record()
    with torch.cuda.stream(fast):
        planner.run().wait()
    assert not asleep.query()
    with torch.cuda.stream(slow):
        planner.run().wait()
    assert asleep.query()


def test_calls_from_a_thread_that_never_used_the_device():
    """Such a thread has no current CUDA context."""
    job = large_job(300, 2, scattered=True, rows=True)
    args = list(map(there, (job.tables, job.job, job.pages)))
    table, info = map(there, job.outputs())
    in_host_memory = job.outputs()[0].pin_memory()
    infos = info.clone()
    ops.plan_(*args, job.sizes, table, info)  # kernels are loaded
    finish()
    failures: list[BaseException] = []

    def call() -> None:
        try:
            ops.plan_(*args, job.sizes, table, info)
            ops.plan_(*args, job.sizes, in_host_memory, infos)
        except BaseException as error:  # raised by the thread that waits for this one
            failures.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    finish()
    if failures:
        raise failures[0]
    same([table, info], job.expected())
    same([in_host_memory, infos], job.expected())


def test_calls_from_many_threads():
    pairing = one_region(pages=3000, layers=5)
    lists = [(torch.randperm(3000)[:900], torch.randperm(3000)[:900]) for _ in range(8)]
    found: list[object] = [None] * len(lists)

    def call(number: int) -> None:
        src, dst = map(there, lists[number])
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    plan = pairing.plan(src, dst).table
            found[number] = plan
        except BaseException as error:
            found[number] = error

    pairing.tables_on(DEVICE)
    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(lists))]
    finish()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for plan, (src, dst) in zip(found, lists, strict=True):
        if isinstance(plan, BaseException):
            raise plan
        same([plan], [pairing.plan(src, dst).table])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_second_device():
    pairing = one_region(pages=300, layers=2)
    src, dst = torch.randperm(300)[:200], torch.randperm(300)[:200]
    plan = pairing.plan(src.to("cuda:1"), dst.to("cuda:1"))
    same([plan.table], [pairing.plan(src, dst).table])
    assert plan.device_table.device.index == 1 and torch.cuda.current_device() == 0
