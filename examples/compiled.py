"""torch.compile takes all stages in one graph: token slots to pages to a plan to copied bytes. All are checked."""

from __future__ import annotations

import torch

import kvplan
from kvplan import Layout, Region, ops

PAGE = 4


@torch.compile(fullgraph=True, backend="aot_eager")  # leave out backend where there is a compiler for the device
def send(slots, target_pages, tables, job, sizes, pools, homes, table, info):
    pages, bad = ops.page_indices(slots, PAGE)
    ops.plan_(tables, job, torch.cat([pages, target_pages]), sizes, table, info)
    # info[-1] is the number of descriptors. A compiler moves tensors: homes says where the regions lie.
    ops.copy_(table, info[-1:], read=[pools[0]], written=[pools[1]], homes=homes)
    return bad


def main() -> None:
    source, target = torch.arange(1, 1 + 32 * 8).view(32, 8), torch.zeros(40, 8, dtype=torch.int64)
    layouts = [Layout([Region.from_tensor(pool, "kv", layer=0)], page_size=PAGE) for pool in (source, target)]
    tables = kvplan.pair(*layouts).tables
    homes = [source.data_ptr(), target.data_ptr()]
    for source_pages, target_pages in (([5, 6, 2], [7, 8, 1]), ([0, 31, 4], [20, 30, 39])):
        slots = torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in source_pages])
        count = len(source_pages)
        # Lengths and positions are checked here, once. The source list is first, the destination list behind it.
        job, status = ops.prepare(tables, [0, count, count, count, 0, -1, -1], 2 * count)
        assert status[0] == 0, status
        sizes = job[: ops.SIZES].tolist()
        table, info = torch.zeros(3, sizes[-1], dtype=torch.int64), torch.zeros(7, dtype=torch.int64)
        bad = send(slots, torch.tensor(target_pages), tables, job, sizes, [source, target], homes, table, info)
        assert bad.item() == -1 and info[0] == 0, (bad, info)
        expected = torch.zeros_like(target)
        expected[target_pages] = source[source_pages]
        assert torch.equal(target, expected)
        target.zero_()
    print("every byte is right")


if __name__ == "__main__":
    main()
