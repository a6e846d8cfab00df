"""`Cluster`: who is paired with whom, and that `check` says what the bytes say, of right and of faulty clusters."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import profile

import kvplan
from kvplan import Cluster, Heads, Interleave, Layout, PairingError, Region, pair

ROW = 12  # bytes of a row of all heads: any head count drawn here divides it


# ------------------------------------------------------------------------------------------------- what bytes say


def writes(cluster: Cluster) -> list[dict[tuple[str, int], np.ndarray]]:
    """How often each byte of each decode region is written when all plans of all pairs are carried out.

    Pages are 0, 1, 2, ...; all lists cover the same tokens.
    """
    every = [region.tokens for layout in (*cluster.prefill, *cluster.decode) for region in layout.regions]
    tokens = math.lcm(*every)
    counts = [
        {region.key: np.zeros(region.span_bytes, np.int64) for region in layout.regions} for layout in cluster.decode
    ]
    for i, src in enumerate(cluster.prefill):
        for j, dst in enumerate(cluster.decode):
            pairing = cluster.pairing(i, j)
            if not src.regions:
                continue
            lists = {region.space: list(range(tokens // region.tokens)) for region in dst.regions}
            named = {
                space: list(range(tokens // source))
                for space, source in pairing.src_tokens.items()
            }  # fmt: skip
            plan = pairing.plan(named, lists)
            for _, address, nbytes in zip(*plan.lists(), strict=True):
                hit = [r for r in dst.regions if r.base <= address and address + nbytes <= r.base + r.span_bytes]
                assert len(hit) == 1
                counts[j][hit[0].key][address - hit[0].base :][:nbytes] += 1
    return counts


def bytes_are_right(cluster: Cluster) -> bool:
    """Whether each byte of the pages that are due is written once. Refused when paired: no."""
    tokens = math.lcm(*(region.tokens for layout in (*cluster.prefill, *cluster.decode) for region in layout.regions))
    try:
        found = writes(cluster)
    except PairingError:
        return False
    held = {key for layout in cluster.decode for key in layout.by_key}
    if any(key not in held for layout in cluster.prefill for key in layout.by_key):
        return False
    for layout, counts in zip(cluster.decode, found, strict=True):
        for region in layout.regions:
            for page in range(tokens // region.tokens):
                start = page * region.page_stride
                if (counts[region.key][start : start + region.rows * region.row_bytes] != 1).any():
                    return False
    return True


def is_right(cluster: Cluster) -> bool:
    try:
        cluster.check()
    except PairingError:
        return False
    return True


# ----------------------------------------------------------------------------------------------------- drawn clusters


def cuts(draw, total: int, ranks: int) -> list[tuple[int, int]]:
    """`total` heads over ranks, cut anywhere, each rank with one at least; or every `ranks // total` ranks alike."""
    if ranks > total:
        return [(rank * total // ranks, rank * total // ranks + 1) for rank in range(ranks)]
    inner = (
        draw(st.lists(st.integers(1, total - 1), unique=True, min_size=ranks - 1, max_size=ranks - 1))
        if ranks > 1
        else []
    )
    edges = [0, *sorted(inner), total]
    return list(itertools.pairwise(edges))


def stages(draw, layers: int) -> list[range]:
    inner = draw(st.sets(st.integers(1, layers - 1), max_size=2)) if layers > 1 else set()
    edges = [0, *sorted(inner), layers]
    return [range(a, b) for a, b in itertools.pairwise(edges)]


def rank_layout(names, layers, base, page, heads=None, total=0, interleave=None, replica=(0, 1)):
    """Regions of one rank: `page` rows a page, all bytes of a row are heads."""
    regions = []
    share = interleave.size if interleave else 1
    held = Heads(*heads, total) if total else None
    for name in names:
        for layer in layers:
            row = ROW // total * (heads[1] - heads[0]) if total else ROW
            size = page * row
            regions.append(
                Region(name, layer, base, size, 64, tokens=page * share, rows=page, row_bytes=row, heads=held,
                       interleave=interleave)
            )  # fmt: skip
            base += size * 64
    return Layout(regions, page_size=page, replica=replica)


@st.composite
def side(draw, prefill: bool, total: int, layers: int, names, base: int) -> list[Layout]:
    """All ranks of one side: pipeline stages, then uneven heads or replicated ones, then ranks that interleave rows."""
    page = draw(st.sampled_from([1, 2, 3, 4]))
    parts = stages(draw, layers)
    tensor = draw(st.sampled_from([1, 2, 3]))
    copies = 1
    if total:
        divisors = [n for n in range(1, 2 * total + 1) if n <= total or n % total == 0]
        tensor = draw(st.sampled_from(divisors))
        copies = max(tensor // total, 1)
    interleave = draw(st.sampled_from([1, 1, 2, 3, 5])) if tensor < 4 else 1
    heads = cuts(draw, total, tensor) if total else [None] * tensor
    ranks = []
    for part in parts:
        for t in range(tensor):
            for r in range(interleave):
                share = Interleave(interleave, r) if interleave > 1 else None
                replica = (0, 1)
                if prefill:
                    replica = (t % copies, copies) if total else (t, tensor)
                ranks.append(
                    rank_layout(names, part, base + len(ranks) * (1 << 30), page, heads[t], total, share, replica)
                )
    return ranks


@st.composite
def clusters(draw) -> Cluster:
    total = draw(st.sampled_from([0, 1, 2, 3, 4]))
    layers = draw(st.integers(1, 4))
    names = draw(st.sampled_from([["kv"], ["k", "v"]]))
    prefill = draw(side(True, total, layers, names, 1 << 40))
    decode = draw(side(False, total, layers, names, 1 << 50))
    return Cluster(prefill, decode)


def with_regions(layout: Layout, regions, replica=None) -> Layout:
    return Layout(regions, page_size=layout.page_size, replica=replica or layout.replica)


@st.composite
def faulty(draw) -> Cluster:
    """A cluster with one thing changed; it may turn out to be right all the same."""
    cluster = draw(clusters())
    prefill, decode = list(cluster.prefill), list(cluster.decode)
    rank = draw(st.integers(0, len(prefill) - 1))
    layout = prefill[rank]
    region = draw(st.sampled_from(layout.regions))
    rest = [other for other in layout.regions if other is not region]
    way = draw(st.sampled_from(["drop", "rank", "twice", "replica", "heads", "rows", "decode", "nobody"]))
    if way == "drop":
        prefill[rank] = with_regions(layout, rest)
    elif way == "rank":
        del prefill[rank]
    elif way == "twice":
        prefill.append(prefill[rank])
    elif way == "replica":
        count = draw(st.integers(1, 3))
        prefill[rank] = with_regions(layout, layout.regions, (draw(st.integers(0, count - 1)), count))
    elif way == "heads" and region.heads:
        total, held = region.heads.total, region.heads.stop - region.heads.start
        start = draw(st.integers(0, total - held))
        moved = kvplan.Region(
            region.name, region.layer, region.base, region.page_bytes, region.num_pages, tokens=region.tokens,
            rows=region.rows, row_bytes=region.row_bytes, heads=Heads(start, start + held, total),
            interleave=region.interleave,
        )  # fmt: skip
        prefill[rank] = with_regions(layout, [*rest, moved])
    elif way == "rows" and region.interleave:
        size = region.interleave.size
        moved = kvplan.Region(
            region.name, region.layer, region.base, region.page_bytes, region.num_pages, tokens=region.tokens,
            rows=region.rows, row_bytes=region.row_bytes, heads=region.heads,
            interleave=Interleave(size, draw(st.integers(0, size - 1))),
        )  # fmt: skip
        prefill[rank] = with_regions(layout, [*rest, moved])
    elif way == "decode":
        place = draw(st.integers(0, len(decode) - 1))
        decode[place] = with_regions(decode[place], decode[place].regions[1:])
    elif way == "nobody":
        gone = region.key
        prefill = [with_regions(layout, [r for r in layout.regions if r.key != gone]) for layout in prefill]
    return Cluster(prefill, [layout for layout in decode if layout.regions])


def test_drawn_clusters_are_right_and_the_check_says_so():
    @profile(300)
    @given(clusters())
    def check(cluster):
        cluster.check()
        assert bytes_are_right(cluster)

    check()


def test_the_check_agrees_with_the_bytes():
    outcomes = {True: 0, False: 0}

    @profile(400)
    @given(faulty())
    def check(cluster):
        right = is_right(cluster)
        outcomes[right] += 1
        assert right == bytes_are_right(cluster)

    check()
    assert min(outcomes.values()) > 10


# ------------------------------------------------------------------------------------------------ one fault of a kind


def region(name="kv", layer=0, base=1 << 20, rows=4, row=8, **fields):
    return Region(name, layer, base, rows * row, 8, rows=rows, row_bytes=row, **fields)


def one(*regions, replica=(0, 1)):
    """A layout of 4 tokens a page, regions at addresses of their own."""
    placed = [
        Region(
            r.name, r.layer, (number + 1) << 20, r.page_bytes, r.num_pages, tokens=r.tokens, rows=r.rows,
            row_bytes=r.row_bytes, space=r.space, heads=r.heads, interleave=r.interleave,
        )
        for number, r in enumerate(regions)
    ]  # fmt: skip
    return Layout(placed, page_size=4, replica=replica)


def state(*heads):
    held = Heads(*heads, 2)
    return region("state", rows=1, row=16 * (held.stop - held.start), tokens=1, space="state", heads=held)


def test_a_replicated_region_beside_a_split_one():
    """A replica of the whole layout leaves half of the state unsent; without one, the latent rows are sent twice."""
    decode = one(region("mla"), state(0, 2))
    with pytest.raises(
        PairingError, match=r"nobody sends region state layer 0, head 0 of 2, all rows, to decode rank 0"
    ):
        Cluster([one(region("mla"), state(r, r + 1), replica=(r, 2)) for r in range(2)], [decode]).check()
    with pytest.raises(PairingError, match=r"ranks 0 and 1 both send region mla layer 0, all heads, all rows"):
        Cluster([one(region("mla"), state(r, r + 1)) for r in range(2)], [decode]).check()
    parts = [one(region("mla"), replica=(r, 2)) for r in range(2)] + [one(state(r, r + 1)) for r in range(2)]
    Cluster(parts, [decode]).check()


def test_a_component_that_no_prefill_rank_sends():
    prefill, decode = [one(region("kv"))], [one(region("kv"), region("swa_state"), region("swa_state", 3))]
    with pytest.raises(
        PairingError, match=r"^nobody sends region swa_state layer 0, 3, all heads, all rows, to decode"
    ):
        Cluster(prefill, decode).check()
    Cluster(prefill, decode, allow_unwritten=["swa_state"]).check()
    with pytest.raises(PairingError, match=r"^nobody sends region swa_state layer 3, all"):
        Cluster(prefill, decode, allow_unwritten=[("swa_state", 0)]).check()


def test_a_head_that_no_rank_sends_and_one_that_two_send():
    prefill = [one(region("k", row=2, heads=Heads(h, h + 1, 4))) for h in (0, 1, 2, 2)]
    with pytest.raises(PairingError) as caught:
        Cluster(prefill, [one(region("k", heads=Heads(0, 4, 4)))]).check()
    assert str(caught.value) == (
        "prefill ranks 2 and 3 both send region k layer 0, head 2 of 4, all rows, to decode rank 0; "
        "nobody sends region k layer 0, head 3 of 4, all rows, to decode rank 0"
    )


def test_rows_that_no_rank_sends():
    shares = [one(region("k", rows=2, tokens=4 * 3 // 2, interleave=Interleave(3, r))) for r in (0, 2)]
    decode = [one(region("k", rows=2, tokens=4, interleave=Interleave(2, r))) for r in range(2)]
    with pytest.raises(PairingError) as caught:
        Cluster(shares, decode).check()
    assert str(caught.value) == (
        "nobody sends region k layer 0, all heads, rows at positions 4 modulo 6, to decode rank 0; "
        "nobody sends region k layer 0, all heads, rows at positions 1 modulo 6, to decode rank 1"
    )


def stage(layers, heads, total=2):
    row = 4 * (heads[1] - heads[0])
    return one(*(region("k", layer, row=row, heads=Heads(*heads, total)) for layer in layers))


def test_stages_that_overlap_in_part_need_no_list_of_names():
    prefill = [stage(layers, (0, 2)) for layers in (range(0, 2), range(2, 4), range(4, 6))]
    decode = [stage(layers, (r, r + 1)) for layers in (range(0, 3), range(3, 6)) for r in range(2)]
    cluster = Cluster(prefill, decode)
    cluster.check()
    sent = [[len(cluster.pairing(i, j).entries) for j in range(4)] for i in range(3)]
    assert sent == [[2, 2, 0, 0], [1, 1, 1, 1], [0, 0, 2, 2]]
    with pytest.raises(PairingError, match="has no destination"):
        pair(prefill[1], decode[0])
    with pytest.raises(IndexError, match="decode rank 4 is not one of the 4"):
        cluster.pairing(0, 4)


def test_a_layer_that_no_decode_stage_holds():
    prefill = [stage(range(0, 2), (0, 2)), stage(range(2, 3), (0, 2))]
    cluster = Cluster(prefill, [stage((0, 2), (0, 2))])
    with pytest.raises(PairingError, match=r"no decode rank holds region k layer 1 of the prefill side \(rank 0 has"):
        cluster.check()
    with pytest.raises(PairingError, match=r"prefill rank 0 and decode rank 0: source region k layer 1 has no"):
        cluster.pairing(0, 0)
    Cluster(prefill, [stage((0, 2), (0, 2))], allow_unsent=[("k", 1)]).check()


def test_what_pair_refuses_is_refused_with_the_ranks():
    good, bad = one(region("kv", 0), region("kv", 1)), one(region("kv", 0), region("kv", 1, row=9))
    with pytest.raises(PairingError, match=r"prefill rank 0 and decode rank 1: region kv layer 1: 8 bytes a row"):
        Cluster([good], [good, bad]).check()
    overlapping = Layout([region("kv", 0), region("kv", 1, base=(1 << 20) + 8)], page_size=4)
    with pytest.raises(PairingError, match=r"decode rank 1: destination region kv layer 0 .* overlap"):
        Cluster([good], [good, overlapping]).check()
    two_lists = one(region("kv", 0), region("kv", 1, space="host"))
    with pytest.raises(PairingError, match=r"prefill rank 0 and decode rank 0: space 'device': .* one list of source"):
        Cluster([two_lists], [good]).check()


def test_interleaves_that_take_too_long_are_refused():
    sizes = 65521, 65519  # primes
    ranks = [one(region("k", rows=1, tokens=n, interleave=Interleave(n, 0))) for n in sizes]
    with pytest.raises(PairingError, match="interleaves of 65519, 65521 repeat together only after"):
        Cluster(ranks[:1], ranks[1:]).check()


def test_only_a_few_faults_are_named():
    decode = [one(region("k", rows=1, tokens=9, interleave=Interleave(9, r))) for r in range(9)]
    with pytest.raises(PairingError, match=r"decode rank 4; and 4 more$"):
        Cluster([one(region("other"))], [*decode, one(region("other"))]).check()


def test_unsent_regions_are_names_or_names_with_layers():
    src, dst = one(region("kv", 0), region("kv", 1)), one(region("kv", 0))
    assert len(pair(src, dst, allow_unsent=[("kv", 1), ("of another stage", 2)]).entries) == 1
    with pytest.raises(PairingError, match="region kv layer 1 has no destination"):
        pair(src, dst, allow_unsent=[("kv", 2)])
    with pytest.raises(TypeError, match=r"names and \(name, layer\) pairs, not 3"):
        pair(src, dst, allow_unsent=[3])
    with pytest.raises(TypeError, match="decode rank 0 must be a Layout, not int"):
        Cluster([src], [3])
