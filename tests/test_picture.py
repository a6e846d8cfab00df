"""What the picture of a plan draws: runs of pages, however many descriptors a page is."""

import kvplan
from kvplan import Heads, Layout
from kvplan.inspect import picture

SRC, DST = [3, 4, 5, 6, 12, 1], [40, 41, 42, 44, 45, 7]
RUNS = [[3, 6, 40, 43], [6, 7, 44, 45], [12, 13, 45, 46], [1, 2, 7, 8]]


def runs_of(src: Layout, dst: Layout) -> tuple[list[list[int]], int]:
    pairing = kvplan.pair(src, dst)
    source, destination, (here, there, nbytes) = picture._one_region(pairing, pairing.plan(SRC, DST), "device")
    runs = picture._runs(picture._pages(here, nbytes, source), picture._pages(there, nbytes, destination))
    return runs.tolist(), len(here)


def heads(base: int, *held: int) -> Layout:
    return Layout.mha(base, layers=1, num_pages=64, heads=Heads(*held), page_size=4, head_bytes=16)


def test_whole_pages():
    assert runs_of(heads(1 << 30, 0, 4, 8), heads(1 << 40, 0, 4, 8)) == (RUNS, 4)


def test_a_slice_of_heads_is_drawn_as_the_pages_that_it_lies_in():
    assert runs_of(heads(1 << 30, 0, 4, 8), heads(1 << 40, 2, 4, 8)) == (RUNS, 4 * len(SRC))
