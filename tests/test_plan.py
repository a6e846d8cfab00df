"""Plans: arguments, refusals with their place, order, segments, chunks."""

import copy
import itertools
import pickle
import random
from types import MappingProxyType

import numpy as np
import pytest
import torch

import kvplan
from kvplan import Heads, Interleave, Layout, LayoutError, Memory, PairingError, PlanError, Region, Request, pair

SRC = Layout([Region("c4", 0, 1 << 20, 100, 16), Region("idx", 0, 1 << 24, 10, 16, memory=Memory.VRAM(0))], page_size=4)
DST = Layout(
    [
        Region("c4", 0, 1 << 30, 100, 12, space="host"),
        Region("idx", 0, 1 << 34, 10, 9, memory=Memory.VRAM(0)),
        Region("draft", 0, 1 << 35, 10, 5, space="draft"),
    ],
    page_size=4,
)
PAIRING = pair(SRC, DST)
ONE = pair(Layout([Region("kv", 0, 0, 8, 100)], page_size=4), Layout([Region("kv", 0, 1 << 20, 8, 100)], page_size=4))


def triples(plan):
    return list(zip(*plan.lists(), strict=True))


def test_two_spaces_by_their_own_page_ids():
    plan = PAIRING.plan([3, 4, 7], {"host": [0, 1, 11], "device": [8, 2, 3]})
    assert triples(plan) == [
        ((1 << 20) + 300, 1 << 30, 200),
        ((1 << 20) + 700, (1 << 30) + 1100, 100),
        ((1 << 24) + 30, (1 << 34) + 80, 10),
        ((1 << 24) + 40, (1 << 34) + 20, 10),
        ((1 << 24) + 70, (1 << 34) + 30, 10),
    ]
    assert [(str(s.src_memory), str(s.dst_memory), s.start, s.stop) for s in plan.segments] == [
        ("DRAM", "DRAM", 0, 2),
        ("VRAM:0", "VRAM:0", 2, 5),
    ]
    assert plan.total_bytes == 330 and len(plan) == 5
    assert plan.src.dtype == torch.uint64 and plan.src.data_ptr() == plan.table.data_ptr()


class OnlyDlpack:
    """What CuPy looks like from outside."""

    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **kwargs):
        return self.tensor.__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


FORMS = [
    list,
    tuple,
    np.array,
    lambda x: np.array(x, np.int32),
    lambda x: np.array(x, np.uint16),
    lambda x: np.repeat(np.array(x), 2)[::2],
    torch.tensor,
    lambda x: torch.tensor(x, dtype=torch.int32),
    lambda x: torch.tensor(x, dtype=torch.int16),
    lambda x: OnlyDlpack(torch.tensor(x)),
]


@pytest.mark.parametrize("src_form", FORMS)
@pytest.mark.parametrize("dst_form", FORMS)
def test_any_array_will_do(src_form, dst_form):
    plan = ONE.plan(src_form([5, 6, 9]), dst_form([1, 2, 3]))
    assert triples(plan) == [(40, (1 << 20) + 8, 16), (72, (1 << 20) + 24, 8)]


def test_a_read_only_array_is_read_without_a_warning(recwarn):
    pages = np.arange(3)
    pages.flags.writeable = False
    assert len(ONE.plan(pages, pages)) == 1 and not recwarn


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        ([0.5], "integers"),
        ([True], "integers"),
        ([[1]], "integers"),
        (["1"], "integers"),
        (5, "integers"),
        (None, "integers"),
        ([1 << 70], f"page id {1 << 70} at position 0 is out of range"),
        (np.array([1 << 63], np.uint64), "out of range"),
        (torch.tensor([1.0]), "integers"),
        ([[1], [1, 2]], "no list of page ids"),
    ],
)
def test_what_is_no_list_of_page_ids_is_refused(bad, text):
    with pytest.raises(PlanError, match=text):
        ONE.plan(bad, [1])
    with pytest.raises(PlanError, match=text):
        ONE.plan([1], bad)


@pytest.mark.parametrize(
    ("src", "dst", "kw", "text"),
    [
        ([3, 16], {"host": [0, 1], "device": [0, 1]}, {}, "'host': source page id 16 at position 1 is out of range.*c4.*0 to 15"),
        ([3, -1], {"host": [0, 1], "device": [0, 1]}, {}, "source page id -1 at position 1 is out of range"),
        ([3, 4], {"host": [0, 12], "device": [0, 1]}, {}, "'host': destination page id 12 at position 1 .*c4 layer 0.*0 to 11"),
        ([3, 4], {"host": [0, 11], "device": [9, 1]}, {}, "'device': destination page id 9 at position 0 .*idx layer 0.*0 to 8"),
        ([3, 4, 5], {"host": [7, 1, 7], "device": [0, 1, 2]}, {}, "'host': destination page 7 is given twice, at positions 0 and 2"),
        ([3, 4], {"host": [0, 1, 2], "device": [0, 1]}, {}, "'host': the length of the destination list is 3 .* exactly 2 "),
        ([3, 4], {"host": [0, 1], "device": []}, {}, "'device': the length of the destination list is 0"),
        ([], {"host": [0], "device": [0]}, {}, "'host': the length of the destination list is 1 .* exactly 0"),
        ([3, 4], {"host": [0, 1], "device": [0, 1]}, {"num_tokens": 4}, "length of the source list is 2 pages, but 4 tokens take 1"),
        ([3, 4], {"host": [0, 1], "device": [0, 1]}, {"num_tokens": 9}, "length of the source list is 2 pages, but 9 tokens take 3"),
        ([3], {"host": [0, 1], "device": [0, 1]}, {"src_start": 8, "dst_start": 0}, "list is 2 pages.* at least 3 .* from token 0"),
        ([3], {"host": [0, 1], "device": [0, 1]}, {"src_start": 4, "dst_start": 6}, "src_start 4 and dst_start 6 must differ by a multiple of 4"),
        ([3], {"host": [0, 1], "device": [0, 1]}, {"src_start": 2, "dst_start": 0}, "src_start 2 and dst_start 0 must differ by a multiple of 4"),
        ([3], {"host": [0]}, {}, "lacks space 'device'.*idx layer 0"),
        ([3], {"host": [0], "device": [0], "hots": [0]}, {}, "names 'hots'; .*'host', 'device', 'draft'"),
        ([3], [0], {}, "one list, but .* spaces"),
        ({"host": [0]}, {"host": [0], "device": [0]}, {}, "lacks space 'device'"),
        ({"host": [0], "x": [0]}, {"host": [0], "device": [0]}, {}, "src_pages names 'x'"),
        ([3], {"host": [0], "device": [0]}, {"src_start": -4}, "src_start is -4"),
        ([3], {"host": [0], "device": [0]}, {"src_start": 0.0}, "src_start must be an integer"),
        ([3], {"host": [0], "device": [0]}, {"num_tokens": True}, "num_tokens must be an integer"),
        ([3], {"host": [0], "device": [0]}, {"dst_start": 1 << 62}, "dst_start is 4611686018427387904"),
        ([3], {"host": [0], "device": [0]}, {"src_start": (1 << 62) - 4, "dst_start": 0}, "at least"),
    ],
)  # fmt: skip
def test_refusals_name_the_place(src, dst, kw, text):
    with pytest.raises(PlanError, match=text):
        PAIRING.plan(src, dst, **kw)


@pytest.mark.parametrize("limit", [100, 1 << 23, 1 << 40])
def test_twice_is_found_in_pools_of_any_size(limit):
    """Small pools are checked by a bitmap, large ones by sorting."""
    side = Layout([Region("kv", 0, 0, 8, limit)], page_size=4)
    pairing = pair(side, side)
    pages = np.random.default_rng(0).integers(0, limit, 40)
    pages = np.unique(pages)
    assert len(pairing.plan(pages[::-1].copy(), pages))
    pages[30] = pages[7]
    with pytest.raises(PlanError, match=f"page {pages[7]} is given twice, at positions 7 and 30"):
        pairing.plan(np.arange(len(pages)), pages)


def bytes_moved(plan):
    return {(d + k, s + k) for s, d, n in triples(plan) for k in range(n)}


def test_chunks_of_a_request_add_up_to_the_whole():
    rng = np.random.default_rng(1)
    src, dst = rng.permutation(100)[:20], rng.permutation(100)[:20]
    parts = [
        bytes_moved(ONE.plan(src[start : start + 3], dst, src_start=4 * start, dst_start=0))
        for start in range(0, 20, 3)
    ]
    assert set().union(*parts) == bytes_moved(ONE.plan(src, dst))
    assert sum(map(len, parts)) == 160


def test_positions_without_dst_start_do_not_matter():
    assert triples(ONE.plan([1, 2], [3, 4], src_start=400)) == triples(ONE.plan([1, 2], [3, 4]))


def test_the_last_partial_page_moves_whole():
    assert ONE.plan([1, 2], [3, 7], num_tokens=5).total_bytes == 16


def test_named_source_lists_are_free_of_positions():
    plan = PAIRING.plan(
        {None: [3], "device": [0, 1, 2]},
        {"host": [9, 10, 11], "device": [5, 6, 7]},
        src_start=8,
        dst_start=0,
    )
    assert triples(plan) == [((1 << 20) + 300, (1 << 30) + 1100, 100), (1 << 24, (1 << 34) + 50, 30)]
    with pytest.raises(PlanError, match="'device': the length"):
        PAIRING.plan({None: [3], "device": [0, 1, 2]}, {"host": [9], "device": [5, 6]})


def test_any_mapping_will_do():
    lists = {"host": [9], "device": [5]}
    want = triples(PAIRING.plan([3], lists))
    assert triples(PAIRING.plan(MappingProxyType({None: [3]}), MappingProxyType(lists))) == want
    with pytest.raises(PlanError, match="names 'hots'"):
        PAIRING.plan([3], MappingProxyType(lists | {"hots": [1]}))
    with pytest.raises(PlanError, match="names None"):
        PAIRING.plan([3], lists | {None: [1]})


REQUESTS = [
    Request([3, 4, 7], {"host": [0, 1, 11], "device": [8, 2, 3]}),
    Request([], {"host": [], "device": []}),
    Request([9], {"host": [5, 6, 7], "device": [4, 5, 6]}, src_start=4, dst_start=0),
    Request({None: [1], "device": [3, 4]}, {"host": [8], "device": [0, 1]}),
]


def test_a_batch_is_its_requests():
    batch = PAIRING.plan_batch(REQUESTS)
    singles = [PAIRING.plan(r.src_pages, r.dst_pages, src_start=r.src_start, dst_start=r.dst_start) for r in REQUESTS]
    for number, single in enumerate(singles):
        part = batch.request(number)
        assert triples(part) == triples(single) and part.segments == single.segments
    assert len(batch) == sum(map(len, singles)) and batch.requests == 4
    # By segment, then request.
    assert [s.dst_memory.kind for s in batch.segments] == ["DRAM", "VRAM"]
    assert batch.offsets == [[0, 2, 2, 3, 4], [4, 7, 7, 8, 9]]
    assert len(PAIRING.plan_batch([])) == 0


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (Request([16], {"host": [3], "device": [7]}), "request 4: space 'host': source page id 16 at position 0"),
        (Request([3], {"host": [3]}), "request 4: dst_pages lacks space 'device'"),
        (Request([3], {"host": [11], "device": [7]}), "request 4: .*'host'.* page 11 is given twice, at positions 2 of request 0 and 0"),
        (Request([3], {"host": [3], "device": [5]}), "request 4: .*'device'.* page 5 is given twice, at positions 1 of request 2 and 0"),
        (Request([3], {"host": [3], "device": [7, 8]}), "request 4: .*'device': the length of the destination list is 2"),
    ],
)  # fmt: skip
def test_a_batch_with_one_bad_request_is_refused_whole(bad, text):
    with pytest.raises(PlanError, match=text):
        PAIRING.plan_batch([*REQUESTS, bad])


def test_a_batch_may_name_pages_that_it_does_not_write():
    """Chunks of one request, and requests that share a prefix, give their whole destination lists."""
    chunks = [Request([k], [3, 4], 4 * k, 0) for k in range(2)]
    assert triples(ONE.plan_batch(chunks)) == triples(ONE.plan([0], [3])) + triples(ONE.plan([1], [4]))
    assert len(ONE.plan_batch([Request([0], [3, 4], 4, 0), Request([1], [3, 5], 4, 0)])) == 2
    with pytest.raises(PlanError, match="request 1: .* page 4 is given twice, at positions 1 of request 0 and 2"):
        ONE.plan_batch([Request([0], [3, 4], 4, 0), Request([1], [3, 5, 4], 8, 0)])


def test_a_run_of_two_to_the_32_rows_keeps_its_length():
    big = 1 << 32
    src = Layout([Region("kv", 0, 1 << 40, big, 1, tokens=big, row_bytes=1)], page_size=4)
    dst = Layout([Region("kv", 0, 1 << 50, big // 2, 2, tokens=big // 2, row_bytes=1)], page_size=4)
    assert pair(src, dst).plan([0], [0, 1]).nbytes.tolist() == [big]


def test_plans_that_no_memory_holds_are_refused():
    n = 2**61 + 2**19
    src = Layout([Region("kv", 0, 0, 2 * n, 1, tokens=n, row_bytes=2, heads=Heads(0, 2, 2))], page_size=4)
    dst = Layout([Region("kv", 0, 0, n, 1, tokens=n, row_bytes=1, heads=Heads(0, 1, 2))], page_size=4)
    with pytest.raises(PlanError, match="space 'device'.*kv layer 0"):
        pair(src, dst).plan([0], [0])


def test_total_bytes_is_exact():
    side = Layout([Region("kv", k, k << 62, 1 << 62, 1) for k in range(3)], page_size=4)
    assert pair(side, side).plan([0], [0]).total_bytes == 3 << 62


def test_a_batch_takes_requests():
    with pytest.raises(TypeError, match="request 0 of the batch is a tuple"):
        PAIRING.plan_batch([([3], {"host": [3], "device": [7]})])


def test_large_tables_are_used_again_but_never_while_held():
    """Results of 16 MiB and more come from blocks that are kept; a plan that lives keeps its own."""
    n = 800_000
    side = Layout([Region("kv", 0, 1 << 40, 8, n, page_stride=16)], page_size=4)
    pairing = pair(side, side)
    pages, back = np.arange(n), np.arange(n)[::-1].copy()
    first = pairing.plan(pages, pages)
    before = first.table.clone()
    second = pairing.plan(back, back)
    assert first.table.nbytes >= 16 << 20 and torch.equal(first.table, before)
    assert torch.equal(second.table.flip(1), before)
    view, address = second.src, second.table.data_ptr()
    del second
    third = pairing.plan(pages, pages)
    assert third.table.data_ptr() != address and torch.equal(view.view(torch.int64).flip(0), before[0])


def test_interleaved_sides_begin_at_a_virtual_page():
    src = Layout([Region("kv", 0, 0, 8, 100, row_bytes=2)], page_size=4)
    dst = Layout([Region("kv", 0, 1 << 20, 8, 100, tokens=8, row_bytes=2, interleave=Interleave(2, 1))], page_size=4)
    pairing = pair(src, dst)
    with pytest.raises(PlanError, match="dst_start 4 must be a multiple of 8 tokens, the virtual page"):
        pairing.plan([1], {"device": [1]}, src_start=4)
    assert triples(pairing.plan([1], {"device": [1]}, src_start=4, dst_start=0)) == [
        (8 + 2, (1 << 20) + 8 + 4, 2),
        (8 + 6, (1 << 20) + 8 + 6, 2),
    ]


def test_chunks_stay_within_segments():
    plan = PAIRING.plan([3, 5, 7], {"host": [0, 2, 4], "device": [8, 2, 4]})
    parts = list(plan.chunks(2))
    assert [len(part) for part in parts] == [2, 1, 2, 1]
    assert sum((triples(part) for part in parts), []) == triples(plan)
    assert [str(part.segments[0].dst_memory) for part in parts] == ["DRAM", "DRAM", "VRAM:0", "VRAM:0"]
    assert all(part.dst_layout is DST for part in parts)
    with pytest.raises(ValueError, match="at least 1"):
        list(plan.chunks(0))


def test_addresses_past_bit_63_stay_unsigned():
    high = (1 << 64) - 800
    pairing = pair(Layout([Region("kv", 0, high, 8, 100)], page_size=4), ONE.dst)
    plan = pairing.plan([99], [0])
    assert plan.src.tolist() == [(1 << 64) - 8] and plan.lists()[0] == [(1 << 64) - 8]


def test_an_empty_request_is_an_empty_plan():
    plan = PAIRING.plan([], {"host": [], "device": []})
    assert len(plan) == 0 and plan.total_bytes == 0 and plan.segments == () and list(plan.chunks(5)) == []
    assert plan.lists() == ([], [], [])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda t, w: (t[:3], w),
        lambda t, w: (t[:-1].clone(), w),
        lambda t, w: (t.index_fill(0, torch.tensor([0]), 1 << 60), w),
        lambda t, w: (t.index_fill(0, torch.tensor([1]), -1), w),
        lambda t, w: (t.index_fill(0, torch.tensor([9]), 7), w),  # group of the first entry
        lambda t, w: (t.to(torch.int32), w),
        lambda t, w: (t, w[:-1]),
        lambda t, w: (t, [99, *w[1:]]),
        lambda t, w: (t, [0, 99, *w[2:]]),
        lambda t, w: (t, [0, 1, 1, -1, *w[4:]]),
        lambda t, w: (t, [*w[:4], -5, *w[5:]]),
    ],
)
def test_the_op_itself_never_reads_beyond_what_it_is_given(spoil):
    tables, windows = spoil(ONE.tables, [0, 1, 1, 1, 0, -1, -1])
    with pytest.raises(RuntimeError):
        torch.ops.kvplan.plan(tables, torch.tensor([1, 2]), windows)


@pytest.mark.parametrize("side", ["src", "dst"])
def test_strides_past_32_bits(side):
    """Indices alone are small: the product is what must not be cut."""
    strides = {"src": 64, "dst": 64, side: (5 << 32) + 64}
    layouts = [
        Layout([Region("kv", 0, base, 64, 9, page_stride=strides[name])], page_size=4)
        for name, base in (("src", 1 << 40), ("dst", 1 << 50))
    ]
    src, dst, nbytes = pair(*layouts).plan([7, 2], [1, 8]).lists()
    assert src == [(1 << 40) + page * strides["src"] for page in (7, 2)]
    assert dst == [(1 << 50) + page * strides["dst"] for page in (1, 8)] and nbytes == [64, 64]


@pytest.mark.parametrize(("pages", "layers"), [((1 << 40) + 1, 1), ((1 << 39) + 1, 2)])
def test_more_descriptors_than_any_memory_holds_are_refused(pages, layers):
    layout = Layout([Region("kv", k, 1 << 20, 1, 1 << 42, page_stride=2) for k in range(layers)], page_size=1)
    other = Layout(
        [Region("kv", k, (1 << 50) + k * (1 << 45), 1, 1 << 42, page_stride=2) for k in range(layers)], page_size=1
    )
    _, status = kvplan.ops.prepare(pair(layout, other).tables, [0, pages, 0, pages, 0, -1, -1], pages)
    assert status[0] == 11


def test_the_cause_is_named_and_not_what_follows_from_it():
    layouts = [Layout([Region("kv", 0, base, 64, 99)], page_size=64) for base in (1 << 20, 1 << 30)]
    made = pair(*layouts)
    for dst_pages in ([4, 5, 6], [4, 5, 6, 7]):
        with pytest.raises(
            PlanError, match="start is not aligned: src_start 100 and dst_start 0 must differ by a mult.* 64"
        ):
            made.plan([1, 2], dst_pages, src_start=100, dst_start=0)
    with pytest.raises(PlanError, match="is 3 pages, .* exactly 2 pages .* pass dst_start=0"):
        made.plan([1, 2], [4, 5, 6], src_start=64)
    with pytest.raises(PlanError, match="is 1 pages, but .* exactly 2 pages .*0\\)$"):
        made.plan([1, 2], [4])
    with pytest.raises(LayoutError, match=r"heads must be a Heads\(start, stop, total\), not 8"):
        Region("kv", 0, 0, 64, 8, heads=8)


@pytest.mark.parametrize(
    ("here", "there"), [(65521, 65535), (65535, 65521), (65535, 65535), (32768, 65534), (1, 65535)]
)
def test_shares_of_any_two_interleaves_meet_where_arithmetic_says(here, there):
    """Sizes that a peer chooses: by arithmetic, for a search would take as many steps as they are large."""
    draw = random.Random(here * there)
    for _ in range(20):
        ranks = draw.randrange(here), draw.randrange(there)
        sides = [
            Layout(
                [Region("kv", 0, 1 << (40 + 4 * k), 64, 1 << 20, row_bytes=64, interleave=Interleave(size, rank))],
                page_size=size,
            )
            for k, (size, rank) in enumerate(zip((here, there), ranks, strict=True))
        ]
        many = 70_000
        plan = pair(*sides).plan(np.arange(many), np.arange(-(-many * here // there)))
        # A position q is held by both iff it leaves each rank modulo each size. Page p of a rank is its row p.
        meet = [q for q in range(ranks[0], many * here, here) if q % there == ranks[1]]
        got = [
            ((src - (1 << 40)) // 64, (dst - (1 << 44)) // 64, nbytes // 64)
            for src, dst, nbytes in plan.table.T.tolist()
        ]
        rows = [(src + k, dst + k) for src, dst, count in got for k in range(count)]
        assert rows == [(q // here, q // there) for q in meet]


def test_names_that_a_peer_chose_stay_short_in_messages():
    """A name has up to 256 characters of any script, and a peer may declare 65,536 regions, each with a space."""
    many = 300

    def layout(base, space, pages=10, tokens=4):
        regions = [
            Region(chr(0x4E00 + k) * 256, k, base + (k << 12), 64, pages, space=space(k), tokens=tokens)
            for k in range(many)
        ]
        return Layout(regions, page_size=tokens)

    src, dst = layout(1 << 40, lambda k: "s"), layout(1 << 44, lambda k: chr(0x5E00 + k) * 256)
    made = pair(src, dst)
    lists = {space: [1] for space in dst.spaces}
    mixed = layout(1 << 48, lambda k: str(k % 2) * 256)
    for refused in (
        lambda: made.plan([1], [1]),
        lambda: made.plan([1], {}),
        lambda: made.plan([1], {**lists, "x" * 10_000: [1]}),
        lambda: made.plan([99], lists),
        lambda: made.plan([1], {**lists, dst.spaces[0]: [1, 2]}),
        lambda: made.plan([1], {**lists, dst.spaces[7]: [None]}),
        lambda: made.plan({space: [1] for space in dst.spaces[1:]}, lists),
        lambda: pair(mixed, dst).plan([1], lists),
        lambda: pair(mixed, layout(1 << 52, lambda k: "one")),
        lambda: pair(src, layout(1 << 52, lambda k: "one", tokens=8)),
        lambda: pair(src, Layout(dst.regions[1:], page_size=4)),
        lambda: Layout([*src.regions, src.regions[0]], page_size=4),
        lambda: Region("n" * 256, 0, -1, 64, 1),
        lambda: Layout([Region("n" * 256, 0, 0, 64, 1, tokens=5, rows=2)], page_size=4),
    ):
        with pytest.raises((PlanError, PairingError, LayoutError)) as error:
            refused()
        text = str(error.value)
        assert len(text) < 2500 and text.isascii(), text
        assert max(len(part) for part in text.replace("\\u", " ").split()) < 100
    for told in (repr(made), repr(dst), repr(src)):
        assert len(told) < 3000 and told.isascii()


def test_lists_in_pieces_are_the_lists() -> None:
    rng = np.random.default_rng(5)
    for count, lengths in ((0, [1]), (3, [7]), (500, [4]), (500, [4, 9]), (500, range(1, 400))):
        nbytes = np.sort(rng.choice(np.array(lengths), count)) if count else np.empty(0, np.int64)
        table = torch.from_numpy(
            np.stack([rng.integers(-(1 << 63), 1 << 63, count), rng.integers(0, 1 << 63, count), nbytes])
        )
        plan = kvplan.Plan(table, ())
        src, dst, sizes = plan.lists()
        assert (src, dst, sizes) == tuple(column.numpy().view(np.uint64).tolist() for column in table)
        for most in (1, 64, 499, 1000):
            pieces = list(plan.pieces(most))
            assert [sum((piece[k] for piece in pieces), []) for k in range(3)] == [src, dst, sizes]
            assert all(0 < len(piece[0]) <= most for piece in pieces)
    with pytest.raises(ValueError, match="most is 0"):
        next(plan.pieces(0))


def test_a_plan_is_cut_by_entries() -> None:
    src = kvplan.Layout([kvplan.Region("a", 0, 1 << 20, 64, 32), kvplan.Region("b", 0, 2 << 20, 96, 32),
                         kvplan.Region("a", 1, 3 << 20, 64, 32)], page_size=4)  # fmt: skip
    dst = kvplan.Layout([kvplan.Region("a", 0, 1 << 30, 64, 32, space="host"), kvplan.Region("b", 0, 2 << 30, 96, 32),
                         kvplan.Region("a", 1, 3 << 30, 64, 32, page_stride=128)], page_size=4)  # fmt: skip
    pairing = kvplan.pair(src, dst)
    host, device = [3, 4, 5, 9], [7, 8, 1, 2]
    plan = pairing.plan([0, 1, 2, 3], {"host": host, "device": device})
    cuts = plan.entry_cuts()
    for number, (start, stop) in enumerate(itertools.pairwise(cuts)):
        ((source, destination),) = pairing.regions[number]
        moved = plan.table[:, start:stop]
        assert int(moved[2].sum()) == 4 * source.page_bytes
        assert all(0 <= address - destination.base < destination.span_bytes for address in moved[1].tolist())
    assert cuts[-1] == len(plan) == 2 + 2 + 4
    with pytest.raises(ValueError, match="cut by entries"):
        kvplan.Plan(plan.table, plan.segments).entry_cuts()
    assert pairing.plan([], {"host": [], "device": []}).entry_cuts() == [0, 0, 0, 0]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copied_pairing_plans_what_it_is_given(copied):
    """Also after it has planned: memory that it keeps for page ids must not be shared, or be half a copy."""
    layouts = [Layout([Region("kv", 0, base, 64, 99)], page_size=4) for base in (1 << 20, 1 << 30)]
    made = pair(*layouts)
    first = made.plan([1, 3, 5], [1, 3, 5]).table.clone()
    other = copied(made)
    want = pair(*layouts).plan([7, 9, 11], [20, 22, 24]).table
    for one in (other, made, other):
        assert torch.equal(one.plan([7, 9, 11], [20, 22, 24]).table, want)
        assert torch.equal(one.plan([1, 3, 5], [1, 3, 5]).table, first)
        with pytest.raises(PlanError, match="page id 99 at position 1"):
            one.plan([1, 99, 5], [1, 3, 5])
