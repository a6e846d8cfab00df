"""Plans carried out by `execute`: pages of real sizes between device memory and device or pinned host memory."""

from __future__ import annotations

import random

import pytest
import torch
from on_device import DEVICE, DRY, PLACES, finish, needs_device, needs_gpu, pinned, there
from stage_inputs import same

import kvplan
from kvplan import Layout, PlanError, Region, Request, execute, ops, pair

pytestmark = [pytest.mark.gpu, needs_device]

GUARD = 96  # bytes before the first page and behind each


class Pool:
    """Pages of one region in device or pinned host memory, with bytes between them that no page covers."""

    def __init__(self, name: str, layer: int, size: int, pages: int, where: str, space: str, gap: int) -> None:
        self.stride = size + gap
        self.before = torch.randint(0, 256, (GUARD + pages * self.stride,), dtype=torch.uint8)
        self.bytes = there(self.before.clone()) if where == "device" else pinned(self.before.clone())
        on_gpu = where == "device" and not DRY
        self.region = Region(
            name, layer, self.bytes.data_ptr() + GUARD, size, pages, page_stride=self.stride, space=space,
            memory=kvplan.Memory.VRAM(0) if on_gpu else kvplan.Memory.DRAM,
        )  # fmt: skip

    def page(self, number: int) -> slice:
        start = GUARD + number * self.stride
        return slice(start, start + self.region.page_bytes)


class Machine:
    """Both sides of a transfer in one process: regions of DeepSeek-V4's page sizes, two index spaces."""

    SIZES = {"c4_kv": 37_440, "c4_indexer": 8_448, "c128_kv": 1_728}

    def __init__(self, pages: int, src: str, host: str, gap: int = 0, layers: int = 2) -> None:
        self.pools = []
        for name, size in self.SIZES.items():
            for layer in range(layers):
                space, where = ("host", host) if name == "c4_kv" else ("device", "device")
                self.pools.append(
                    (
                        Pool(name, layer, size, pages, src, "device", gap),
                        Pool(name, layer, size, pages, where, space, gap),
                    )
                )
        self.pairing = pair(*(Layout([sides[k].region for sides in self.pools], page_size=256) for k in range(2)))

    def ids(self, seed: int, count: int, pages: int) -> tuple[list[int], dict[str, list[int]]]:
        draw = random.Random(seed)
        return draw.sample(range(pages), count), {
            space: draw.sample(range(pages), count) for space in ("host", "device")
        }

    def check(self, src: list[int], dst: dict[str, list[int]]) -> None:
        """The pages of this request arrived, and nothing else changed."""
        finish()
        for source, target in self.pools:
            want = target.before.clone()
            for here, there_ in zip(src, dst[target.region.space], strict=True):
                want[target.page(there_)] = source.before[source.page(here)]
            same([source.bytes, target.bytes], [source.before, want])


def on_gpu(src, dst):
    """The lists of a request on the device."""
    make = lambda ids: torch.tensor(ids, device=DEVICE)  # noqa: E731
    return make(src), {space: make(ids) for space, ids in dst.items()}


WAYS = sorted(set(PLACES) - {("host", "host")})


@pytest.mark.parametrize("gap", [0, 5, 64])
@pytest.mark.parametrize(("src", "host"), WAYS)
def test_pages_arrive_and_nothing_else_changes(src, host, gap):
    """`src`: where all source pages are. `host`: where the C4 pages of the destination are."""
    machine = Machine(50, src, host, gap)
    request = machine.ids(gap, 30, 50)
    execute(machine.pairing.plan(*on_gpu(*request)))
    machine.check(*request)


@pytest.mark.parametrize(("src", "host"), WAYS)
def test_a_plan_made_on_the_cpu_is_carried_out_on_the_gpu(src, host):
    machine = Machine(20, src, host)
    request = machine.ids(3, 20, 20)
    execute(machine.pairing.plan(*request))
    machine.check(*request)


@pytest.mark.parametrize("in_host_memory", [False, True])
def test_a_planner_and_execute(in_host_memory):
    machine = Machine(40, "device", PLACES[-1][-1])
    request = machine.ids(8, 33, 40)
    src, dst = on_gpu(*request)
    planner = machine.pairing.planner([Request(src, dst)], pinned=in_host_memory, device=DEVICE)
    execute(planner.run())
    machine.check(*request)


@needs_gpu
def test_a_device_given_as_text_is_the_same_device():
    machine = Machine(20, "device", "device")
    request = machine.ids(2, 9, 20)
    execute(machine.pairing.planner([Request(*request)], device="cuda").run())
    machine.check(*request)


def test_the_op_by_itself():
    machine = Machine(40, "device", "device")
    request = machine.ids(9, 33, 40)
    planner = machine.pairing.planner([Request(*on_gpu(*request))], device=DEVICE)
    planner.run()
    ops.copy_(planner.table, planner.info[-1:])
    machine.check(*request)


def test_gather_and_scatter():
    """Pages to a staging buffer as one run, and from there to pages elsewhere."""
    size, count = 1_728, 200
    layouts, pools = [], []
    for name, where in (("pages", "device"), ("staging", PLACES[-1][-1]), ("target", "device")):
        pools.append(Pool("kv", 0, size, count if name == "staging" else 2 * count, where, "device", 0))
        layouts.append(Layout([pools[-1].region], page_size=1))
    here, target = torch.randperm(2 * count)[:count], torch.randperm(2 * count)[:count]
    in_turn = torch.arange(count)
    gather = pair(*layouts[:2]).plan(here.to(DEVICE), in_turn.to(DEVICE))
    scatter = pair(*layouts[1:]).plan(in_turn.to(DEVICE), target.to(DEVICE))
    execute(gather)
    execute(scatter)
    finish()
    for end, ids in ((pools[1], in_turn), (pools[2], target)):
        want = end.before.clone()
        for source, number in zip(here.tolist(), ids.tolist(), strict=True):
            want[end.page(number)] = pools[0].before[pools[0].page(source)]
        same([end.bytes], [want])


@needs_gpu
@pytest.mark.parametrize("place", ["src", "host", "device"])
def test_a_bad_page_id_moves_nothing(place):
    machine = Machine(20, "device", "host")
    src, dst = on_gpu(*machine.ids(1, 10, 20))
    bad = src if place == "src" else dst[place]
    bad[4] = 1 << 33 if place == "src" else bad[2]
    plan = machine.pairing.plan(src, dst)
    ops.copy_(plan.device_table, plan.count)  # as `execute` does, without reading the status
    machine.check([], {"host": [], "device": []})
    with pytest.raises(PlanError, match="position 4" if place == "src" else "positions 2 and 4"):
        plan.wait()


@needs_gpu
def test_execute_of_a_bad_page_id_moves_nothing():
    machine = Machine(20, "device", "device")
    src, dst = on_gpu(*machine.ids(1, 10, 20))
    src[0] = -1
    plan = machine.pairing.plan(src, dst)
    execute(plan)
    machine.check([], {"host": [], "device": []})
    with pytest.raises(PlanError, match="position 0"):
        plan.wait()
