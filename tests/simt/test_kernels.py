"""Every CUDA kernel and its launches in an emulator on the CPU: results equal those of the C++ ops, to the bit.

Threads and blocks take turns in random orders. KVPLAN_SIMT_SEEDS is how many orders each test draws (3 by default).
"""

from __future__ import annotations

import ctypes
import os
import random
import subprocess
from pathlib import Path

import pytest
import stage_inputs
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import OTHER_HEADERS, Job, job_of, jobs, large_job, one_region, shared_job
from stage_inputs import Copies, random_cuts, random_entries, random_pairs, same, words
from strategies import profile

import kvplan
from kvplan import ops

HERE = Path(__file__).parent
SEEDS = int(os.environ.get("KVPLAN_SIMT_SEEDS", "3"))


class Emulator:
    """The functions of kernels.cpp; they take tensors where C++ takes pointers."""

    def __init__(self, library: Path) -> None:
        self.library = ctypes.CDLL(str(library))

    def call(self, name: str, *args: object) -> None:
        function = getattr(self.library, name)
        function.restype = ctypes.c_char_p
        failure = function(*[_argument(arg) for arg in args])
        if failure is not None:
            raise RuntimeError(failure.decode())

    def plan_(self, seed: int, job: Job, room: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        table, info = job.outputs(room)
        sizes = torch.tensor(job.sizes)
        wide = job.pages.dtype == torch.int64
        self.call(
            "plan", seed, job.tables, len(job.tables), job.job, sizes, job.pages, wide, table, table.shape[1], info,
            job.segments,
        )  # fmt: skip
        return table, info


def _argument(arg: object) -> object:
    if isinstance(arg, torch.Tensor):
        return ctypes.c_void_p(arg.data_ptr())
    if isinstance(arg, bool):
        return ctypes.c_bool(arg)
    return ctypes.c_void_p(None) if arg is None else ctypes.c_int64(arg)


def build(folder: Path, source: Path, *, every_access: bool) -> Emulator:
    """`every_access`: threads may change places at each access to memory (see access.h), not only where they must."""
    flags = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-DKVPLAN_SIMT", f"-I{HERE}"]
    flags += ["-fsanitize=thread"] if every_access else []
    subprocess.run(["g++", *flags, "-c", source, "-o", folder / "kernels.o"], check=True)
    subprocess.run(["g++", "-shared", folder / "kernels.o", "-o", folder / "kernels.so"], check=True)
    return Emulator(folder / "kernels.so")


@pytest.fixture(scope="session", params=["points", "accesses"])
def emulator(tmp_path_factory, request):
    return build(tmp_path_factory.mktemp("simt"), HERE / "kernels.cpp", every_access=request.param == "accesses")


# ------------------------------------------------------------------------------------------------------------- plans


@given(job=jobs(), seed=st.integers(0, 1 << 40))
@profile(150)
def test_plans_of_clusters(emulator, job, seed):
    same(emulator.plan_(seed, job), job.expected())


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("pages", [1, 127, 128, 129, 700])
def test_plans_of_many_pages(emulator, pages, scattered, rows, seed):
    job = large_job(pages, 1, scattered=scattered, rows=rows, seed=seed, narrow=bool(seed % 2))
    same(emulator.plan_(seed, job), job.expected())


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize(("requests", "pages"), [(2, 300), (40, 9), (300, 1)])
def test_batches(emulator, requests, pages, seed):
    job = large_job(pages, requests, scattered=bool(seed % 2), rows=False, seed=seed)
    same(emulator.plan_(seed, job), job.expected())


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("twice", [None, (0, 0), (299, 7), (5, 299)])
def test_two_spaces_write_one_page(emulator, requests, twice, seed):
    job = shared_job(twice, requests)
    table, info = emulator.plan_(seed, job)
    assert info[:4].tolist() == ([0, 0, 0, 0] if twice is None else [3, requests - 1, 1, twice[1]])
    same((table, info), job.expected())


@pytest.mark.parametrize("seed", range(4 * SEEDS))
def test_the_first_bad_page_is_named_and_nothing_is_written(emulator, seed):
    job = large_job(60, 4, scattered=True, rows=False, seed=seed, narrow=False)
    draw = random.Random(seed)
    pages = job.pages.clone()
    for _ in range(draw.randrange(1, 6)):
        place = draw.randrange(len(pages))
        limit = 4 * 60 + 7
        pages[place] = draw.choice([-1, limit, 1 << 40, int(pages[draw.randrange(len(pages))])])
    job = job.with_pages(pages)
    table, info = job.expected()
    untouched, _ = job.outputs()
    assert info[0] == 0 or torch.equal(table, untouched)
    same(emulator.plan_(seed, job), (table, info))


@pytest.mark.parametrize("seed", range(4 * SEEDS))
def test_of_many_equal_pages_the_second_is_named(emulator, seed):
    job = large_job(300, 1, scattered=True, rows=False, seed=seed)
    source = int(job.job[ops.SIZES + 1])  # the source list lies first, the two destination lists behind it
    pages = job.pages.clone()
    first = random.Random(seed).randrange(250)
    pages[300 + first : 600] = pages[300 + first]
    job = job.with_pages(pages)
    _, info = job.expected()
    assert source == 0 and info[:5].tolist() == [3, 0, 0, first + 1, int(pages[-301])]
    same(emulator.plan_(seed, job), job.expected())


def test_of_three_equal_pages_the_second_is_named_whichever_thread_is_first(emulator):
    job = large_job(3, 1, scattered=False, rows=False)
    job = job.with_pages(torch.tensor([0, 1, 2, 4, 4, 4, 0, 1, 2], dtype=torch.int32))
    want = job.expected()
    assert want[1][:5].tolist() == [3, 0, 0, 1, 4]
    for seed in range(800):
        same(emulator.plan_(seed, job), want)


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_too_little_room_writes_nothing(emulator, spare):
    job = large_job(200, 2, scattered=True, rows=True)
    count = int(job.expected()[1][-1])
    table, info = job.expected(count + spare)
    assert (int(info[0]) == 12) == (spare < 0)
    same(emulator.plan_(3, job, count + spare), (table, info))


def test_no_requests_give_an_empty_plan(emulator):
    job = large_job(5, 0, scattered=True, rows=False)
    same(emulator.plan_(1, job), job.expected())


def test_more_pieces_than_the_job_has_words(emulator):
    """A job lists no entries, so its length does not bound the number of pieces."""
    job = job_of(one_region(layers=130), [kvplan.Request([page], [page]) for page in range(9)])
    table, info = job.expected()
    assert info[0] == 0 and info[-1] == 9 * 130
    same(emulator.plan_(1, job), (table, info))


def test_sums_past_any_memory_are_refused(emulator):
    """2^40 pairs a run, 2^11 runs and 2^11 entries: 2^62 descriptors, of which the low 62 bits are all 0."""
    runs, indptr = torch.tensor([[0] * 2048, [0] * 2048, [1 << 40] * 2048]), torch.tensor([0, 2048])
    entries = torch.tensor([[0, 3, 0, 3, 1, 0]] * 2048)  # a descriptor a pair
    table, count = torch.full((3, 9), 99), torch.full((1,), 99)
    emulator.call("expand", 1, entries, 2048, runs, 2048, indptr, torch.ones(1, 2).long(), 1, table, 9, count)
    assert count > 1 << 40 and not table.any()


def test_one_bad_entry_of_many_is_refused(emulator):
    """Early or late, one block finds it: of every other block either all threads go on, or none."""
    runs, indptr, steps = torch.tensor([[5], [2], [3]]), torch.tensor([0, 1]), torch.ones(1, 2).long()
    for seed in range(20):
        entries = torch.tensor([[1 << 30, 8, 1 << 40, 8, 8, 0]] * 5000)
        entries[random.Random(seed).randrange(5000), 5] = 1
        table, count = torch.full((3, 9), 99), torch.full((1,), 99)
        emulator.call("expand", seed, entries, 5000, runs, 1, indptr, steps, 1, table, 9, count)
        assert count.tolist() == [-1] and not table.any()


@pytest.mark.parametrize("word", range(ops.SIZES + 2))
def test_sizes_of_another_job_are_refused(emulator, word):
    """Whichever word differs. Behind the words of the sizes: the number of segments, and the length of the tables."""
    job = large_job(5, 2, scattered=True, rows=False)
    sizes, segments, words = torch.tensor(job.sizes), job.segments, len(job.tables)
    if word < ops.SIZES:
        sizes[word] += 1
    elif word == ops.SIZES:
        segments += 1
    else:
        words -= 1
    table, untouched = job.outputs()[0], job.outputs()[0]
    info = torch.full((6 + segments * int(sizes[0]),), 77)
    emulator.call("plan", 1, job.tables, words, job.job, sizes, job.pages, False, table, table.shape[1], info, segments)
    assert info.tolist() == [13] + [0] * (len(info) - 1) and torch.equal(table, untouched)


def test_runs_without_a_group_are_refused(emulator):
    runs, none = torch.ones(3, 4).long(), torch.empty(0, 2).long()
    table, count = torch.full((3, 9), 99), torch.full((1,), 99)
    emulator.call("expand", 1, none, 0, runs, 4, torch.tensor([4]), none, 0, table, 9, count)
    assert count.tolist() == [-1] and not table.any()


@pytest.mark.parametrize(("requests", "changes"), OTHER_HEADERS, ids=str)
def test_tables_with_another_header_are_refused(emulator, requests, changes):
    job = large_job(5, requests, scattered=True, rows=False).with_header(changes)
    table, info = emulator.plan_(1, job)
    assert info.tolist() == [13] + [0] * (len(info) - 1) and torch.equal(table, job.outputs()[0])


def test_another_job_is_refused(emulator):
    job, other = large_job(5, 1, scattered=True, rows=False), large_job(6, 1, scattered=True, rows=False)
    table, info = job.outputs()
    sizes = torch.tensor(job.sizes)
    emulator.call(
        "plan", 1, job.tables, len(job.tables), other.job, sizes, job.pages, False, table, table.shape[1], info,
        job.segments,
    )  # fmt: skip
    assert info.tolist() == [13] + [0] * (len(info) - 1) and torch.equal(table, job.outputs()[0])


# ------------------------------------------------------------------------------------------------------------ stages


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("lists", [None, 1, 7, 300])
@pytest.mark.parametrize("n", stage_inputs.SIZES)
def test_runs(emulator, n, lists, seed):
    src, dst = random_pairs(n, seed)
    indptr = None if lists is None else random_cuts(n, lists, seed)
    want = ops.find_runs(src, dst, indptr)
    got = torch.full_like(want[0], 99), torch.full_like(want[1], 99)
    emulator.call("find_runs", seed, src, dst, n, indptr, len(want[1]) - 1, *got)
    same(got, want)


def test_runs_of_many_tiles(emulator):
    src, dst = random_pairs(50_000, 1)  # more tiles than a warp looks back over at once
    want = ops.find_runs(src, dst)
    got = torch.full_like(want[0], 99), torch.full_like(want[1], 99)
    emulator.call("find_runs", 2, src, dst, len(src), None, 1, *got)
    same(got, want)


@pytest.mark.parametrize("indptr", stage_inputs.MALFORMED_INDPTRS)
def test_a_malformed_indptr_is_refused(emulator, indptr):
    src, dst = random_pairs(9, 1)
    runs, cuts = torch.empty(3, 9, dtype=torch.int64), torch.empty(len(indptr), dtype=torch.int64)
    emulator.call("find_runs", 1, src, dst, 9, torch.tensor(indptr), len(indptr) - 1, runs, cuts)
    assert cuts[-1] == -1


@pytest.mark.parametrize("seed", range(2 * SEEDS))
@pytest.mark.parametrize("n", [0, 1, 40, 1024, 1500])
def test_expansion(emulator, n, seed):
    groups = 1 + seed % 3
    runs, indptr = ops.find_runs(*random_pairs(n, seed), random_cuts(n, groups, seed))
    entries, steps = random_entries(groups, seed), stage_inputs.STEPS[:groups].contiguous()
    if n > 40:
        entries = entries[:30]
    _, count = ops.expand(entries, runs, indptr, steps, 0)
    for room in (int(count), int(count) + 3, max(int(count) - 1, 0)):
        want = ops.expand(entries, runs, indptr, steps, room)
        got = torch.full_like(want[0], 99), torch.full_like(want[1], 99)
        emulator.call(
            "expand", seed, entries, len(entries), runs, runs.shape[1], indptr, steps, groups, got[0], room, got[1]
        )
        same(got, want)


@pytest.mark.parametrize("change", stage_inputs.MALFORMED_EXPANSIONS)
@pytest.mark.parametrize("many", [1, 300])
def test_malformed_expansions_are_refused(emulator, change, many):
    entries, runs, indptr, steps = stage_inputs.malformed_expansion(change, many)
    with pytest.raises(RuntimeError):
        ops.expand(entries, runs, indptr, steps, 9 * many)
    table, count = torch.full((3, 9 * many), 99), torch.full((1,), 99)
    emulator.call("expand", 1, entries, many, runs, 3, indptr, steps, 2, table, 9 * many, count)
    assert count.tolist() == [-1] and not table.any()


@pytest.mark.parametrize("seed", range(2 * SEEDS))
@pytest.mark.parametrize("size", [1, 16, 17, 64])
@pytest.mark.parametrize("length", [0, 1, 16, 100, 700])
def test_page_indices(emulator, length, size, seed):
    table, rows, lengths = stage_inputs.slot_table(length, size, seed)
    slots = table[:, :length]
    want = ops.page_indices(slots, size, rows, lengths)
    got = torch.full_like(want[0], 99), torch.full_like(want[1], 99)
    emulator.call(
        "page_indices", seed, slots, slots.dtype == torch.int64, slots.stride(0), len(slots), length, rows, lengths,
        len(want[1]), size, *got,
    )  # fmt: skip
    good = want[1] == -1
    same([got[1], got[0][good]], [want[1], want[0][good]])


@pytest.mark.parametrize(("slots", "size", "wrong"), stage_inputs.FAR_SLOTS)
def test_slots_at_the_ends_of_64_bits_do_not_follow(emulator, slots, size, wrong):
    given = torch.tensor(slots)
    pages, bad = (torch.full((1,), 99) for _ in range(2))
    emulator.call("page_indices", 1, given, True, 0, 1, size, None, None, 1, size, pages, bad)
    assert bad == wrong and ops.page_indices(given, size)[1] == wrong


# -------------------------------------------------------------------------------------------------------------- copy


@pytest.mark.parametrize("seed", range(6 * SEEDS))
def test_copies_move_each_byte_and_no_other(emulator, seed):
    draw = random.Random(seed)
    sizes = [draw.choice([0, 1, 2, 15, 16, 17, 100, 1700, 16384, 16385, 40001]) for _ in range(draw.randrange(40))]
    sizes += [draw.randrange(1 << 22)] * (seed % 3 == 0)  # so that every warp has several tiles
    copies = Copies(sizes, seed, [None, 0, 8, 4, 2, 1][seed // 3 % 6])
    emulator.call("copy", seed, copies.table(), len(sizes), None, None, 0, 0)
    copies.check()


@pytest.mark.parametrize("count", [-1, 0, 2, 3, 5])
def test_only_what_is_counted_is_copied(emulator, count):
    copies = Copies([5, 17, 0], 3)
    emulator.call("copy", 5, copies.table(spare=1), 4, torch.tensor([count]), None, 0, 0)
    copies.check(moved=count if 0 <= count <= 3 else 0)


def test_copies_follow_tensors_that_have_been_moved(emulator):
    memory = torch.arange(120, dtype=torch.uint8)
    homes = [1 << 20, 1 << 30, (1 << 63) + 16]  # read, read, written
    rows = [(homes[0] + 3, homes[2] + 1, 5), (homes[1], homes[2] + 8, 8), (memory.data_ptr(), homes[2] + 20, 4)]
    table = words(rows, 3).T.contiguous()
    now = [memory.data_ptr() + 20 * k for k in (1, 2, 4)]
    moved = words(zip(homes, (20, 20, 40), now, strict=True), 3)  # where each was, its bytes, where it is
    after = memory.clone()
    after[81:86], after[88:96], after[100:104] = memory[23:28], memory[40:48], memory[0:4]
    emulator.call("copy", 1, table, 3, None, moved, 2, 1)
    assert torch.equal(memory, after)
    table[:, 1] = words([(homes[0] + 18, homes[2] + 30, 3)], 3)  # ends behind the tensor: nothing is copied
    emulator.call("copy", 2, table, 3, None, moved, 2, 1)
    assert torch.equal(memory, after)
