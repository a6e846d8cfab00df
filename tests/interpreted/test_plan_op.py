"""plan_: writes what the C++ op writes, to the bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from jobs import OTHER_HEADERS, Job, job_of, jobs, large_job, one_region, shared_job
from stage_inputs import same

import kvplan
from kvplan import ops, triton_kernels


def planned(job: Job, room: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    table, info = job.outputs(room)
    triton_kernels.plan_(job.tables, job.job, job.pages, job.sizes, table, info)
    return table, info


def check(job: Job, room: int | None = None) -> int:
    """The status of a plan, which must equal that of the C++ op, the words that neither writes included."""
    found = planned(job, room)
    same(found, job.expected(room))
    return int(found[1][0])


@given(jobs())
def test_any_job(job):
    assert check(job) == 0


@given(jobs(), st.data())
def test_bad_ids(job, data):
    pages = job.pages.clone()
    for _ in range(data.draw(st.integers(1, 3)) if len(pages) else 0):
        place = data.draw(st.integers(0, len(pages) - 1))
        other = data.draw(st.integers(0, len(pages) - 1))
        pages[place] = data.draw(st.sampled_from([-1, 1 << 30, -(1 << 31), int(pages[other]), int(pages[place - 1])]))
    check(job.with_pages(pages))


@given(jobs(), st.integers(0, 3))
def test_room(job, missing):
    _, info = job.expected()
    total = int(info[-1])
    room = max(total - missing, 0)
    assert check(job, room) == (12 if room < total else 0)


@pytest.mark.parametrize("narrow", [True, False])
@pytest.mark.parametrize(
    ("pages", "requests", "scattered", "rows"),
    [(341, 1, False, True), (342, 1, True, False), (130, 3, True, True), (1025, 1, True, True)],
)
def test_more_than_one_tile(pages, requests, scattered, rows, narrow):
    job = large_job(pages, requests, scattered=scattered, rows=rows, narrow=narrow)
    assert check(job) == 0
    pages = job.pages.clone()
    pages[-1] = pages[-2]
    assert check(job.with_pages(pages)) == 3
    assert check(job, int(job.expected()[1][-1]) - 1) == 12


@pytest.mark.parametrize("twice", [(0, 1), (3, 900), (511, 512), (1, 1279)])
def test_a_page_given_twice_in_a_long_list(twice):
    job = large_job(1280, 1, scattered=True, rows=False)
    pages, (first, second) = job.pages.clone(), twice
    pages[-1280 + second] = pages[-1280 + first]
    pages[-1280 + 1279] = pages[-1280 + first]
    assert check(job.with_pages(pages)) == 3
    assert planned(job.with_pages(pages))[1][3] == second


def test_two_requests_write_one_page():
    pairing = one_region(layers=2)
    job = job_of(pairing, [kvplan.Request([1, 2], [5, 6]), kvplan.Request([3, 4], [7, 5])])
    assert check(job) == 3
    # Pages of a shared prefix that neither writes now are no conflict.
    chunks = [kvplan.Request([k], [5, 6 + k], src_start=1, dst_start=0) for k in range(3)]
    assert check(job_of(pairing, chunks)) == 0
    chunks.append(kvplan.Request([0], [9, 7], src_start=1, dst_start=0))
    assert check(job_of(pairing, chunks)) == 3


@pytest.mark.parametrize("requests", [1, 2])
@pytest.mark.parametrize("narrow", [False, True])
def test_two_spaces_write_one_page(requests, narrow):
    assert check(shared_job(None, requests, 40, narrow)) == 0
    for twice in ((0, 0), (39, 7), (5, 39)):
        job = shared_job(twice, requests, 40, narrow)
        assert check(job) == 3
        assert planned(job)[1][:4].tolist() == [3, requests - 1, 1, twice[1]]


def test_more_pieces_than_a_tile():
    job = job_of(one_region(layers=130), [kvplan.Request([k], [k]) for k in range(9)])
    assert check(job) == 0


def test_nothing_to_do():
    pairing = one_region()
    assert check(job_of(pairing, [])) == 0
    assert check(job_of(pairing, [kvplan.Request([], [])] * 3)) == 0


def check_refused(job: Job) -> None:
    """The status is 13, the job does not belong to the sizes and tables, and nothing else is written."""
    table, info = planned(job)
    assert info.tolist() == [13] + [0] * (len(info) - 1)
    same([table], [job.outputs()[0]])


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("word", range(ops.SIZES))
def test_a_job_of_other_sizes_is_refused(word, change):
    job = large_job(5, 2, scattered=True, rows=False)
    words = job.job.clone()
    words[word] += change
    check_refused(replace(job, job=words))


def test_tables_of_another_length_are_refused():
    job = large_job(5, 2, scattered=True, rows=False)
    for tables in (one_region(layers=3).tables, job.tables[:-1], job.tables[:4]):
        check_refused(replace(job, tables=tables.clone()))


@pytest.mark.parametrize(("requests", "changes"), OTHER_HEADERS, ids=str)
def test_tables_with_another_header_are_refused(requests, changes):
    check_refused(large_job(5, requests, scattered=True, rows=False).with_header(changes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sizes": [1, 2, 3]}, "sizes must be the first 9"),
        ({"sizes": [-1] * 9}, "not those of a job"),
        ({"pages": torch.zeros(3, dtype=torch.int64)}, "do not belong together"),
        ({"pages": torch.zeros(2, dtype=torch.float32)}, "int32 or int64"),
        ({"table": torch.zeros(2, 5, dtype=torch.int64)}, "table must be"),
        ({"table": torch.zeros(3, 5, dtype=torch.int32)}, "table must be a contiguous int64"),
        ({"info": torch.zeros(5, dtype=torch.int64)}, "info must have"),
        ({"tables": torch.zeros(3, dtype=torch.int64)}, "do not belong together"),
        ({"job": torch.zeros(3, dtype=torch.int64)}, "do not belong together"),
    ],
)
def test_refusals(change, words):
    job = job_of(one_region(), [kvplan.Request([1], [5])])
    table, info = job.outputs()
    given = {"tables": job.tables, "job": job.job, "pages": job.pages, "sizes": job.sizes, "table": table, "info": info}
    with pytest.raises(RuntimeError, match=words):
        triton_kernels.plan_(**{**given, **change})
