"""Nothing waits for the device: torch says so, and every call returns while a kernel before it still runs."""

from __future__ import annotations

import contextlib

import pytest
import torch
from jobs import large_job
from on_device import DEVICE, Copies, finish, needs_gpu, there
from stage_inputs import random_pairs
from test_device_execute import Machine, on_gpu

from kvplan import Request, execute, ops

pytestmark = [pytest.mark.gpu, needs_gpu]

CYCLES = 1_500_000_000  # most of a second


@contextlib.contextmanager
def waits_are_errors():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _plan_op():
    job = large_job(700, 3, scattered=True, rows=True)
    args = [*map(there, (job.tables, job.job, job.pages)), job.sizes, *map(there, job.outputs())]
    return lambda: ops.plan_(*args)


def _pinned_plan_op():
    job = large_job(700, 3, scattered=True, rows=True)
    table, info = job.outputs()
    args = [*map(there, (job.tables, job.job, job.pages)), job.sizes, table.pin_memory(), there(info)]
    return lambda: ops.plan_(*args)


def _page_indices():
    slots, rows = torch.arange(64 * 50, device=DEVICE).reshape(5, -1), torch.tensor([3, 1], device=DEVICE)
    lengths = torch.tensor([640, 17], device=DEVICE)
    return lambda: (ops.page_indices(slots, 64, rows, lengths), ops.page_indices(slots[0], 64))


def _find_runs():
    src, dst = map(there, random_pairs(5000, 1))
    cuts = torch.tensor([0, 9, 5000], device=DEVICE)
    return lambda: (ops.find_runs(src, dst, cuts), ops.find_runs(src, dst))


def _expand():
    runs, cuts = map(there, ops.find_runs(*random_pairs(5000, 1)))
    entries, steps = there(torch.tensor([[9, 8, 9, 8, 8, 0]] * 7)), there(torch.ones(1, 2, dtype=torch.int64))
    return lambda: ops.expand(entries, runs, cuts, steps, 35_000)


def _copy():
    copies = Copies([1700] * 50, 1, ("device", "host"))
    table, count = copies.table(), torch.tensor([50], device=DEVICE)
    return lambda: (ops.copy_(table), ops.copy_(table, count))


def _planner(in_host_memory=False):
    machine = Machine(20, "device", "host")
    planner = machine.pairing.planner([Request(*on_gpu(*machine.ids(1, 10, 20)))], pinned=in_host_memory)
    return lambda: (planner.run(), machine)


def _new_plan():
    machine = Machine(20, "device", "host")
    src, dst = on_gpu(*machine.ids(1, 10, 20))
    return lambda: machine.pairing.plan(src, dst)


def _mixed_plan():
    machine = Machine(20, "device", "host")
    src, dst = machine.ids(1, 10, 20)
    dst["host"] = torch.tensor(dst["host"], device=DEVICE)
    return lambda: machine.pairing.plan(src, dst)


def _execute():
    machine = Machine(20, "device", "host")
    src, dst = on_gpu(*machine.ids(1, 10, 20))
    return lambda: execute(machine.pairing.plan(src, dst))


CALLS = {
    "plan_": _plan_op,
    "plan_ into pinned memory": _pinned_plan_op,
    "page_indices": _page_indices,
    "find_runs": _find_runs,
    "expand": _expand,
    "copy_": _copy,
    "Planner.run": _planner,
    "Planner.run, pinned": lambda: _planner(True),
    "Pairing.plan": _new_plan,
    "Pairing.plan, lists on both sides": _mixed_plan,
    "execute": _execute,
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_sees_no_wait(name):
    call = CALLS[name]()
    call()  # tables are moved, and kernels loaded or compiled, once
    finish()
    with waits_are_errors():
        for _ in range(3):
            call()


@pytest.mark.parametrize("name", CALLS)
def test_calls_return_while_the_device_is_busy(name):
    call = CALLS[name]()
    for _ in range(3):
        call()
        finish()
    torch.cuda._sleep(CYCLES)
    result = call()
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the call waited for what was before it"
    finish()
    assert done.query()
    del result


def test_reading_a_plan_waits_for_it():
    machine = Machine(20, "device", "host")
    request = machine.ids(1, 10, 20)
    src, dst = on_gpu(*request)
    machine.pairing.plan(src, dst).wait()
    torch.cuda._sleep(CYCLES // 4)
    assert machine.pairing.plan(src, dst).lists() == machine.pairing.plan(*request).lists()
