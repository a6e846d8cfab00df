"""Every kernel once or twice on small inputs, for a memory checker: compute-sanitizer python tests/gpu/small_inputs.py.

Prints "all right" at the end. Run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each tensor is an allocation that
the checker knows the ends of.
"""

# ruff: noqa: E402  (imports below need the path)
from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[:2]]

import torch
from jobs import large_job
from on_device import DEVICE, PLACES, Copies, planned, there
from stage_inputs import STEPS, random_cuts, random_entries, random_pairs, same, slot_table
from test_device_execute import Machine, on_gpu

from kvplan import Request, ops
from kvplan.ops import backend


def main() -> None:
    print("back end:", backend.chosen()[1].name)
    for pages, requests, rows in ((1, 1, False), (130, 1, True), (1100, 2, False), (40, 3, True)):
        job = large_job(pages, requests, scattered=True, rows=rows, narrow=bool(pages % 2))
        same(planned(job), job.expected())
        same(planned(job, pinned_table=True), job.expected())
        same(planned(job, int(job.expected()[1][-1]) - 1), job.expected(int(job.expected()[1][-1]) - 1))
        bad = job.pages.clone()
        bad[-1] = bad[-2] if pages > 1 else -1
        same(planned(job.with_pages(bad)), job.with_pages(bad).expected())
    for n, lists in ((0, None), (33, None), (1025, 7), (3000, 300)):
        src, dst = random_pairs(n, n)
        indptr = None if lists is None else random_cuts(n, lists, n)
        same(ops.find_runs(there(src), there(dst), there(indptr)), ops.find_runs(src, dst, indptr))
    if torch.cuda.is_available():
        for indptr in ([0, -1, 9], [0, 5, 10], [3, 2, 9]):
            src, dst = map(there, random_pairs(9, 1))
            assert ops.find_runs(src, dst, there(torch.tensor(indptr)))[1][-1] == -1
    for seed in range(4):
        runs, indptr = ops.find_runs(*random_pairs(40, seed), random_cuts(40, 2, seed))
        args = (random_entries(2, seed), runs, indptr, STEPS[:2].contiguous())
        room = int(ops.expand(*args, 0)[1]) + seed - 1
        same(ops.expand(*map(there, args), max(room, 0)), ops.expand(*args, max(room, 0)))
        slots, rows, lengths = map(there, slot_table(100, 16, seed))
        ops.page_indices(slots[:, :100], 16, rows, lengths)
    for where in PLACES:
        for apart in (None, 0, 8, 4, 2, 1):
            copies = Copies([0, 1, 17, 100, 1700, 16384, 40001], 1, where, apart)
            ops.copy_(copies.table())
            copies.check()
    machine = Machine(9, "device", "host", gap=5, layers=1)
    request = machine.ids(1, 7, 9)
    plan = machine.pairing.planner([Request(*on_gpu(*request))], device=DEVICE).run()
    assert plan.lists() == machine.pairing.plan(*request).lists()
    print("all right")


if __name__ == "__main__":
    main()
