"""Every op on a GPU against the C++ op, to the bit."""

from __future__ import annotations

import random

import pytest
import stage_inputs
import torch
from hypothesis import given
from jobs import OTHER_HEADERS, job_of, jobs, large_job, one_region, shared_job
from on_device import BIG_SIZES, DRY, PLACES, Copies, finish, needs_device, needs_gpu, planned, there
from stage_inputs import random_cuts, random_entries, random_pairs, same
from strategies import profile

import kvplan
from kvplan import ops

pytestmark = [pytest.mark.gpu, needs_device]

# ------------------------------------------------------------------------------------------------------------- plans


@given(job=jobs())
@profile(150)
def test_plans_of_clusters(job):
    same(planned(job), job.expected())


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize("pages", [1, 127, 128, 129, 700, 20_000])
def test_plans_of_many_pages(pages, scattered, rows):
    for narrow in (False, True):
        job = large_job(pages, 1, scattered=scattered, rows=rows, seed=pages, narrow=narrow)
        same(planned(job), job.expected())


@pytest.mark.parametrize(("requests", "pages"), [(2, 300), (40, 9), (300, 1), (64, 1000)])
@pytest.mark.parametrize("rows", [False, True])
def test_batches(requests, pages, rows):
    job = large_job(pages, requests, scattered=True, rows=rows, seed=requests)
    same(planned(job), job.expected())


def test_the_same_again_and_again():
    """A race shows only in some of many runs."""
    job = large_job(3000, 4, scattered=True, rows=True)
    want = job.expected()
    for _ in range(2 if DRY else 200):
        same(planned(job), want)


def test_into_pinned_memory():
    for job in (large_job(700, 2, scattered=True, rows=True), large_job(1, 1, scattered=False, rows=False)):
        same(planned(job, pinned_table=True), job.expected())


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("twice", [None, (0, 0), (299, 7), (5, 299)])
def test_two_spaces_write_one_page(requests, twice):
    job = shared_job(twice, requests)
    table, info = planned(job)
    assert info[:4].tolist() == ([0, 0, 0, 0] if twice is None else [3, requests - 1, 1, twice[1]])
    same((table, info), job.expected())


@pytest.mark.parametrize("seed", range(30))
def test_the_first_bad_page_is_named_and_nothing_is_written(seed):
    job = large_job(60 if seed % 2 else 3000, 4, scattered=True, rows=False, seed=seed, narrow=False)
    draw = random.Random(seed)
    pages = job.pages.clone()
    for _ in range(draw.randrange(1, 6)):
        place = draw.randrange(len(pages))
        pages[place] = draw.choice([-1, 1 << 40, int(pages[draw.randrange(len(pages))])])
    job = job.with_pages(pages)
    table, info = job.expected()
    assert info[0] == 0 or torch.equal(table, job.outputs()[0])
    same(planned(job), (table, info))


@pytest.mark.parametrize("spare", [-1, 0, 1])
def test_too_little_room_writes_nothing(spare):
    job = large_job(200, 2, scattered=True, rows=True)
    count = int(job.expected()[1][-1])
    table, info = job.expected(count + spare)
    assert (int(info[0]) == 12) == (spare < 0)
    same(planned(job, count + spare), (table, info))


def test_another_job_is_refused():
    job, other = large_job(5, 1, scattered=True, rows=False), large_job(6, 1, scattered=True, rows=False)
    if DRY:
        return  # the CPU reads the job itself
    job.job = other.job
    table, info = planned(job)
    assert info.tolist() == [13] + [0] * (len(info) - 1)
    same([table], [job.outputs()[0]])


@needs_gpu
@pytest.mark.parametrize(("requests", "changes"), OTHER_HEADERS, ids=str)
def test_tables_with_another_header_are_refused(requests, changes):
    job = large_job(5, requests, scattered=True, rows=False).with_header(changes)
    table, info = planned(job)
    assert info.tolist() == [13] + [0] * (len(info) - 1)
    same([table], [job.outputs()[0]])


def test_nothing_to_do():
    for pairing in (one_region(), one_region(layers=3)):
        for requests in ([], [kvplan.Request([], [])], [kvplan.Request([], [])] * 3):
            job = job_of(pairing, requests)
            if not requests:
                job.pages = torch.empty(0, dtype=torch.int64)
            same(planned(job), job.expected())


# ------------------------------------------------------------------------------------------------------ page_indices


@pytest.mark.parametrize("size", [1, 16, 17, 64])
@pytest.mark.parametrize("length", [0, 1, 16, 100, 700])
def test_page_indices(length, size):
    for seed in range(6):
        slots, rows, lengths = stage_inputs.slot_table(length, size, seed)
        want = ops.page_indices(slots[:, :length], size, rows, lengths)
        got = ops.page_indices(there(slots)[:, :length], size, there(rows), there(lengths))
        good = want[1] == -1
        same([got[1], got[0].cpu()[good]], [want[1], want[0][good]])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("n", [0, 1, 63, 64, 65, 5000, 300_000])
def test_slots_of_one_request(n, dtype):
    slots = torch.arange(n, dtype=dtype) + 64 * 3
    same(ops.page_indices(there(slots), 64), ops.page_indices(slots, 64))
    for broken in stage_inputs.broken_slots(slots):
        bad = ops.page_indices(there(broken), 64)[1]
        same([bad], [ops.page_indices(broken, 64)[1]])
        assert bad >= 0


@pytest.mark.parametrize(("slots", "size", "wrong"), stage_inputs.FAR_SLOTS)
def test_slots_at_the_ends_of_64_bits_do_not_follow(slots, size, wrong):
    assert ops.page_indices(there(torch.tensor(slots)), size)[1] == wrong


def test_a_large_token_table():
    """SGLang's req_to_token: many rows, of which a batch takes some in any order."""
    table = (torch.randperm(64 * 512).reshape(64, 512, 1) * 16 + torch.arange(16)).reshape(64, -1).to(torch.int32)
    rows = torch.randperm(64)[:40]
    lengths = torch.randint(0, table.shape[1] + 1, (40,))
    want = ops.page_indices(table, 16, rows, lengths)
    same(ops.page_indices(there(table), 16, there(rows), there(lengths)), want)


# --------------------------------------------------------------------------------------------------------- find_runs


@pytest.mark.parametrize("lists", [None, 1, 7, 300])
@pytest.mark.parametrize("n", stage_inputs.SIZES + BIG_SIZES)
def test_runs(n, lists):
    for seed in range(3 if n < 10_000 else 1):
        src, dst = random_pairs(n, seed)
        indptr = None if lists is None else random_cuts(n, lists, seed)
        same(ops.find_runs(there(src), there(dst), there(indptr)), ops.find_runs(src, dst, indptr))


@needs_gpu
@pytest.mark.parametrize("indptr", stage_inputs.MALFORMED_INDPTRS)
def test_a_malformed_indptr_is_refused(indptr):
    src, dst = random_pairs(9, 1)
    _, cuts = ops.find_runs(there(src), there(dst), there(torch.tensor(indptr)))
    assert cuts[-1] == -1


# ------------------------------------------------------------------------------------------------------------ expand


@pytest.mark.parametrize("n", [0, 1, 40, 1024, 1500, 100_000])
def test_expansion(n):
    for seed in range(6):
        groups = 1 + seed % 3
        runs, indptr = ops.find_runs(*random_pairs(n, seed), random_cuts(n, groups, seed))
        table, steps = random_entries(groups, seed), stage_inputs.STEPS[:groups].contiguous()
        if n > 40:
            table = table[:30]
        args = (table, runs, indptr, steps)
        _, count = ops.expand(*args, 0)
        for room in (int(count), int(count) + 3, max(int(count) - 1, 0)):
            same(ops.expand(*map(there, args), room), ops.expand(*args, room))


def test_runs_go_into_expansion_as_they_are():
    src, dst = random_pairs(50_000, 4)
    cuts, steps = random_cuts(50_000, 3, 4), torch.ones(3, 2, dtype=torch.int64)
    table = torch.tensor([[k << 50, 8, (k + 9) << 50, 8, 8, k % 3] for k in range(9)])
    capacity = 9 * 50_000
    want = ops.expand(table, *ops.find_runs(src, dst, cuts), steps, capacity)
    runs = ops.find_runs(there(src), there(dst), there(cuts))
    same(ops.expand(there(table), *runs, there(steps), capacity), want)


@needs_gpu
@pytest.mark.parametrize("many", [1, 3000])  # in the first tile of entries, or one among many
@pytest.mark.parametrize("change", stage_inputs.MALFORMED_EXPANSIONS)
def test_malformed_expansions_are_refused(change, many):
    args = stage_inputs.malformed_expansion(change, many)
    with pytest.raises(RuntimeError):
        ops.expand(*args, 9 * many)
    for _ in range(20):  # blocks begin at other times
        table, count = ops.expand(*map(there, args), 9 * many)
        assert count == -1 and not table.any()


# -------------------------------------------------------------------------------------------------------------- copy


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("seed", range(12))
def test_copies_move_each_byte_and_no_other(seed, where):
    draw = random.Random(seed)
    many = draw.choice([0, 1, 9, 60, 400])
    sizes = [draw.choice([0, 1, 2, 15, 16, 17, 100, 1700, 16384, 16385, 40001]) for _ in range(many)]
    copies = Copies(sizes, seed, where)
    ops.copy_(copies.table(), read=[copies.src], written=[copies.dst])
    copies.check()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("apart", [0, 8, 4, 2, 1, 12, 6, 15])
def test_copies_of_every_width(apart, where):
    copies = Copies([1, 7, 16, 33, 512, 2048, 16384, 16385, 5000, 50_000], apart, where, apart)
    ops.copy_(copies.table())
    copies.check()


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("size", [1_728, 4_096, 8_448, 18_432, 37_440])
def test_copies_of_pages(size, where):
    for apart in (0, 3):
        copies = Copies([size] * 300, size, where, apart)
        ops.copy_(copies.table())
        copies.check()


def test_one_large_copy_among_small_ones():
    copies = Copies([*range(200), 30_000_000, *range(200)], 1, PLACES[0])
    ops.copy_(copies.table())
    copies.check()


@pytest.mark.parametrize("count", [-1, 0, 3, 4, 8])
def test_only_what_is_counted_is_copied(count):
    copies = Copies([5, 17, 0, 30], 3, PLACES[0])
    if DRY and not 0 <= count <= 7:
        pytest.skip("the CPU raises")
    ops.copy_(copies.table(spare=3), there(torch.tensor([count])))
    copies.check(moved=count if 0 <= count <= 7 else 0)


@needs_gpu
def test_tensors_elsewhere_are_refused():
    job = large_job(5, 1, scattered=True, rows=False)
    table, info = job.outputs()
    given = [job.tables, job.job, job.pages]
    for lacking in range(2):  # where the page ids are decides
        moved = [tensor if number == lacking else there(tensor) for number, tensor in enumerate(given)]
        with pytest.raises(RuntimeError, match="must be on"):
            ops.plan_(*moved, job.sizes, there(table), there(info))
    with pytest.raises(RuntimeError, match="pinned"):
        ops.plan_(*map(there, given), job.sizes, table, there(info))
    with pytest.raises(RuntimeError, match="must be on"):
        ops.find_runs(there(torch.arange(3)), torch.arange(3))
    finish()
