"""On random calls kvplan's descriptors move the same bytes as SGLang's own, in each function that it serves.

Only what SGLang does right is drawn here; test_misrouted.py has the rest.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import by_hand
import pytest
from by_hand import EXECUTOR, PAGES, bases, ids, kv_args, manager, merged
from sglang.srt.disaggregation.base.conn import StateType

CALLS = max(500, int(os.environ.get("KVPLAN_EXAMPLES", 0)))  # random calls of each function
SRC, DST = 1 << 40, 1 << 44

Call = Callable[[Any], int]  # a manager -> what its function returned
Drawn = tuple[Any, dict[str, Any], Call]  # KVArgs, fields of the manager, the call


def whole_pages(rng: random.Random) -> Drawn:
    """send_kvcache: every pool, stages, two index spaces, index batches, a call a layer."""
    kind = rng.choice(["v4", "latent", "halves", "layer ids"])
    fields: dict[str, Any] = {"is_mla_backend": kind != "halves"}
    start, draft, layer_ids, dst_layers, ratios, two = 0, 0, [], [], None, False
    if kind == "v4":
        ratios = [rng.choice([0, 4, 128]) for _ in range(rng.randrange(3, 12))]
        start = rng.randrange(len(ratios)) if rng.random() < 0.5 else 0
        end = rng.randrange(start + 1, len(ratios) + 1) if start else len(ratios)
        size = {4: 1024, 128: 192}
        stage = ratios[start:end]
        mine = [size[4]] * stage.count(4) + [256] * stage.count(4) + [size[128]] * stage.count(128)
        whole = [size[4]] * ratios.count(4) + [256] * ratios.count(4) + [size[128]] * ratios.count(128)
        two = start == 0 and end == len(ratios) and rng.random() < 0.7
        if not mine or (len(mine) == len(whole) and start):
            return whole_pages(rng)
    elif kind == "latent":
        layers, draft = rng.randrange(1, 8), rng.choice([0, 0, 1])
        start = rng.choice([0, 2])
        end = start + layers
        mine = [768] * layers + [320] * draft
        whole = [768] * (end + (rng.randrange(3) if start else 0)) + [320] * draft
        two = bool(draft) and rng.random() < 0.7
        if len(mine) == len(whole) and start:
            return whole_pages(rng)
    elif kind == "halves":
        layers = rng.randrange(2, 8)
        end = layers
        extra = rng.choice([0, 1]) if layers > 2 else 0  # a decode-only draft, smaller than the model
        mine, whole = [512] * (2 * layers), [512] * (2 * layers) + [512] * (2 * extra)
    else:
        total = rng.sample(range(60), rng.randrange(1, 9))
        held = sorted(rng.sample(total, rng.randrange(1, len(total) + 1)))
        layer_ids, dst_layers, end = held * 2, total * 2, None
        sizes = {layer: rng.choice([256, 512]) for layer in total}
        mine, whole = [sizes[x] for x in layer_ids], [sizes[x] for x in dst_layers]
        fields["is_mla_backend"] = rng.random() < 0.5
    fields["pp_size"] = 1 if len(mine) == len(whole) or kind == "halves" else 2
    fields["max_transfer_batch_indices"] = rng.choice([0, 0, 7, 16])
    fields["enable_custom_mem_pool"] = rng.random() < 0.25
    args = kv_args(kv_data_ptrs=bases(rng, mine, SRC), kv_item_lens=mine, kv_layer_ids=layer_ids, prefill_end_layer=end,
                   num_draft_entries=draft, mla_compression_ratios=ratios, prefill_start_layer=start)  # fmt: skip
    pointers = bases(rng, whole, DST)
    count = rng.randrange(0, 48)
    src, dst, device = ids(rng, count), ids(rng, count), ids(rng, count) if two else None
    return (
        args,
        fields,
        lambda made: made.send_kvcache(
            "peer", src, pointers, dst, EXECUTOR, dst_layer_ids=dst_layers, dst_device_kv_indices=device
        ),
    )


def heads(rng: random.Random) -> Drawn:
    """send_kvcache_slice: TP m to n, with and without replicated heads."""
    total, src_tp, dst_tp = (rng.choice([1, 2, 4, 8]) for _ in range(3))
    if src_tp == dst_tp:
        return heads(rng)
    page, head, layers = rng.choice([1, 4, 16]), rng.choice([32, 64]), rng.randrange(1, 4)
    small, large = sorted((src_tp, dst_tp))
    each = rng.randrange(small)
    ranks = (each, each * (large // small) + rng.randrange(large // small))
    rank, dst_rank = ranks if src_tp < dst_tp else ranks[::-1]
    held, dst_held = max(1, total // src_tp), max(1, total // dst_tp)
    mine, whole = [held * head * page] * (2 * layers), [dst_held * head * page] * (2 * layers)
    layer_ids = rng.sample(range(50), layers) * 2 if rng.random() < 0.3 else []
    args = kv_args(kv_data_ptrs=bases(rng, mine, SRC), kv_item_lens=mine, kv_layer_ids=layer_ids, page_size=page,
                   kv_head_num=held, total_kv_head_num=total, engine_rank=rank)  # fmt: skip
    pointers, count = bases(rng, whole, DST), rng.randrange(0, 12)
    src, dst = ids(rng, count), ids(rng, count)
    fields = {"is_mla_backend": False, "attn_tp_size": src_tp}
    return (
        args,
        fields,
        lambda made: made.send_kvcache_slice(
            "peer", src, pointers, dst, dst_rank, dst_tp, whole[0], EXECUTOR, layer_ids
        ),
    )


def context_parallel(rng: random.Random) -> Drawn:
    """send_kvcache_dcp: chunks at any place, shared prefixes, draft entries whose heads may differ, stages."""
    page, size = rng.choice([2, 4, 16]), rng.choice([2, 4])
    rank, layers, draft = rng.randrange(size), rng.randrange(1, 4), rng.choice([0, 1, 2])
    row, draft_row = 96, 64
    hybrid = rng.random() < 0.5
    scale = rng.choice([1, 1, 2]) if hybrid and draft else 1  # decode's draft rows are as wide, or half
    virtual = page * size
    start = rng.choice([0, 0, 1, 3])
    whole = start + layers + (rng.randrange(3) if start and not draft else 0)
    mine = [row * page] * layers + [draft_row * page] * draft
    theirs = [row * page] * whole + [draft_row // scale * virtual] * draft
    tokens_before = rng.randrange(0, 3) * page
    tokens = rng.randrange(1, 6 * page)
    prefix = rng.randrange(0, 3) * virtual
    src = ids(rng, -(-tokens // page))
    dst = ids(rng, -(-(tokens_before + tokens) // virtual) + rng.randrange(2))
    args = kv_args(kv_data_ptrs=bases(rng, mine, SRC), kv_item_lens=mine, page_size=page, num_draft_entries=draft,
                   prefill_start_layer=start, prefill_end_layer=start + layers, hidden_kv_layers=whole,
                   draft_kv_layers=draft)  # fmt: skip
    pointers = bases(rng, theirs, DST)
    said = scale > 1 or rng.random() < 0.5
    fields = {"is_mla_backend": not hybrid, "is_hybrid_mla_backend": hybrid, "pp_size": 2 if start else 1,
              "enable_custom_mem_pool": rng.random() < 0.25}  # fmt: skip
    return args, fields, lambda made: made.send_kvcache_dcp(
        "peer", src, pointers, dst, dcp_token_item_lens=[each // page for each in mine], dst_dcp_size=size,
        dst_dcp_rank=rank, src_page_offset=tokens_before // page, decode_prefix_len=prefix, num_kv_tokens=tokens,
        executor=EXECUTOR, dst_layer_ids=[], pack_buffer=None, dst_kv_item_lens=theirs if said else [],
        dst_tp_rank=rank, dst_attn_tp_size=scale,
    )  # fmt: skip


def state_pages(rng: random.Random) -> Drawn:
    """_send_kvcache_generic: state components with layer ids, elided entries, stages, or alike on both sides."""
    kind = rng.choice(["ids", "alike", "window", "c128", "ring", "latent"])
    start, end, ratios, mine_ids, their_ids, state = 0, None, None, [], [], StateType.SWA
    fields: dict[str, Any] = {"is_mla_backend": True, "pp_size": 1}
    if kind == "ids":
        total = rng.sample(range(60), rng.randrange(1, 9))
        mine_ids = rng.sample(total, rng.randrange(1, len(total) + 1))
        their_ids, state = total, rng.choice([StateType.DSA, StateType.SWA, StateType.QSA_COMPRESSED])
        sizes = {layer: rng.choice([0, 128, 512] if state == StateType.DSA else [128, 512]) for layer in total}
        mine, theirs = [sizes[x] for x in mine_ids], [sizes[x] for x in their_ids]
    elif kind == "alike":
        mine = theirs = [rng.choice([64, 256]) for _ in range(rng.randrange(2, 8, 2))]
        fields["is_mla_backend"] = rng.random() < 0.5
    elif kind == "latent":
        start, layers = rng.randrange(1, 4), rng.randrange(1, 4)
        mine, theirs = [128] * layers, [128] * (start + layers)
    else:
        ratios = [rng.choice([0, 4, 128]) for _ in range(rng.randrange(3, 10))]
        start = rng.randrange(len(ratios))
        end = rng.randrange(start + 1, len(ratios) + 1)
        stage = ratios[start:end]
        state = {"window": StateType.SWA, "c128": StateType.DSV4_REQUEST_STATE, "ring": StateType.SWA_RING}[kind]
        counts = {"window": [len(stage) + 2 * stage.count(4), len(ratios) + 2 * ratios.count(4)],
                  "c128": [stage.count(128), ratios.count(128)], "ring": [len(stage), len(ratios)]}[kind]  # fmt: skip
        mine, theirs = [256] * counts[0], [256] * counts[1]
    if kind not in ("ids", "alike"):
        fields["pp_size"] = 2
        if (
            len(mine) == len(theirs)
            or not mine
            or len(theirs) == 2 * (ratios or []).count(4) + (ratios or []).count(128)
        ):
            return state_pages(rng)
    pointers = bases(rng, mine, SRC)
    args = kv_args(state_data_ptrs=[pointers], state_data_lens=[[PAGES * each for each in mine]], prefill_end_layer=end,
                   state_item_lens=[mine], mla_compression_ratios=ratios, prefill_start_layer=start)  # fmt: skip
    others, count = bases(rng, theirs, DST), rng.randrange(0, 20)
    src, dst = ids(rng, count), ids(rng, count)
    return args, fields, lambda made: made._send_kvcache_generic(
        mooncake_session_id="peer", src_data_ptrs=pointers, dst_data_ptrs=others, item_lens=mine,
        prefill_data_indices=src, dst_data_indices=dst, executor=EXECUTOR, state_type=state, src_layer_ids=mine_ids,
        dst_layer_ids=their_ids, dst_item_lens=theirs, bootstrap_room=1,
    )  # fmt: skip


def window_heads(rng: random.Random) -> Drawn:
    """_send_swa_state_slice: heads of the sliding window."""
    args, fields, _ = heads(rng)
    pointers, mine = args.kv_data_ptrs, args.kv_item_lens
    args.state_data_ptrs, args.state_data_lens, args.state_item_lens = [pointers], [args.kv_data_lens], [mine]
    total, src_tp, rank = args.total_kv_head_num, fields["attn_tp_size"], args.engine_rank
    dst_tp = rng.choice([tp for tp in (1, 2, 4, 8) if tp != src_tp])
    small, large = sorted((src_tp, dst_tp))
    dst_rank = rank * (large // small) + rng.randrange(large // small) if src_tp < dst_tp else rank // (large // small)
    width = mine[0] // max(1, total // src_tp) * max(1, total // dst_tp)
    theirs = [width] * len(mine)
    others, count = bases(rng, theirs, DST), rng.randrange(0, 12)
    src, dst = ids(rng, count).tolist(), ids(rng, count).tolist()
    return args, fields, lambda made: made._send_swa_state_slice(
        req=SimpleNamespace(mooncake_session_id="peer", room=1), prefill_swa_page_indices=src,
        src_state_data_ptrs=pointers, src_state_item_lens=mine, dst_state_data_ptrs=others, dst_swa_page_indices=dst,
        dst_state_item_lens=theirs, dst_tp_rank=dst_rank, dst_attn_tp_size=dst_tp, executor=EXECUTOR,
    )  # fmt: skip


def recurrent_state(rng: random.Random) -> Drawn:
    """_send_mamba_state_slice: sub-blocks, several rows before the sliced axis, replicated items, layer ids."""
    src_tp, dst_tp = rng.sample([1, 2, 4], 2)
    small, large = sorted((src_tp, dst_tp))
    each = rng.randrange(small)
    ranks = (each, each * (large // small) + rng.randrange(large // small))
    rank, dst_rank = ranks if src_tp < dst_tp else ranks[::-1]
    layers = rng.randrange(1, 5)
    mine, theirs, dims, their_dims, groups, outers = [], [], [], [], [], []
    for _ in range(layers):
        outer, kind = rng.choice([1, 1, 3]), rng.choice(["plain", "groups", "replicated"])
        parts = [8 * rng.randrange(1, 4), 8 * rng.randrange(1, 4), 8 * rng.randrange(1, 4)]
        full, unit = sum(parts), rng.choice([2, 16])
        if kind == "replicated":
            dims.append(0), their_dims.append(0), mine.append(full * unit), theirs.append(full * unit)
            groups.append(None), outers.append(1)
            continue
        dims.append(full // src_tp), their_dims.append(full // dst_tp)
        mine.append(full // src_tp * unit * outer), theirs.append(full // dst_tp * unit * outer)
        groups.append(parts if kind == "groups" else None), outers.append(outer)
    layer_ids = rng.sample(range(50), layers) if rng.random() < 0.5 else []
    their_ids = list(layer_ids)
    pointers, others = bases(rng, mine, SRC), bases(rng, theirs, DST)
    args = kv_args(state_data_ptrs=[pointers], state_data_lens=[[PAGES * x for x in mine]], state_item_lens=[mine],
                   engine_rank=rank)  # fmt: skip
    src, dst = rng.randrange(PAGES), rng.randrange(PAGES)
    fields = {"is_mla_backend": False, "attn_tp_size": src_tp, "state_tp_size": src_tp}
    return args, fields, lambda made: made._send_mamba_state_slice(
        SimpleNamespace(mooncake_session_id="peer", room=1), [src], pointers, mine, dims, others, [dst], theirs,
        their_dims, dst_rank, dst_tp, groups, outers, layer_ids, their_ids,
    )  # fmt: skip


@pytest.mark.parametrize(
    "draw", [whole_pages, heads, context_parallel, state_pages, window_heads, recurrent_state], ids=lambda f: f.__name__
)
def test_the_same_bytes_go_to_the_same_places(draw: Callable[[random.Random], Drawn]) -> None:
    moved = 0
    for seed in range(CALLS):
        args, fields, call = draw(random.Random(seed))
        theirs, ours = (manager(planned, args, **fields) for planned in (False, True))
        assert call(theirs) == call(ours) == 0, seed
        want, found = merged(theirs.engine.calls), merged(ours.engine.calls)
        assert want == found, f"seed {seed}: {len(want)} and {len(found)} stretches"
        moved += bool(want)
    assert moved > CALLS // 2


@pytest.mark.parametrize("draw", [whole_pages, heads, context_parallel, state_pages])
def test_an_engine_s_failure_is_told_as_it_is(draw: Callable[[random.Random], Drawn]) -> None:
    for seed in range(40):
        args, fields, call = draw(random.Random(seed))
        theirs, ours = (manager(planned, args, **fields) for planned in (False, True))
        theirs.engine.answer = ours.engine.answer = -1
        assert call(theirs) == call(ours)
        assert not len(ours.peers) or not ours.engine.calls  # the pairings with that peer are dropped


def test_a_call_a_layer_is_a_call_an_entry() -> None:
    args = kv_args(kv_data_ptrs=[SRC, SRC + (1 << 20)], kv_item_lens=[512, 512], prefill_end_layer=2)
    made = manager(True, args, enable_custom_mem_pool=True)
    source = ids(random.Random(0), 20)
    assert made.send_kvcache("peer", source, [DST, DST + (1 << 20)], ids(random.Random(1), 20), EXECUTOR) == 0
    assert len(made.engine.calls) == 2
    assert {call[0][0] >> 20 for call in made.engine.calls} == {SRC >> 20, (SRC >> 20) + 1}


def test_a_failed_call_of_a_layer_is_the_last_of_its_thread() -> None:
    sizes = [512] * 20
    args = kv_args(kv_data_ptrs=bases(random.Random(0), sizes, SRC), kv_item_lens=sizes, prefill_end_layer=20)
    made, pages = manager(True, args, enable_custom_mem_pool=True), ids(random.Random(0), 20)
    made.engine.answer = -7
    assert made.send_kvcache("peer", pages, bases(random.Random(1), sizes, DST), pages, EXECUTOR) == -7
    assert 1 <= len(made.engine.calls) <= 2  # EXECUTOR has two threads


def test_index_batches_are_planned_before_the_first_is_sent() -> None:
    args = kv_args(kv_data_ptrs=[SRC], kv_item_lens=[512], prefill_end_layer=1)
    made = manager(True, args, max_transfer_batch_indices=8)
    good, bad = by_hand.ids(random.Random(0), 20), by_hand.ids(random.Random(1), 20)
    assert made.send_kvcache("peer", good, [DST], bad, EXECUTOR) == 0
    assert len(made.engine.calls) == 3
    bad[19] = -5
    with pytest.raises(ValueError, match=r"page id -5 at position (19|3)"):
        made.send_kvcache("peer", good, [DST], bad, EXECUTOR)
    assert len(made.engine.calls) == 3
