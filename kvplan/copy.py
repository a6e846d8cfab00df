"""Carry a plan out in this process: the copy stage."""

from __future__ import annotations

from . import ops
from .errors import PlanError
from .plan import Plan


def execute(plan: Plan) -> None:
    """Copy every descriptor of `plan`. Source and destination must both be mapped in this process.

    Raises:
        PlanError: a segment is not from DRAM to DRAM. (Copies on a GPU come with the CUDA kernels.)
    """
    for segment in plan.segments:
        if segment.src_memory.kind != "DRAM" or segment.dst_memory.kind != "DRAM":
            raise PlanError(
                f"execute copies DRAM to DRAM; descriptors {segment.start} to {segment.stop - 1} go from "
                f"{segment.src_memory} to {segment.dst_memory}"
            )
    ops.copy_(plan.table.contiguous())
