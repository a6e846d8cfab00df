"""`Cluster`: who is paired with whom, and what `check` says of one fault of each kind. See test_cluster_drawn.py."""

import pytest

from kvplan import Cluster, Heads, Interleave, Layout, PairingError, Region, pair


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


def test_heads_and_rows_that_no_decode_rank_holds():
    """A decode rank that is left out: nothing is missing on the others, and its part would be lost."""
    prefill = [one(region("k", row=4, heads=Heads(2 * r, 2 * r + 2, 4))) for r in range(2)]
    decode = [one(region("k", row=2, heads=Heads(r, r + 1, 4))) for r in (0, 1, 3)]
    with pytest.raises(PairingError) as caught:
        Cluster(prefill, decode).check()
    assert str(caught.value) == (
        "no decode rank holds region k layer 0, head 2 of 4, all rows, which prefill rank 1 holds (name it in "
        "allow_unsent if it is not meant to be sent)"
    )
    for allowed in ("k", ("k", 0)):
        Cluster(prefill, decode, allow_unsent=[allowed]).check()
    with pytest.raises(PairingError, match="no decode rank holds"):
        Cluster(prefill, decode, allow_unsent=[("k", 1)]).check()
    shares = [one(region("k", rows=2, tokens=6, interleave=Interleave(3, r))) for r in range(2)]
    with pytest.raises(PairingError, match=r"rows at positions 2 modulo 3, which prefill rank 0 holds"):
        Cluster([one(region("k"))], shares).check()
    # What two replicas hold, and one of them sends, is named once, for both.
    copies = [one(region("k", heads=Heads(0, 4, 4)), replica=(r, 2)) for r in range(2)]
    with pytest.raises(
        PairingError, match=r"^no decode rank holds [^;]*head 2 of 4[^;]* prefill rank 0, 1 holds [^;]*$"
    ):
        Cluster(copies, decode).check()


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
