"""Carry a plan out in this process: the copy stage."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .. import ops
from ..errors import PlanError
from ..layout import Memory
from ..ops import backend
from .device import DevicePlan
from .plan import Plan


def execute(plan: Plan) -> None:
    """Copy every descriptor of `plan`. Source and destination must both be mapped in this process.

    From DRAM to DRAM the copy is done on return. If one side is VRAM, a kernel copies, on that GPU's current stream and
    without waiting; DRAM must then be pinned. A plan that is made on a GPU can be passed without waiting for it. If
    that plan is refused, nothing is copied, and no error is raised here.

    Raises:
        PlanError: segments name the memory of several GPUs, or of none that is here.
    """
    if isinstance(plan, DevicePlan):
        device = _device_of(plan.segment_memories)
        if device is not None and device != plan.device:
            raise PlanError(f"the plan was made on {plan.device}, and moves memory of {device}")
        if device is None and plan.device.type != "cpu":
            device = plan.device  # pinned memory to pinned memory
        table, count = plan.on_current_stream()
        ops.copy_(table if device is None else table.to(device, non_blocking=True), count)
        return
    device = _device_of([(part.src_memory, part.dst_memory) for part in plan.segments])
    table = plan.table.contiguous()
    ops.copy_(table if device is None else backend.send(table, device))


def _device_of(memories: Iterable[tuple[Memory, Memory]]) -> torch.device | None:
    """The one GPU that a copy between these memories needs; None where it needs none."""
    found = None
    for pair in memories:
        for memory in pair:
            if memory.kind == "DRAM":
                continue
            if found is not None and memory != found:
                raise PlanError(
                    f"execute copies within one GPU and its host; the plan goes from {pair[0]} to {pair[1]}"
                )
            found = memory
    return None if found is None else _torch_device(found)


def _torch_device(memory: Memory) -> torch.device:
    kind = "xpu" if not torch.cuda.is_available() and hasattr(torch, "xpu") and torch.xpu.is_available() else "cuda"
    if kind == "cuda" and memory.device >= torch.cuda.device_count():
        raise PlanError(f"execute cannot reach {memory}: torch sees {torch.cuda.device_count()} GPUs here")
    return torch.device(kind, memory.device)
