"""Pools as serving stacks have them, real bytes moved: orders of axes, planes, packed rows, slots, runs of tokens."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest
import torch

import kvplan
from kvplan import Heads, Interleave, Layout, LayoutError, PairingError, PlanError, Region, pair

# vLLM's names: L layers, B blocks (pages), H heads, N tokens of a block, C what one head of one token holds.
ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "LHBNC", "BHLNC")
LAYERS, C, TOKENS = 2, 3, 96
# Ranks of each side, and KV heads in all: more ranks than heads hold copies.
SPLITS = ((1, 8, 8), (2, 4, 8), (4, 2, 8), (4, 16, 4), (1, 1, 4))
BLOCKS = ((32, 32), (32, 64), (64, 32), (8, 12))


def cache(order: str, blocks: int, heads: int, tokens: int, filled: bool = False) -> torch.Tensor:
    """A pool, seen as [L, B, H, N, C], whose memory has the axes in this order."""
    sizes = {"L": LAYERS, "B": blocks, "H": heads, "N": tokens, "C": C}
    pool = torch.zeros([sizes[axis] for axis in order], dtype=torch.int32)
    if filled:
        pool += torch.arange(1, pool.numel() + 1, dtype=torch.int32).reshape(pool.shape)
    return pool.permute([order.index(axis) for axis in "LBHNC"])


def layout(pool: torch.Tensor, heads: Heads, replica: tuple[int, int] = (0, 1)) -> Layout:
    regions = [
        Region.from_tensor(pool[layer], "kv", layer, axes="pages heads tokens content", heads=heads)
        for layer in range(LAYERS)
    ]
    return Layout(regions, page_size=pool.shape[3], replica=replica)


def held(rank: int, ranks: int, total: int) -> Heads:
    each = max(total // ranks, 1)
    first = rank * total // ranks
    return Heads(first, first + each, total)


@pytest.mark.parametrize("blocks", BLOCKS, ids=lambda blocks: "{}-{}".format(*blocks))
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: "{}-{}".format(*split))
@pytest.mark.parametrize(("src_order", "dst_order"), [*itertools.product(ORDERS, ORDERS)])
def test_any_order_to_any_order(src_order, dst_order, split, blocks):
    src_ranks, dst_ranks, total = split
    rng = np.random.default_rng(0)
    counts = [-(-TOKENS // size) for size in blocks]
    src_pages, dst_pages = (rng.permutation(count + 3)[:count] for count in counts)
    copies = max(src_ranks // total, 1)
    sources, layouts, whole = [], [], torch.zeros(LAYERS, total, TOKENS, C, dtype=torch.int32)
    for rank in range(src_ranks):
        heads = held(rank, src_ranks, total)
        pool = cache(src_order, counts[0] + 3, heads.stop - heads.start, blocks[0], filled=True)
        pool += 1_000_000 * (heads.start + 1)
        sources.append(pool)
        layouts.append(layout(pool, heads, (rank % copies, copies)))
        rows = pool[:, src_pages].transpose(1, 2).flatten(2, 3)[:, :, :TOKENS]
        whole[:, heads.start : heads.stop] = rows
    for rank in range(dst_ranks):
        heads = held(rank, dst_ranks, total)
        pool = cache(dst_order, counts[1] + 3, heads.stop - heads.start, blocks[1])
        for source in layouts:
            kvplan.execute(pair(source, layout(pool, heads)).plan(src_pages, dst_pages, num_tokens=TOKENS))
        rows = pool[:, dst_pages].transpose(1, 2).flatten(2, 3)[:, :, :TOKENS]
        assert torch.equal(rows, whole[:, heads.start : heads.stop])
        others = [page for page in range(pool.shape[1]) if page not in dst_pages]
        assert not pool[:, others].any()


def test_a_slice_of_heads_of_a_head_major_page_is_one_descriptor():
    """Report 01: padded pages [heads, tokens, bytes], one rank to eight with four heads."""
    pages, heads, tokens, head_bytes, pad = 6, 4, 4, 8, 16
    source = torch.randint(1, 255, (pages, heads * tokens * head_bytes + pad), dtype=torch.uint8)
    view = source[:, :-pad].unflatten(1, (heads, tokens, head_bytes))
    plain = {"rows": tokens, "row_bytes": heads * head_bytes, "order": "HND", "heads": Heads(0, heads, heads)}
    page = heads * tokens * head_bytes
    src = Layout([Region("k", 0, source.data_ptr(), page, pages, page_stride=page + pad, **plain)], page_size=tokens)
    assert src == Layout([Region.from_tensor(view, "k", 0, axes="pages heads tokens bytes")], page_size=tokens)
    src_pages, dst_pages = [4, 1, 3], [0, 5, 2]
    for rank in range(8):
        target = torch.zeros(pages, tokens, head_bytes, dtype=torch.uint8)
        mine = Heads(rank // 2, rank // 2 + 1, heads)
        dst = Layout([Region.from_tensor(target, "k", 0, axes="pages tokens bytes", heads=mine)], page_size=tokens)
        plan = pair(src, dst).plan(src_pages, dst_pages)
        assert len(plan) == 3 and set(plan.nbytes.tolist()) == {tokens * head_bytes}
        kvplan.execute(plan)
        assert torch.equal(target[dst_pages], view[src_pages, mine.start]) and not target[[1, 3, 4]].any()
    halves = torch.zeros(pages, 2, tokens, head_bytes, dtype=torch.uint8)
    dst = Layout(
        [Region.from_tensor(halves, "k", 0, axes="pages heads tokens bytes", heads=Heads(1, 3, 4))], page_size=tokens
    )
    plan = pair(src, dst).plan([1, 2, 3], [3, 4, 5])
    assert plan.nbytes.tolist() == [2 * tokens * head_bytes] * 3
    assert "heads of each page (heads 0 to 3 -> 1 to 2)" in pair(src, dst).explain()
    same = Layout([Region.from_tensor(halves, "k", 0, axes="pages heads tokens bytes")], page_size=tokens)
    other = halves.clone()
    there = Layout([Region.from_tensor(other, "k", 0, axes="pages heads tokens bytes")], page_size=tokens)
    assert len(pair(same, there).plan([1, 2, 3], [3, 4, 5])) == 1  # neighbours merge


@pytest.mark.parametrize("axes", ["planes pages tokens heads dim", "pages planes tokens heads dim"])
def test_k_and_v_as_planes_of_one_tensor(axes):
    shape = {"planes": 2, "pages": 5, "tokens": 4, "heads": 2, "dim": 3}
    source, target = (torch.zeros([shape[word] for word in axes.split()], dtype=torch.float16) for _ in range(2))
    source += torch.arange(source.numel()).reshape(source.shape)
    sides = [Layout(Region.from_planes(pool, ("k", "v"), 7, axes=axes), page_size=4) for pool in (source, target)]
    assert [region.key for region in sides[0].regions] == [("k", 7), ("v", 7)]
    kvplan.execute(pair(*sides).plan([1, 2], [4, 0]))
    at = axes.split().index("pages")
    assert torch.equal(target.movedim(at, 0)[[4, 0]], source.movedim(at, 0)[[1, 2]])
    assert not target.movedim(at, 0)[[1, 2, 3]].any()
    with pytest.raises(LayoutError, match="has 2 planes, not 3"):
        Region.from_planes(source, ("k", "v", "w"), 0, axes=axes)
    with pytest.raises(LayoutError, match="must name 'planes' once"):
        Region.from_planes(source, ("k", "v"), 0, axes="pages tokens heads dim")


def test_k_and_v_packed_in_one_row():
    """[pages, tokens, heads, K | V]: a row pitch wider than a row; together they move in whole pages."""
    source, target = (torch.zeros(6, 4, 2, 6, dtype=torch.int16) for _ in range(2))
    source += torch.arange(source.numel(), dtype=torch.int16).reshape(source.shape)

    def side(pool, names="kv"):
        halves = {"k": pool[..., :4], "v": pool[..., 4:]}
        regions = [Region.from_tensor(halves[name], name, 0, axes="pages tokens heads dim") for name in names]
        return Layout(regions, page_size=4)

    kvplan.execute(pair(side(source), side(target, "k"), allow_unsent=["v"]).plan([1, 5], [2, 3]))
    assert torch.equal(target[[2, 3], ..., :4], source[[1, 5], ..., :4]) and not target[..., 4:].any()
    plan = pair(side(source), side(target)).plan([1, 2, 5], [2, 3, 0])
    kvplan.execute(plan)
    assert torch.equal(target[[2, 3, 0]], source[[1, 2, 5]])
    assert side(source).memory_spans() == [(kvplan.Memory.DRAM, source.data_ptr(), source.nbytes)]
    separate = torch.zeros(6, 4, 2, 4, dtype=torch.int16)
    there = Layout([Region.from_tensor(separate, "k", 0, axes="pages tokens heads dim")], page_size=4)
    kvplan.execute(pair(side(source, "k"), there).plan([1, 5], [2, 3]))
    assert torch.equal(separate[[2, 3]], source[[1, 5], ..., :4])


def test_packed_rows_that_would_be_overwritten_are_refused():
    pool = torch.zeros(6, 4, 2, 6, dtype=torch.int16)
    k, v = (Region.from_tensor(part, name, 0, axes="pages tokens heads dim") for part, name in
            ((pool[..., :4], "k"), (pool[..., 3:], "v")))  # fmt: skip
    other = [Region.from_tensor(torch.zeros(6, 4, 2, n, dtype=torch.int16), name, 0, axes="pages tokens heads dim")
             for n, name in ((4, "k"), (3, "v"))]  # fmt: skip
    with pytest.raises(PairingError, match="region k layer 0 and region v layer 0 overlap"):
        pair(Layout(other, page_size=4), Layout([k, v], page_size=4))


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"order": "DNH"}, "order must be 'NHD' or 'HND', not 'DNH'"),
        ({"row_stride": 64}, "need row_bytes"),
        ({"row_bytes": 8, "head_stride": 8}, "need heads"),
        ({"row_bytes": 8, "row_stride": 4}, "its own bytes overlap"),
        ({"row_bytes": 8, "row_stride": 16}, "its own bytes overlap"),  # 4 rows reach into the next page
        ({"row_bytes": 4, "row_stride": 8, "page_stride": 64}, "counts 4 rows of 4 bytes alone"),
        ({"row_bytes": 8, "heads": Heads(0, 2, 2), "head_stride": 3}, "its own bytes overlap"),
        ({"row_bytes": 8, "row_stride": (1 << 63) - 1, "page_stride": 8}, "passes the end of 64-bit"),
        ({"format": ""}, "format must be a string"),
        ({"replica": (2, 2)}, "replica index is 2"),
        ({"allocation": 5}, "allocation must be"),
        ({"interleave": Interleave(2, 0, 3), "rows": 2, "row_bytes": 8}, "run of 3 tokens must be whole rows"),
    ],
)
def test_what_contradicts_itself_is_refused(fields, text):
    with pytest.raises(LayoutError, match=text) as caught:
        Layout([Region("k", 3, 1 << 12, 32, 8, **fields)], page_size=4)
    assert "region k layer 3" in str(caught.value)


def test_a_region_of_an_allocation_lies_within_it():
    region = Region("k", 3, 1 << 12, 32, 8, allocation=(1 << 12, 255))
    with pytest.raises(LayoutError, match="region k layer 3: its 256 bytes .* not within its allocation of 255"):
        Layout([region], page_size=4).memory_spans()


# -------------------------------------------------------------------------------------------------- nothing is guessed


def test_rows_are_not_guessed():
    """Fault 19: pages of 64 and 128 rows of 584 bytes, padded to 576: both divide by 585 by chance."""
    sides = [Layout([Region("c4_kv", 2, 1 << 20, -(-rows * 584 // 576) * 576, 4, tokens=4 * rows, rows=rows)],
                    page_size=256) for rows in (64, 128)]  # fmt: skip
    with pytest.raises(PairingError, match="region c4_kv layer 2: .* give row_bytes"):
        pair(*sides)
    assert [side.regions[0].row_bytes for side in sides] == [0, 0]


def test_a_pool_of_token_slots():
    pool, other = torch.arange(11 * 2 * 3).reshape(11, 2, 3), torch.zeros(4, 4, 2, 3, dtype=torch.int64)
    with pytest.raises(LayoutError, match=r"shape \(11, 2, 3\) has 2 at dimension 1, .* 4 rows.*Region.from_slots"):
        Layout([Region.from_tensor(pool, "k", 0)], page_size=4)
    src = Layout([Region.from_slots(pool, 4, "k", 0, heads=Heads(0, 2, 2))], page_size=4)
    assert (src.regions[0].num_pages, src.regions[0].row_bytes) == (2, 48)
    dst = Layout([Region.from_tensor(other, "k", 0, axes="pages tokens heads dim")], page_size=4)
    kvplan.execute(pair(src, dst).plan([1, 0], [3, 1], num_tokens=7))
    assert torch.equal(other[[3, 1]].flatten(0, 1)[:7], torch.cat([pool[4:8], pool[:3]]))
    wide = torch.arange(8 * 2 * 10).reshape(8, 2, 10)[..., :3]
    with pytest.raises(LayoutError, match="a slot of the pool is not contiguous"):
        Region.from_slots(wide, 4, "k", 0)
    with pytest.raises(LayoutError, match=r"shape \(3, 2, 3\) holds no page of 4 slots"):
        Region.from_slots(pool[:3], 4, "k", 0)
    padded = torch.arange(8 * 20).reshape(8, 20)[:, :6]
    flat = other.flatten(0, 1).flatten(1)
    src, dst = (Layout([Region.from_slots(slots, 4, "k", 0)], page_size=4) for slots in (padded, flat))
    kvplan.execute(pair(src, dst).plan([1], [0]))
    assert torch.equal(other[0].flatten(1), padded[4:])


@pytest.mark.parametrize(
    ("axes", "text"),
    [
        ("pages tokens dim", "a name each"),
        ("tokens heads dim rest", "must give 'pages'"),
        ("pages tokens tokens dim", "a name each"),
        ("pages heads dim tokens", "what one row and head holds"),
    ],
)
def test_axes_that_do_not_fit_are_refused(axes, text):
    with pytest.raises(LayoutError, match=text):
        Region.from_tensor(torch.zeros(5, 4, 2, 3), "k", 0, axes=axes)


def test_heads_are_counted():
    pool = torch.zeros(5, 4, 2, 3)
    with pytest.raises(LayoutError, match="has 2 heads, not Heads"):
        Region.from_tensor(pool, "k", 0, axes="pages tokens heads dim", heads=Heads(0, 4, 8))
    assert Region.from_tensor(pool, "k", 0, axes="pages tokens heads dim").heads == Heads(0, 2, 2)


def test_formats_are_compared():
    """Report 15: equal sizes, another meaning."""

    def side(base, format):
        return Layout([Region("k", 0, base, 64, 8, format=format)], page_size=4)

    with pytest.raises(PairingError, match="region k layer 0: the source's format is 'bf16', the destination's 'fp16'"):
        pair(side(4096, "bf16"), side(1 << 20, "fp16"))
    assert "does not say" not in pair(side(4096, "bf16"), side(1 << 20, "bf16")).explain()
    assert "the destination does not say its format" in pair(side(4096, "bf16"), side(1 << 20, None)).explain()


@pytest.mark.parametrize("order", [{"src": "HND"}, {"dst": "HND"}, {"src": "HND", "dst": "HND"}])
def test_orders_whose_heads_are_not_named(order):
    """Pages of one order move whole; to turn them round, the heads must be named."""
    sides = {name: Layout([Region("k", 0, base, 64, 8, row_bytes=16, order=order.get(name, "NHD"))], page_size=4)
             for name, base in (("src", 4096), ("dst", 1 << 20))}  # fmt: skip
    if len(order) == 2:
        assert pair(**sides).plan([1], [2]).nbytes.tolist() == [64]
    else:
        with pytest.raises(PairingError, match="order 'HND' and names no heads"):
            pair(**sides)


# ------------------------------------------------------------------------------------------------------- runs of tokens


def owner(token, run, ranks):
    """(rank, its how manieth token) of a token."""
    cycle, rest = divmod(token, run * ranks)
    return rest // run, cycle * run + rest % run


@pytest.mark.parametrize("src", [(1, 1), (2, 1), (2, 2), (4, 4), (3, 2)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("dst", [(1, 1), (2, 2), (2, 4), (4, 8), (3, 4)], ids="{0[0]}x{0[1]}".format)
@pytest.mark.parametrize("tokens", [96, 85])
def test_runs_of_any_length_on_both_sides(src, dst, tokens):
    """Report 02 and its kind: `ranks` x `run`; from shares in runs of one length to runs of another."""
    rows, row = 8, 5

    def pools(ranks):
        pages = -(-tokens // (rows * ranks)) + 1
        return [np.zeros((pages, rows, row), np.uint8) for _ in range(ranks)]

    def side(pool, ranks, run, rank):
        share = Interleave(ranks, rank, run)
        region = Region("c", 0, pool.ctypes.data, rows * row, len(pool), row_bytes=row, interleave=share)
        return Layout([Region(**vars(region) | {"tokens": rows * ranks})], page_size=rows)

    sources, targets = pools(src[0]), pools(dst[0])
    lists = [np.random.default_rng(1).permutation(len(side[0]))[:-1] for side in (sources, targets)]
    truth = np.random.default_rng(2).integers(1, 255, (tokens, row), np.uint8)
    for token in range(tokens):
        rank, place = owner(token, src[1], src[0])
        sources[rank][lists[0][place // rows], place % rows] = truth[token]
    for (i, source), (j, target) in itertools.product(enumerate(sources), enumerate(targets)):
        pairing = pair(side(source, *src, i), side(target, *dst, j))
        kvplan.execute(pairing.plan(*lists, num_tokens=tokens))
    for token in range(tokens):
        rank, place = owner(token, dst[1], dst[0])
        assert (targets[rank][lists[1][place // rows], place % rows] == truth[token]).all()
    for target in targets:
        assert not target[[page for page in range(len(target)) if page not in lists[1]]].any()


def test_runs_move_as_one():
    """A run of 4 rows is one descriptor, and whole pages are one run: vllm-ascend's interleave of pages."""
    src = Layout([Region("c", 0, 1 << 12, 64, 16, row_bytes=8)], page_size=8)
    for run, nbytes in ((4, 32), (8, 64)):
        dst = Layout(
            [Region("c", 0, 1 << 20, 64, 16, tokens=16, row_bytes=8, interleave=Interleave(2, 1, run))], page_size=8
        )
        plan = pair(src, dst).plan([0, 5, 2, 7], [3, 1])
        assert plan.nbytes.tolist() == [nbytes] * (16 * 8 // nbytes)
    with pytest.raises(PlanError, match="must differ by a multiple"):
        pair(src, dst).plan([0, 5, 2, 7], [3, 1, 2], src_start=4, dst_start=0)


# ------------------------------------------------------------------------------------------------ replicas, wire form


def test_replicated_and_split_regions_on_one_rank():
    """Report 07: two ranks split K by heads and both hold the indexer."""
    sides = []
    for rank in range(2):
        regions = [
            Region("k", layer, (rank + 1 << 30) + (layer << 16), 32, 8, row_bytes=8, heads=Heads(rank, rank + 1, 2))
            for layer in range(3)
        ]
        regions += [
            Region("indexer", layer, (rank + 1 << 30) + (layer << 16) + 4096, 16, 8, row_bytes=4, replica=(rank, 2))
            for layer in range(3)
        ]
        sides.append(Layout(regions, page_size=4))
    regions = [Region("k", layer, (1 << 40) + (layer << 16), 64, 8, row_bytes=16) for layer in range(3)]
    regions += [Region("indexer", layer, (1 << 41) + (layer << 16), 16, 8, row_bytes=4) for layer in range(3)]
    dst = Layout(regions, page_size=4)
    written = []
    for side in sides:
        for _, start, nbytes in zip(*pair(side, dst).plan([1], [2]).lists(), strict=True):
            written += range(start, start + nbytes)
    assert len(written) == len(set(written)) == 3 * (64 + 16)
    assert "indexer layer 1: sent by another of the 2 replicas" in pair(sides[0], dst).explain()


def test_the_wire_form_says_what_is_new_only_where_it_is_needed():
    plain = Layout([Region("k", 0, 4096, 64, 8, row_bytes=16, interleave=Interleave(2, 1), tokens=8)], page_size=4)
    first = {"page_size", "replica", "regions"}
    fields = {"name", "layer", "base", "page_bytes", "num_pages", "page_stride", "tokens", "rows", "row_bytes", "space",
              "memory", "heads", "interleave"}  # fmt: skip
    data = plain.to_dict()
    assert data.keys() == first and data["regions"][0].keys() == fields and data["regions"][0]["interleave"] == [2, 1]
    heads = Heads(0, 2, 4)
    news = {
        "order": {"order": "HND", "heads": heads},
        "row_stride": {"row_stride": 32, "page_stride": 128},
        "head_stride": {"head_stride": 1 << 20, "heads": heads, "row_stride": 8, "page_stride": 32},
        "format": {"format": "fp8_e4m3"},
        "replica": {"replica": (1, 3)},
        "run": {"interleave": Interleave(2, 1, 2), "tokens": 8},
    }
    for name, more in news.items():
        layout = Layout([Region("k", 0, 4096, 64, 8, row_bytes=16, **more)], page_size=4)
        data = layout.to_dict()
        assert data["version"] == 2 and name in data["requires"]
        assert Layout.from_dict(data) == layout
    later = plain.to_dict() | {"version": 3, "colour": "red"}
    later["regions"][0]["shade"] = [1]
    assert Layout.from_dict(later) == plain
    with pytest.raises(LayoutError, match="requires 'shade', which this version"):
        Layout.from_dict(later | {"requires": ["order", "shade"]})


def test_case_files_without_row_bytes_have_no_padding():
    data = {"page_size": 4, "regions": [{"name": "k", "layer": 0, "base": 4096, "page_bytes": 64, "num_pages": 8}]}
    assert Layout.from_dict(data).regions[0].row_bytes == 16


# --------------------------------------------------------------------------------------------------------- allocations


def test_views_of_one_tensor_are_one_registration():
    """Report 22: 183 views of one allocation."""
    pages, tokens = 4, 16
    pool = torch.zeros(61 * pages * tokens * 84, dtype=torch.uint8)
    regions, at = [], 0
    for layer in range(61):
        for name, nbytes in (("latent", 64), ("rope", 16), ("scale", 4)):
            size = pages * tokens * nbytes
            regions.append(Region.from_tensor(pool[at : at + size].view(pages, tokens * nbytes), name, layer))
            at += size
    layout = Layout(regions, page_size=tokens)
    assert layout.memory_spans() == [(kvplan.Memory.DRAM, pool.data_ptr(), pool.nbytes)]
    assert len(Layout.from_dict(layout.to_dict()).memory_spans()) == 183  # a peer registers nothing


# ---------------------------------------------------------------------------------------------------------------- bases


def test_addresses_of_model_layouts_are_checked():
    sizes = {"layers": 2, "num_pages": 4}
    by_list = Layout.mla([1 << 12, 1 << 20], **sizes)
    assert [region.base for region in by_list.regions] == [1 << 12, 1 << 20]
    assert by_list == Layout.mla(np.array([1 << 12, 1 << 20]), **sizes)
    assert by_list == Layout.mla({("mla_kv", 0): np.int64(1 << 12), ("mla_kv", 1): 1 << 20}, **sizes)
    assert by_list == Layout.mla(lambda name, layer, nbytes: np.uint64(1 << (12 + 8 * layer)), **sizes)
    assert Layout.mla(np.int64(1 << 12), **sizes) == Layout.mla(1 << 12, **sizes)
    for bad, text in (
        ([1 << 12], "bases has 1 addresses, and the layout has 2 regions"),
        ([1 << 12] * 3, "bases has 3 addresses, and the layout has 2 regions"),
        ([1 << 12, 0], "region mla_kv layer 1: address is 0"),
        ([1 << 12, 1.5], "region mla_kv layer 1: address must be an integer"),
        (0, "bases is 0"),
        (None, "bases must be an integer, not None"),
        ("4096", "bases must be an integer, not '4096'"),
        (True, "bases must be an integer, not True"),
        ({("mla_kv", 0): 4096}, "region mla_kv layer 1: no address given"),
        (lambda name, layer, nbytes: None, "region mla_kv layer 0: address must be an integer, not None"),
        (-4096, "bases is -4096, outside"),
    ):
        with pytest.raises(LayoutError, match=text):
            Layout.mla(bad, **sizes)


@pytest.mark.parametrize("axes", [("pages", "tokens", "dim"), ["pages"], 3, b"pages tokens dim"])
def test_axes_are_one_string(axes):
    tensor = torch.zeros(2, 4, 3)
    with pytest.raises(LayoutError, match="axes must be one string of names"):
        Region.from_tensor(tensor, "kv", 0, axes=axes)
    with pytest.raises(LayoutError, match="axes"):
        Region.from_planes(tensor, ("k", "v"), 0, axes=axes)


def test_strides_that_repeat_a_default_are_left_out_and_no_byte_moves():
    """Every order with every stride, given or by default, also where it is what the order says for another stride."""
    head_bytes, strides, placed = 2, (None, 2, 4, 6, 8, 12, 16, 24), 0
    cases = itertools.product(("NHD", "HND"), (1, 2, 3), (1, 2, 3), strides, strides)
    for order, rows, heads, row_stride, head_stride in cases:
        row = heads * head_bytes
        by_row = row_stride or (row if order == "NHD" else head_bytes)
        by_head = head_stride or (head_bytes if order == "NHD" else rows * by_row)
        want = [[i * by_row + k * by_head for k in range(heads)] for i in range(rows)]
        starts = sorted(itertools.chain.from_iterable(want))
        overlap = any(there - here < head_bytes for here, there in itertools.pairwise(starts))
        region = Region(
            "k", 0, 1 << 20, rows * row, 5, row_bytes=row, rows=rows, heads=Heads(0, heads, 3), order=order,
            row_stride=row_stride, head_stride=head_stride, page_stride=100,
        )  # fmt: skip
        try:
            layout = Layout([region], page_size=rows)
        except LayoutError as error:
            # Strides that nest in no order are refused too: 2 rows 6 apart and 3 heads 4 apart, for example.
            assert "its own bytes overlap" in str(error)
            assert overlap or (rows > 1 and heads > 1), (order, rows, heads, row_stride, head_stride)
            continue
        placed += 1
        assert not overlap
        for made in (layout, Layout.from_dict(json.loads(json.dumps(layout.to_dict())))):
            (found,) = made.regions
            at = [[i * found.row_pitch + k * found.head_pitch for k in range(heads)] for i in range(rows)]
            assert at == want, (order, rows, heads, row_stride, head_stride)
    assert placed > 300


@pytest.mark.parametrize(
    "given", [None, 3, [1, 2], np.zeros((2, 4)), torch.Tensor, "a tensor"], ids=lambda given: type(given).__name__
)
def test_what_is_no_tensor_is_refused_by_name(given):
    for make in (
        lambda: Region.from_tensor(given, "k", 7),
        lambda: Region.from_tensor(given, "k", 7, axes="pages tokens"),
        lambda: Region.from_slots(given, 4, "k", 7),
        lambda: Region.from_planes(given, ("k", "v"), 7, axes="planes pages tokens"),
    ):
        with pytest.raises(LayoutError, match=r"layer 7: a torch tensor is needed, not (None|3|a |'a)"):
            make()
    for tensor, words in (
        (torch.zeros(2, 4).to_sparse(), "a dense tensor is needed, not one of layout torch.sparse_coo"),
        (
            torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
            "a dense tensor is needed, not one of layout torch.jagged",
        ),
        (torch.zeros(2, 4, device="meta"), "tensor is on meta, neither CPU nor CUDA"),
    ):
        for make in (Region.from_tensor, lambda *about: Region.from_slots(about[0], 1, *about[1:])):
            with pytest.raises(LayoutError, match=words):
                make(tensor, "k", 7)
    with pytest.raises(LayoutError, match="names must be a list of names, one a plane, not 'kv'"):
        Region.from_planes(torch.zeros(2, 4, 4), "kv", 7, axes="planes pages tokens")


def test_heads_that_lie_apart_in_pages_of_one_row():
    """Without an axis of tokens it must be said that a page is one row: the message says how."""
    source, target = torch.arange(4 * 2 * 8, dtype=torch.int32).view(4, 2, 8), torch.zeros(4, 2, 8, dtype=torch.int32)
    with pytest.raises(LayoutError, match=r"lie 32 bytes apart, and have 16 bytes each.* pass row_bytes=32"):
        Region.from_tensor(source[:, :, :4], "k", 0, axes="pages heads dim")
    src, dst = (
        Layout([Region.from_tensor(pool[:, :, :4], "k", 0, axes="pages heads dim", row_bytes=32)], page_size=1)
        for pool in (source, target)
    )
    kvplan.execute(pair(src, dst).plan([1, 3], [2, 0]))
    assert torch.equal(target[[2, 0], :, :4], source[[1, 3], :, :4])
    assert not target[:, :, 4:].any() and not target[[1, 3]].any()
