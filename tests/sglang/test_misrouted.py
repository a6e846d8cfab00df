"""Where SGLang sends bytes to wrong places, kvplan is right, or refuses with the reason."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from by_hand import EXECUTOR, PAGES, bases, ids, kv_args, manager, merged

from kvplan import Layout, PairingError
from kvplan.integrations.sglang import names
from kvplan.integrations.sglang.names import NotToldError
from kvplan.integrations.sglang.regions import Buffers

LAYERS, STAGES, ITEM = 94, [(0, 24), (24, 48), (48, 71), (71, 94)], 512
SRC, DST = 1 << 40, 1 << 44


def stage(start: int, end: int, planned: bool = True, **fields: Any) -> Any:
    """A prefill stage of a model with plain K and V."""
    sizes = [ITEM] * (2 * (end - start))
    args = kv_args(kv_data_ptrs=bases(random.Random(start), sizes, SRC), kv_item_lens=sizes, prefill_start_layer=start,
                   prefill_end_layer=end)  # fmt: skip
    return manager(planned, args, is_mla_backend=False, pp_size=len(STAGES), **fields)


def told(pointers: list[int], keys: list[names.Key], sizes: list[int]) -> Layout:
    """The layout that a decode process with kvplan sends."""
    return Buffers(keys, pointers, sizes, [PAGES] * len(keys)).layout(1, rows=1)


def wrong_entries(made: Any, pointers: list[int], src_names: list[names.Key], dst_names: list[names.Key]) -> list[Any]:
    """Pairs of names that a call moved bytes between, where they differ."""
    of_src = dict(zip(made.kv_args.kv_data_ptrs, src_names, strict=True))
    of_dst = dict(zip(pointers, dst_names, strict=True))

    def name(table: dict[int, names.Key], address: int) -> names.Key:
        return table[max(base for base in table if base <= address)]

    moved = {(name(of_src, src), name(of_dst, dst)) for src, dst, _ in merged(made.engine.calls)}
    assert {src for src, _ in moved} == set(src_names)
    return sorted(pair for pair in moved if pair[0] != pair[1])


@pytest.mark.parametrize("start, end", STAGES)
def test_plain_mha_from_four_stages_to_one(start: int, end: int) -> None:
    pointers = bases(random.Random(9), [ITEM] * (2 * LAYERS), DST)
    src, dst = ids(random.Random(1), 9), ids(random.Random(2), 9)
    theirs, alone, both = stage(start, end, planned=False), stage(start, end), stage(start, end)
    mine, whole = names.halves(end - start, start), names.halves(LAYERS)
    assert theirs.send_kvcache("peer", src, pointers, dst, EXECUTOR) == 0
    assert wrong_entries(theirs, pointers, mine, whole), "SGLang has become right: the refusal below can go"
    with pytest.raises(NotToldError, match="where its V entries begin"):
        alone.send_kvcache("peer", src, pointers, dst, EXECUTOR)
    assert not alone.engine.calls
    both.peers.register("peer", told(pointers, whole, [ITEM] * len(whole)))
    assert both.send_kvcache("peer", src, pointers, dst, EXECUTOR) == 0
    assert not wrong_entries(both, pointers, mine, whole)


def test_plain_mha_refused_in_a_room_fails_that_room_alone() -> None:
    made = stage(0, 24, request_status={5: 2, 6: 2}, failure_lock=None)
    failed: dict[int, str] = {}
    made.conclude_failure = lambda *, bootstrap_room, failure_reason: failed.update({bootstrap_room: failure_reason})
    made.current.room = 5
    pointers = bases(random.Random(9), [ITEM] * (2 * LAYERS), DST)
    page = np.array([1], np.int32)
    assert made.send_kvcache("peer", page, pointers, page, EXECUTOR) == 0
    assert list(failed) == [5] and "where its V entries begin" in failed[5]
    assert not made.engine.calls


RATIOS = [0, 0] + [4 if layer % 2 == 0 else 128 for layer in range(2, 30)]
V4_SIZE = {"c4_kv": 1024, "c4_indexer": 256, "c128_kv": 192, "draft": 1024}


@pytest.mark.parametrize("start, end", [(0, 15), (15, 30)])
@pytest.mark.parametrize("two_spaces", [False, True])
def test_deepseek_v4_from_two_stages_to_a_decode_with_a_draft(start: int, end: int, two_spaces: bool) -> None:
    whole = names.compressed(RATIOS, 0, 30, 2 * RATIOS.count(4) + RATIOS.count(128)) or []
    whole = whole + names.drafts(2)
    part = RATIOS[start:end]
    mine = names.compressed(RATIOS, start, end, 2 * part.count(4) + part.count(128)) or []
    sizes = [V4_SIZE[name] for name, _ in mine]
    args = kv_args(kv_data_ptrs=bases(random.Random(start), sizes, SRC), kv_item_lens=sizes, prefill_end_layer=end,
                   prefill_start_layer=start, mla_compression_ratios=RATIOS)  # fmt: skip
    pointers = bases(random.Random(9), [V4_SIZE[name] for name, _ in whole], DST)
    src, host = ids(random.Random(1), 9), ids(random.Random(2), 9)
    device = ids(random.Random(3), 9) if two_spaces else None
    for planned in (False, True):
        made = manager(planned, args, pp_size=2)
        try:
            code = made.send_kvcache("peer", src, pointers, host, EXECUTOR, dst_device_kv_indices=device)
        except (IndexError, AssertionError):
            assert not planned  # SGLang's own
            continue
        assert code == 0
        if planned:
            assert not wrong_entries(made, pointers, mine, whole)
            place = dict(zip(pointers, whole, strict=True))
            for _, dst, nbytes in (d for call in made.engine.calls for d in call):
                base = max(base for base in pointers if base <= dst)
                numbers = host if device is None or place[base][0] == "c4_kv" else device
                item = V4_SIZE[place[base][0]]
                assert all((dst - base) // item + k in numbers for k in range(nbytes // item))


def test_a_decode_of_latent_attention_with_a_draft_of_its_own() -> None:
    sizes = [768] * 3
    args = kv_args(kv_data_ptrs=bases(random.Random(0), sizes, SRC), kv_item_lens=sizes, prefill_end_layer=3)
    pointers = bases(random.Random(9), [*sizes, 320], DST)
    src, host, device = (ids(random.Random(k), 9) for k in range(3))
    with pytest.raises(ValueError, match="draft KV buffer"):
        manager(False, args).send_kvcache("peer", src, pointers, host, EXECUTOR, dst_device_kv_indices=device)
    made = manager(True, args)
    assert made.send_kvcache("peer", src, pointers, host, EXECUTOR, dst_device_kv_indices=device) == 0
    keys = [("kv", layer) for layer in range(3)]
    assert not wrong_entries(made, pointers, keys, [*keys, ("draft", 0)])


@pytest.mark.parametrize(
    "count, draft, others, reason",
    [(8, 2, 6, "draft"), (8, 0, 6, "K and V of 4 layers"), (8, 2, 10, "2 draft entries, decode 10")],
)
def test_counts_that_do_not_tell_are_refused(count: int, draft: int, others: int, reason: str) -> None:
    args = kv_args(kv_data_ptrs=bases(random.Random(0), [64] * count, SRC), kv_item_lens=[64] * count,
                   num_draft_entries=draft, prefill_end_layer=(count - draft) // 2)  # fmt: skip
    made = manager(True, args, is_mla_backend=False)
    page = np.array([1], np.int32)
    with pytest.raises(NotToldError, match=reason):
        made.send_kvcache("peer", page, bases(random.Random(1), [64] * others, DST), page, EXECUTOR)


def test_page_sizes_that_differ_are_refused() -> None:
    args = kv_args(kv_data_ptrs=[SRC], kv_item_lens=[64], prefill_end_layer=1)
    pointers, page = [DST], np.array([1], np.int32)
    registered = SimpleNamespace(dst_kv_ptrs=pointers, dst_kv_item_lens=[128])
    made = manager(True, args, decode_kv_args_table={"peer": registered})
    with pytest.raises(PairingError, match="64 bytes a row for 1 heads on the source, 128 for 1 on the destination"):
        made.send_kvcache("peer", page, pointers, page, EXECUTOR)


def test_a_layout_frame_that_names_other_buffers_is_not_used() -> None:
    pointers = bases(random.Random(9), [ITEM] * (2 * LAYERS), DST)
    made = stage(0, 24)
    keys = names.halves(LAYERS)
    made.peers.register("peer", told(pointers[::-1], keys, [ITEM] * len(keys)))
    page = np.array([1], np.int32)
    with pytest.raises(NotToldError, match="where its V entries begin"):
        made.send_kvcache("peer", page, pointers, page, EXECUTOR)


def test_a_peer_that_registers_anew_is_paired_anew() -> None:
    args = kv_args(kv_data_ptrs=[SRC], kv_item_lens=[64], prefill_end_layer=1)
    made, page = manager(True, args), np.array([1], np.int32)
    for base in (DST, DST + 4096):
        assert made.send_kvcache("peer", page, [base], page, EXECUTOR) == 0
        assert made.engine.calls[-1] == [(SRC + 64, base + 64, 64)]
    assert len(made.peers) == 1
    made.peers.register("peer", None)
    assert len(made.peers) == 0
