"""From vLLM's words to layouts, pairings and page lists: every byte, where vLLM's own connectors are right or wrong."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from vllm_caches import ORDERS, Side, fill, wrong

import kvplan
from kvplan import Layout, LayoutError, PairingError, PlanError
from kvplan.integrations.vllm.lists import Tables, request
from kvplan.integrations.vllm.words import Group, Layer, Ranks, describe


def move(src: Side, dst: Side, theirs: list[int], mine: list[int], start: int, stop: int) -> None:
    """What the workers of the decode side do, with a copy in the place of the engine."""
    layouts = [Layout.from_dict(rank.layout.to_dict()) for rank in src.described]
    for described in dst.described:
        every = {key for layout in layouts for key in layout.by_key}
        cluster = kvplan.Cluster(prefill=layouts, decode=[described.layout], allow_unsent=every)
        cluster.check()
        for number, there in enumerate(src.described):
            pairing = cluster.pairing(number, 0)
            if not len(pairing.entries):
                continue
            here = Tables({"group 0": mine}, described.ratios)
            wanted = request(pairing, Tables({"group 0": theirs}, there.ratios), here, start, stop)
            kvplan.execute(
                pairing.plan(
                    wanted.src_pages, wanted.dst_pages, src_start=wanted.src_start, dst_start=wanted.dst_start,
                    num_tokens=wanted.num_tokens,
                )
            )  # fmt: skip


def check(src: Side, dst: Side, stop: int = 100, start: int = 0, lookahead: int = 0) -> None:
    """Move one request, and look at every row and at every block that is not its own.

    Args:
        stop: tokens of the request.
        start: tokens that the decode side has already.
        lookahead: blocks that the prefill side holds behind the last token.
    """
    theirs = torch.randperm(src.blocks - 1)[: -(-stop // src.span) + lookahead].add(1).tolist()
    mine = torch.randperm(dst.blocks - 1)[: -(-stop // dst.span)].add(1).tolist()
    fill(src, theirs, range(stop))
    before = [[cache.clone() for cache in caches] for caches in dst.caches]
    move(src, dst, theirs, mine, start, stop)
    assert wrong(dst, mine, range(start, stop)) == 0
    ratio = dst.caches[0][0].shape[0] // dst.blocks
    first = start // dst.span
    own = {block * ratio + k for block in mine[first:] for k in range(ratio)}
    others = [block for block in range(dst.blocks * ratio) if block not in own]
    for caches, untouched in zip(dst.caches, before, strict=True):
        for cache, old in zip(caches, untouched, strict=True):
            assert torch.equal(cache[others], old[others])


def test_two_blocks_that_change_places_are_noticed() -> None:
    src, dst = Side("LBHNC", 1, 16, 2), Side("LBNHC", 1, 16, 2)
    fill(src, [3, 1, 2], range(40))
    move(src, dst, [1, 3, 2], [7, 8, 9], 0, 40)
    assert wrong(dst, [7, 8, 9], range(40)) == 2 * 2 * 32


@pytest.mark.parametrize("there", ORDERS)
@pytest.mark.parametrize("here", ORDERS)
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 4), (8, 2), (4, 4)])
def test_any_order_and_any_number_of_ranks(there: str, here: str, ranks: tuple[int, int]) -> None:
    """4 heads, so that of 8 ranks two hold the same. NixlConnector refuses or asserts; Mooncake's is often wrong."""
    check(Side(there, ranks[0], 16, 4), Side(here, ranks[1], 16, 4))


@pytest.mark.parametrize("there", ORDERS)
@pytest.mark.parametrize("here", ORDERS)
@pytest.mark.parametrize("blocks", [(32, 16), (16, 32), (16, 64)])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_unequal_blocks(there: str, here: str, blocks: tuple[int, int], ranks: tuple[int, int]) -> None:
    check(Side(there, ranks[0], blocks[0], 2), Side(here, ranks[1], blocks[1], 2))


@pytest.mark.parametrize("there", ["LBHNC", "BLNHC"])
@pytest.mark.parametrize("here", ["LBNHC", "BHLNC"])
@pytest.mark.parametrize("blocks", [(16, 16), (32, 64), (64, 32)])
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (4, 2), (2, 8)])
def test_latent_caches(there: str, here: str, blocks: tuple[int, int], ranks: tuple[int, int]) -> None:
    """Every rank holds all of it: each row comes from one of them."""
    check(Side(there, ranks[0], blocks[0], 1), Side(here, ranks[1], blocks[1], 1), stop=150)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks", [(16, 16), (16, 32), (32, 16)])
@pytest.mark.parametrize("total", [1, 2])
@pytest.mark.parametrize("stop", [64, 100])
def test_lookahead_blocks_of_the_prefill_side_are_cut_not_shifted(
    order: str, blocks: tuple[int, int], total: int, stop: int
) -> None:
    """With one such block all rows are wrong with NixlConnector, and with Mooncake's connector."""
    for lookahead in (1, 2):
        check(Side(order, 1, blocks[0], total), Side("LBHNC", 1, blocks[1], total), stop, lookahead=lookahead)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("blocks, start", [((16, 16), 48), ((16, 32), 64), ((32, 16), 48), ((64, 16), 16)])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_a_prefix_that_decode_has(order: str, blocks: tuple[int, int], start: int, ranks: tuple[int, int]) -> None:
    check(Side(order, ranks[0], blocks[0], 2), Side(order, ranks[1], blocks[1], 2), 100, start=start, lookahead=1)


@pytest.mark.parametrize("there, here", [((64, 16), (64, 64)), ((64, 32), (32, 16)), ((32, 32), (64, 16))])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
def test_blocks_of_several_kernel_blocks(there: tuple[int, int], here: tuple[int, int], ranks: tuple[int, int]) -> None:
    """A kernel block is what the attention kernel calls a block; a block of the table may have several."""
    for start in (0, 64):
        src = Side("LBHNC", ranks[0], there[0], 2, kernel=there[1])
        check(src, Side("LBNHC", ranks[1], here[0], 2, kernel=here[1]), 100, start=start)


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (4, 2)])
@pytest.mark.parametrize("orders", [("LBHNC", "LBHNC"), ("BLHNC", "LBHNC"), ("LBHNC", "BLHNC")])
def test_a_back_end_with_an_order_of_its_own_moves_whole_heads(ranks: tuple[int, int], orders: tuple[str, str]) -> None:
    src = Side(orders[0], ranks[0], 32, 4, opaque=True)
    dst = Side(orders[1], ranks[1], 32, 4, opaque=True)
    check(src, dst, 96)
    check(src, dst, 96, start=32, lookahead=1)


def test_a_back_end_with_an_order_of_its_own_needs_equal_blocks() -> None:
    """Here NixlConnector gives wrong tokens without an error."""
    for blocks in ((32, 64), (64, 32)):
        src, dst = (Side("LBHNC", 1, block, 2, opaque=True) for block in blocks)
        with pytest.raises(PairingError, match=rf"blocks of {blocks[0]} tokens.*blocks of {blocks[1]} tokens"):
            kvplan.pair(src.described[0].layout, dst.described[0].layout)
    other = Side("LBHNC", 1, 32, 2)
    with pytest.raises(
        PairingError, match="format is 'uint8', the destination's 'blocks of 32 tokens as OWN_ORDER stores"
    ):
        kvplan.pair(other.described[0].layout, Side("LBHNC", 1, 32, 2, opaque=True).described[0].layout)


def test_a_back_end_with_an_order_of_its_own_needs_heads_one_behind_another() -> None:
    with pytest.raises(
        LayoutError, match=r"layer model\.layers\.0\.attn: OWN_ORDER keeps .*VLLM_KV_CACHE_LAYOUT=LBHNC"
    ):
        Side("LBNHC", 1, 32, 2, opaque=True)


def test_a_sliding_window() -> None:
    """The prefill side has freed what is out of the window; the decode side has blocks for it, or has not."""
    src, dst = Side("LBHNC", 1, 16, 2), Side("LBHNC", 1, 16, 2)
    theirs, mine = [0, 0, 0, 7, 3, 9, 4], [5, 6, 2, 8, 1, 3, 9]
    fill(src, theirs, range(48, 100))
    for table in (mine, [0, 0, *mine[2:]], [0, 0, 0, 0, *mine[4:]]):
        before = [cache.clone() for cache in dst.caches[0]]
        move(src, dst, theirs, table, 0, 100)
        first = max(3, table.count(0))
        assert wrong(dst, table, range(16 * first, 100)) == 0
        rest = [block for block in range(dst.blocks) if block not in table[first:]]
        assert all(torch.equal(cache[rest], old[rest]) for cache, old in zip(dst.caches[0], before, strict=True))
        for cache in dst.caches[0]:
            cache.fill_(0xEE)
    unequal = Side("LBNHC", 1, 32, 2)
    move(src, unequal, theirs, [5, 6, 2, 8], 0, 100)
    assert wrong(unequal, [5, 6, 2, 8], range(48, 100)) == 0
    move(src, dst, [0] * 7, mine, 0, 100)  # all of it out of the window: nothing moves
    assert all(bool((cache == 0xEE).all()) for cache in dst.caches[0])


def test_groups_that_share_one_buffer() -> None:
    """vLLM's hybrid allocator: layers of both groups lie at the same addresses. A block is of one group at a time."""

    def side() -> tuple[torch.Tensor, list[Group], dict[str, torch.Tensor]]:
        memory = torch.zeros(2, 24, 2, 16, 8, dtype=torch.uint8)
        groups = [
            Group(16, tuple(Layer(f"model.layers.{2 * k + g}.attn", 2, 2, "uint8") for k in range(2))) for g in range(2)
        ]
        caches = {layer.name: memory[k] for group in groups for k, layer in enumerate(group.layers)}
        return memory, groups, caches

    (source, groups, theirs), (target, _, mine) = side(), side()
    source[:] = torch.arange(source.numel()).view(source.shape) % 251
    src, dst = (describe(groups, caches, 24, Ranks(0, 1)) for caches in (theirs, mine))
    pairing = kvplan.pair(src.layout, dst.layout)
    there = Tables({"group 0": [0, 0, 4], "group 1": [7, 1, 2]}, src.ratios)
    here = Tables({"group 0": [0, 9, 3], "group 1": [5, 6, 8]}, dst.ratios)
    wanted = request(pairing, there, here, 0, 40)
    kvplan.execute(
        pairing.plan(
            wanted.src_pages, wanted.dst_pages, src_start=wanted.src_start, dst_start=wanted.dst_start,
            num_tokens=wanted.num_tokens,
        )
    )  # fmt: skip
    expected = torch.zeros_like(target)
    for s, d in ((4, 3), (7, 5), (1, 6), (2, 8)):
        expected[:, d] = source[:, s]
    assert torch.equal(target, expected)


def test_layers_that_share_a_cache_are_one_region() -> None:
    cache = torch.zeros(24, 2, 16, 8, dtype=torch.uint8)
    layers = tuple(Layer(f"model.layers.{k}.attn", 2, 2, "uint8") for k in range(2))
    described = describe(
        [Group(16, layers)], dict.fromkeys(("model.layers.0.attn", "model.layers.1.attn"), cache), 24, Ranks(0, 1)
    )
    assert [region.key for region in described.layout.regions] == [("model.layers.0.attn", 0)]


@pytest.mark.parametrize(
    "change, message",
    [
        ({"heads": 4}, r"has 2 heads, and vLLM says 4"),
        ({"total": 6}, r"2 heads a rank, of 6 heads over 2 ranks"),
        ({"tp_rank": 2}, r"TP rank 2 is not one of 2"),
        ({"block": 32}, r"shape \(24, 2, 16, 8\) is not 24 blocks of 32 tokens"),
        ({"num_blocks": 23}, r"shape \(24, 2, 16, 8\) is not 23 blocks of 16 tokens"),
        ({"name": "model.layers.9.attn"}, r"layer model\.layers\.9\.attn of group 0 has no KV cache"),
        ({"shape": (24, 2, 128)}, r"shape \(24, 2, 128\), not \[blocks, heads, tokens, content\]"),
    ],
)
def test_what_vllm_says_and_the_cache_must_agree(change: dict[str, object], message: str) -> None:
    given = dict(heads=2, total=4, tp_rank=0, block=16, num_blocks=24, name="a", shape=(24, 2, 16, 8)) | change
    if given["heads"] == 4:
        given["total"] = 8
    cache = torch.zeros(given["shape"], dtype=torch.uint8)  # type: ignore[arg-type]
    layer = Layer(given["name"], given["heads"], given["total"], "uint8")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=message):
        describe([Group(given["block"], (layer,))], {"a": cache}, given["num_blocks"], Ranks(given["tp_rank"], 2))  # type: ignore


def test_tables_that_do_not_cover_the_tokens_are_refused() -> None:
    side = Side("LBHNC", 1, 16, 2)
    for theirs, mine in (([1, 2], [3, 4, 5]), ([1, 2, 3], [4, 5])):
        with pytest.raises(PlanError):
            move(side, side, theirs, mine, 0, 48)
    with pytest.raises(PlanError, match=r"page id 24 at position 1 is out of range"):
        move(side, Side("LBHNC", 1, 16, 2), [1, 24, 3], [4, 5, 6], 0, 48)
    pairing = kvplan.pair(side.described[0].layout, side.described[0].layout)
    with pytest.raises(PlanError, match="the prefill side gave no block table for 'group 0'"):
        request(pairing, Tables({}, {}), Tables({"group 0": [1]}, {"group 0": 1}), 0, 16)


def test_kvplan_imports_nothing_of_vllm() -> None:
    code = (
        "import sys, kvplan, kvplan.engines, kvplan.integrations.vllm, kvplan.integrations.vllm.words, "
        "kvplan.integrations.vllm.lists; "
        "assert not [name for name in sys.modules if name.split('.')[0] in ('vllm', 'zmq')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("there, here", [((2,), (1, 1)), ((1, 1), (2,)), ((3, 1), (1, 2, 1)), ((2, 2), (2, 2))])
@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize("orders", [("LBHNC", "LBNHC"), ("BLHNC", "LBHNC")])
def test_pipeline_stages(
    there: tuple[int, ...], here: tuple[int, ...], ranks: tuple[int, int], orders: tuple[str, str]
) -> None:
    """Each stage holds some layers; those of the two sides may be cut elsewhere."""
    src = Side(orders[0], ranks[0], 16, 4, stages=there)
    check(src, Side(orders[1], ranks[1], 32, 4, stages=here), lookahead=1)


def test_a_stage_without_layers_of_a_group() -> None:
    """The numbers of groups are the same on all stages, so a stage may have an empty one."""
    cache, layer = torch.zeros(24, 2, 16, 8, dtype=torch.uint8), Layer("model.layers.3.attn", 2, 2, "uint8")
    described = describe([Group(16, ()), Group(16, (layer,))], {layer.name: cache}, 24, Ranks(0, 1))
    assert [region.space for region in described.layout.regions] == ["group 1"]
    assert described.ratios == {"group 1": 1}


@pytest.mark.parametrize("total", [1, 2])
@pytest.mark.parametrize("sides", [((4, 2, 1), (1, 1, 1)), ((1, 1, 1), (4, 2, 1)), ((4, 2, 8), (4, 2, 2)),
                                   ((2, 1, 1), (8, 4, 4)), ((8, 4, 1), (4, 2, 16))])  # fmt: skip
@pytest.mark.parametrize("orders", [("LBHNC", "LBNHC"), ("BHLNC", "BLNHC")])
def test_decode_context_parallelism(
    total: int, sides: tuple[tuple[int, int, int], tuple[int, int, int]], orders: tuple[str, str]
) -> None:
    """Each side is (TP ranks, DCP ranks, run). A block of the table has 16 x DCP tokens."""
    for tokens in (200, 128):
        src, dst = (
            Side(order, tp, 16, total, dcp=dcp, run=run) for order, (tp, dcp, run) in zip(orders, sides, strict=True)
        )
        check(src, dst, tokens, lookahead=1)
        check(src, dst, tokens, start=64)


def test_decode_context_parallelism_with_blocks_of_several_kernel_blocks() -> None:
    src = Side("LBHNC", 2, 32, 1, kernel=16, dcp=2, run=4)
    check(src, Side("LBNHC", 4, 64, 1, kernel=16, dcp=4, run=16), 300)
    check(src, Side("LBNHC", 1, 32, 1, kernel=16), 300, start=64)


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(tp=4, total=4, dcp=2), r"2 DCP ranks cannot share the tokens of a head, which 1 of 4 TP ranks hold"),
        (dict(tp=8, total=2, dcp=3), r"3 DCP ranks cannot share the tokens of a head, which 4 of 8 TP ranks hold"),
        (dict(tp=2, total=1, dcp=2, run=32), r"blocks of 16 tokens do not hold whole runs of 32 tokens"),
        (dict(tp=2, total=1, dcp=2, run=0), r"2 DCP ranks with runs of 0 tokens"),
        (dict(tp=2, total=1, dcp=2, opaque=True), r"OWN_ORDER keeps .* those of 2 DCP ranks cannot be told apart"),
    ],
)  # fmt: skip
def test_tokens_that_ranks_cannot_share_are_refused(given: dict[str, int], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Side("LBHNC", block=16, **given)  # type: ignore[arg-type]
