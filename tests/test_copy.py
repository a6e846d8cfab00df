"""The copy stage: bytes move as the table says, and nothing else does."""

import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from moved import moved_copy
from stage_inputs import Copies

from kvplan import Layout, Memory, Plan, PlanError, Region, Segment, execute, ops, pair


@pytest.mark.parametrize("page_bytes", [1, 37, 4096, 37440])
@pytest.mark.parametrize("pages", [1, 300])
def test_pages_arrive_and_the_rest_is_untouched(page_bytes, pages):
    rng = np.random.default_rng(page_bytes)
    src = torch.from_numpy(rng.integers(0, 255, (2 * pages, page_bytes), np.uint8))
    dst = torch.full((3 * pages, page_bytes + 5), 255, dtype=torch.uint8)
    layouts = [
        Layout([Region.from_tensor(tensor, "kv", 0, page_bytes=page_bytes)], page_size=1) for tensor in (src, dst)
    ]
    here, there = rng.permutation(2 * pages)[:pages], rng.permutation(3 * pages)[:pages]
    execute(pair(*layouts).plan(here, {"device": there}))
    want = torch.full_like(dst, 255)
    want[there, :page_bytes] = src[here]
    assert torch.equal(dst, want)


SIZES = {
    "every length to 1,000": [*range(1000), *[1 << 10] * 600],
    "rows": [1024] * 1500,
    "odd rows": [1727] * 900,
    "some empty": [0, 512, 0, 0, 4096] * 400,
    "pages": [37_440] * 40,
    "one": [5 << 20],
}


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("apart", [None, 0, 1])
@pytest.mark.parametrize("sizes", SIZES)
def test_large_tables(sizes, apart, threads):
    """More than a MB, which is written past the cache; by several threads from 8 MB on."""
    copies = Copies(SIZES[sizes] * (6 if threads > 1 else 1), seed=len(sizes), apart=apart)
    ops.set_num_threads(threads)
    try:
        ops.copy_(copies.table())
        copies.check()
        ops.copy_(copies.table(spare=3), torch.tensor([len(copies.moves)]))
        copies.check()
    finally:
        ops.set_num_threads(1)


def test_a_part_of_a_table():
    copies = Copies([100] * 50, seed=1)
    for start in (0, 7, 43):
        ops.copy_(copies.table()[:, start : start + 7])
    moved = [*copies.moves[:14], *copies.moves[43:]]
    copies.moves = moved
    copies.check()


def test_a_copy_starts_no_threads():
    """Of 16 MB, on the calling thread alone."""
    copies = Copies([1024] * (16 << 10), seed=2)
    before = set(os.listdir("/proc/self/task"))
    ops.copy_(copies.table())
    assert set(os.listdir("/proc/self/task")) == before
    copies.check()


@pytest.mark.skipif(
    shutil.which("g++") is None or "libasan" in os.environ.get("LD_PRELOAD", ""),
    reason="needs g++, not sanitized itself",
)
@pytest.mark.parametrize("flags", [["-O3"], ["-O1", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover"]])
def test_each_width_of_vectors(flags, tmp_path):
    root = Path(__file__).resolve().parents[1]
    program = tmp_path / "copy"
    build = ["g++", "-std=c++17", *flags, f"-I{root / 'csrc'}", root / "tests/copy_widths.cpp", "-o", program]
    done = subprocess.run([*build, "-pthread"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and int(done.stdout) >= 3, done.stdout + done.stderr


def test_no_descriptors():
    execute(Plan(torch.empty(3, 0, dtype=torch.int64), []))


def test_the_memory_of_a_gpu_that_is_not_here_is_refused():
    segment = Segment(Memory.DRAM, Memory.VRAM(99), 0, 1)
    with pytest.raises(PlanError, match="cannot reach VRAM:99: torch sees"):
        execute(Plan(torch.zeros(3, 1, dtype=torch.int64), [segment]))


def test_the_memory_of_two_gpus_is_refused():
    segment = Segment(Memory.VRAM(1), Memory.VRAM(0), 0, 1)
    with pytest.raises(PlanError, match="within one GPU .* from VRAM:1 to VRAM:0"):
        execute(Plan(torch.zeros(3, 1, dtype=torch.int64), [segment]))


@pytest.mark.parametrize("count", [-1, 3])
def test_a_count_past_the_table_is_refused(count):
    with pytest.raises(RuntimeError, match="from 0 to the table's 2"):
        ops.copy_(torch.zeros(3, 2, dtype=torch.int64), torch.tensor([count]))


def test_a_table_of_the_wrong_form_is_refused():
    with pytest.raises(RuntimeError, match=r"\[3, N\]"):
        ops.copy_(torch.zeros(4, 3, dtype=torch.int64))


def test_tensors_that_have_been_moved():
    table, read, written, homes, after = moved_copy()
    ops.copy_(table, read=read, written=written, homes=homes)
    for tensor, wanted in zip([*read, *written], after, strict=True):
        assert torch.equal(tensor, wanted)


def test_homes_must_be_of_all_tensors():
    with pytest.raises(RuntimeError, match="an address for each tensor"):
        ops.copy_(torch.zeros(3, 0, dtype=torch.int64), read=[torch.zeros(3)], homes=[1, 2])


def test_a_count_of_no_words_is_refused():
    with pytest.raises(RuntimeError, match="count must be one number"):
        ops.copy_(torch.zeros(3, 0, dtype=torch.int64), torch.empty(0, dtype=torch.int64))


def test_a_descriptor_that_leaves_a_moved_tensor_is_refused():
    src, dst = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    home = 1 << 40
    for row in ([home + 32, dst.data_ptr(), 33], [src.data_ptr(), home + 32, 33]):
        homes = [home, dst.data_ptr()] if row[0] == home + 32 else [src.data_ptr(), home]
        with pytest.raises(RuntimeError, match="descriptor 0 begins in a tensor that has been moved, and ends outside"):
            ops.copy_(torch.tensor([row]).T.contiguous(), read=[src], written=[dst], homes=homes)
    assert not dst.any()
