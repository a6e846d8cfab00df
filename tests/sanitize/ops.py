"""The ops on words that no layout gives: refused or right, and never a step outside. Run by tests/test_sanitizers.py.

The addresses that `copy_` gets are believed. All else is not.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from fuzz.values import EDGES
from hypothesis import given
from hypothesis import strategies as st
from strategies import profile

from kvplan import ops

EDGE = st.sampled_from([edge for edge in EDGES if edge < 1 << 63]) | st.integers(-2, 9)
SIGNED = EDGE | st.sampled_from([-1 << 63, -(1 << 63) + 1, -(1 << 62)])
POSITIVE = st.sampled_from([edge for edge in EDGES if 0 < edge < 1 << 63]) | st.integers(1, 9)
# Not so many that they fit into memory barely, or not quite.
TOKENS = EDGE.filter(lambda edge: edge < 1 << 10 or edge > 1 << 41)
SMALL = st.integers(1, 4)
REFUSED = contextlib.suppress(RuntimeError, ValueError)


def words(numbers: Any) -> torch.Tensor:
    """A tensor of its own, so that what lies behind it is nobody's."""
    return torch.tensor([(number + (1 << 63)) % (1 << 64) - (1 << 63) for number in numbers], dtype=torch.int64)


@st.composite
def sides(draw: st.DrawFn) -> tuple[list[int], int]:
    """(Side of csrc/entry.h, tokens it covers but for the compression)."""
    size, rows = draw(SMALL | st.just(7)), draw(SMALL | st.sampled_from([1, 1, 1 << 59]))
    step = draw(POSITIVE | st.just(1))
    return [size, draw(st.integers(0, size - 1)), rows, draw(POSITIVE | st.just(1)), step], size * rows


@st.composite
def tables(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, list[list[int]]]:
    """(tables, spaces, segments, tokens of the pages of each space): mostly of the right form, with any numbers."""
    spaces, groups = [], []
    tokens = []
    for number in range(draw(st.integers(1, 2))):
        compression = draw(st.sampled_from([1, 1, 2, 128, 1 << 55]))
        src, src_tokens = draw(sides())
        dst, dst_tokens = draw(sides())
        groups.append([number, compression, *src, *dst])
        tokens.append([src_tokens * compression, dst_tokens * compression])
        spaces.append([draw(POSITIVE), tokens[-1][0], tokens[-1][0], draw(POSITIVE), tokens[-1][1], tokens[-1][1]])
    count = draw(st.integers(1, 4))
    entries = [
        [
            draw(SIGNED),
            draw(POSITIVE),
            draw(SIGNED),
            draw(POSITIVE),
            draw(POSITIVE),
            draw(st.integers(0, len(groups) - 1)),
        ]
        for _ in range(count)
    ]
    bounds = [0, *sorted({draw(st.integers(1, count)), count})]
    rows = [[count, len(groups), len(spaces), len(bounds) - 1], *entries, *groups, *spaces, bounds]
    flat = [word for row in rows for word in row]
    if draw(st.integers(0, 3)) == 0:
        flat[draw(st.integers(0, len(flat) - 1))] = draw(SIGNED)
    if draw(st.integers(0, 9)) == 0:
        flat = flat[: draw(st.integers(0, len(flat)))]
    return words(flat), len(spaces), len(bounds) - 1, tokens


@given(st.data())
@profile(300)
def test_plans(data):
    draw = data.draw
    made, spaces, segments, tokens = draw(tables())
    ids = draw(st.lists(st.integers(0, 9) | SIGNED, max_size=12))
    narrow = draw(st.booleans())
    pages = (words(ids) % (1 << 31)).int() if narrow else words(ids)
    windows = []
    requests = draw(st.integers(1, 3))
    for _ in range(requests):
        for space in range(spaces):
            offsets = []
            for _ in range(2):
                offset = draw(st.integers(0, len(ids)))
                offsets += [offset, draw(st.integers(0, len(ids) - offset))]
            start = draw(st.just(0) | EDGE) * draw(st.sampled_from([1, tokens[space][0]]))
            windows += [*offsets, min(start, (1 << 63) - 1), draw(st.sampled_from([-1, -1, 0]) | EDGE),
                        draw(st.sampled_from([-1, -1, -1]) | TOKENS)]  # fmt: skip
    if draw(st.integers(0, 9)) == 0:
        windows[draw(st.integers(0, len(windows) - 1))] = max(-1 << 63, draw(SIGNED))
    table = None
    with REFUSED:
        table, info = ops.plan(made, pages, windows)
    if table is None:
        with REFUSED:
            ops.prepare(made, windows, len(pages))
            raise AssertionError("prepared what cannot be planned")
        return
    job, status = ops.prepare(made, windows, len(pages))
    if status[0] != 0:
        assert torch.equal(status, info[:5]) and table.numel() == 0
        return
    room = draw(st.sampled_from([table.shape[1], table.shape[1] + 1, max(0, table.shape[1] - 1)]))
    again, told = torch.full((3, room), 5), torch.full((6 + segments * requests,), 5)
    ops.plan_(made, job, pages, job[: ops.SIZES].tolist(), again, told)
    assert told[0] == info[0] or told[0] == 12
    if told[0] == 0:
        assert torch.equal(told, info) and torch.equal(again[:, : table.shape[1]], table)
    job[draw(st.integers(ops.SIZES, len(job) - 1))] = draw(SIGNED | st.integers(0, 9))
    with REFUSED:
        ops.plan_(made, job, pages, job[: ops.SIZES].tolist(), again, told)


def test_the_last_token_there_can_be():
    last = (1 << 63) - 1  # a multiple of 7
    sides = [7, 1, 1, 1, 1, 2, 0, 1 << 61, 1, 1]
    made = words([1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 1, *sides, 1, 7, 7, 1, 1 << 62, 1 << 62, 0, 0, 0, 1])
    for start, tokens in ((last, 0), (last - 7, 7), (last - 7, -1)):
        _, info = ops.plan(made, words([0, 0, 0]), [0, 1 if tokens else 0, 1, 2, start, 0, tokens])
        assert info[0] in (0, 1, 2, 3), info


@given(st.data())
@profile(200)
def test_slots(data):
    draw = data.draw
    narrow = draw(st.booleans())
    number = st.integers(0, 40) | SIGNED
    rows, length = draw(st.integers(0, 3)), draw(st.integers(0, 9))
    flat = words(draw(st.lists(number, min_size=rows * length, max_size=rows * length)))
    slots = flat.reshape(rows, length)
    slots = slots.int() if narrow else slots
    which = draw(st.none() | st.lists(SIGNED, max_size=4).map(words))
    many = rows if which is None else len(which)
    lengths = draw(st.none() | st.lists(SIGNED, min_size=many, max_size=many).map(words))
    with REFUSED:
        ops.page_indices(slots, draw(POSITIVE | st.sampled_from([0, -1])), which, lengths)
    if rows:
        with REFUSED:
            ops.page_indices(slots[0].contiguous(), draw(POSITIVE))


def test_slots_that_follow_only_where_a_sum_wraps():
    last = (1 << 63) - 1  # a multiple of 7, so a page could begin there
    _, bad = ops.page_indices(words([last, last + 1]), 7)
    assert bad.tolist() == [1]


@given(st.data())
@profile(200)
def test_lists_of_pages(data):
    ids = words(data.draw(st.lists(st.integers(0, 9) | SIGNED, max_size=20)))
    limit = data.draw(st.integers(0, 70) | SIGNED | st.sampled_from([1 << 22, (1 << 22) + 1]))
    for pages in (ids, ids.int()):
        for distinct in (False, True):
            with REFUSED:
                ops.check_pages(pages, limit, distinct)


@given(st.data())
@profile(200)
def test_pairs(data):
    src, dst = (words(data.draw(st.lists(SIGNED, min_size=n, max_size=n))) for n in [data.draw(st.integers(0, 12))] * 2)
    cuts = data.draw(st.none() | st.lists(st.integers(0, len(src)) | SIGNED, max_size=5).map(sorted).map(words))
    with REFUSED:
        ops.find_runs(src, dst, cuts)


@given(st.data())
@profile(200)
def test_expansion(data):
    draw = data.draw
    groups = draw(st.integers(0, 2))
    count = draw(st.integers(0, 5))
    place = SIGNED
    runs = torch.stack(
        [
            words(draw(st.lists(place, min_size=count, max_size=count))),
            words(draw(st.lists(place, min_size=count, max_size=count))),
            words(draw(st.lists(st.integers(1, 9) | SIGNED, min_size=count, max_size=count))),
        ]
    )
    cuts = sorted(draw(st.lists(st.integers(0, count), min_size=groups, max_size=groups)))
    indptr = words([0, *cuts])
    steps = words(draw(st.lists(POSITIVE | st.just(1), min_size=2 * groups, max_size=2 * groups))).reshape(-1, 2)
    many = draw(st.integers(0, 4))
    entries = words(
        [word for _ in range(many) for word in (*draw(st.tuples(SIGNED, POSITIVE, SIGNED, POSITIVE, POSITIVE)),
                                                draw(st.integers(0, 2)))]
    ).reshape(-1, 6)  # fmt: skip
    with REFUSED:
        ops.expand(entries, runs, indptr, steps, draw(st.integers(0, 40)))


@given(st.data())
@profile(200)
def test_collisions(data):
    def ranges(least: int) -> torch.Tensor:
        count = data.draw(st.integers(least, 12))
        return words(data.draw(st.lists(SIGNED, min_size=2 * count, max_size=2 * count))).reshape(2, count)

    others = ranges(0)
    ordered = others[:, others[0].view(torch.uint64).numpy().argsort()].clone()
    for some in (others, ordered):
        for many in (1, 400):  # enough for bits to be set
            with REFUSED:
                ops.first_collision(ranges(11).repeat(1, many), some)


@given(st.data())
@profile(300)
def test_packing(data):
    draw = data.draw
    count = draw(st.integers(0, 600) if draw(st.integers(0, 4)) == 0 else st.integers(0, 12))
    place = draw(st.sampled_from([SIGNED, st.integers(0, 9)]))
    sizes = draw(st.sampled_from([SIGNED, st.integers(0, 9), st.just(8)]))
    rows = [draw(st.lists(number, min_size=count, max_size=count)) for number in (place, place, sizes)]
    table = torch.stack([words(row) for row in rows])
    cuts = [0, *sorted(draw(st.lists(st.integers(0, count) | SIGNED, max_size=3))), count]
    edges = words(draw(st.lists(SIGNED, max_size=4)))  # in no order
    with REFUSED:
        ops.pack(table, cuts, draw(st.booleans()), draw(POSITIVE | SIGNED), edges)


def test_copies_of_nothing():
    memory = torch.arange(8)
    at = memory.data_ptr()
    ops.copy_(words([0, at, at + 64, 0, at, at + 64, 0, 0, 0]).reshape(3, 3))
    ops.copy_(torch.empty(3, 0, dtype=torch.int64))
    assert memory.tolist() == [*range(8)]
