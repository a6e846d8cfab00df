"""SGLang's Ascend back end with kvplan: the same bytes as SGLang's own functions, and what SGLang refuses there.

No NPU: by hand the engine is a recorder. test_ascend_two_processes.py moves bytes.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import test_equal
import test_rooms
from by_hand import ASCEND, EXECUTOR, MOONCAKE, PAGES, Recorder, bases, ids, kv_args, manager, merged
from sglang.srt.disaggregation import decode
from sglang.srt.disaggregation.ascend import conn
from sglang.srt.disaggregation.ascend.conn import AscendKVManager, AscendKVSender, AscendStateType
from sglang.srt.disaggregation.base.conn import KVPoll, StateType
from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend
from test_equal import CALLS, DST, SRC, Drawn
from test_nixl_gate import gate_of_sglang

from kvplan import PlanError
from kvplan.integrations.sglang import gate, handover
from kvplan.integrations.sglang.ascend import PlannedAscendManager
from kvplan.integrations.sglang.names import NotToldError
from kvplan.integrations.sglang.seam import choose


@pytest.fixture(autouse=True)
def last_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's AscendKVManager asks whether this is the last pipeline stage. Here every stage with a draft is."""
    monkeypatch.setattr(conn, "get_parallel", lambda: SimpleNamespace(pp_group=SimpleNamespace(is_last_rank=True)))


def grouped(rng: random.Random) -> tuple[Any, dict[str, Any], list[int], list[int]]:
    """Latent attention in groups: K, rope keys, perhaps index keys, each of all layers; then the same of a draft.

    Without stages, some layers may have no index keys of their own.

    Returns:
        KVArgs, fields of the manager, where decode's buffers lie, and the bytes of a page of each.
    """
    groups, layers, draft = rng.choice([2, 3]), rng.randrange(1, 6), rng.choice([0, 0, 1, 2])
    start = rng.choice([0, 0, 2, 3])
    whole = start + layers + (0 if draft or not start else rng.randrange(3))
    of_decode = draft or rng.choice([0, 1])  # decode may have a draft that prefill lacks
    sizes = [768, 96, 192][:groups]
    single = not start and whole == layers
    shared = rng.randrange(layers) if single and groups == 3 else 0
    mine, theirs = ([size for size in sizes for _ in range(held - (shared if size == 192 else 0))]
                    + [size for size in sizes for _ in range(drafts)]
                    for held, drafts in ((layers, draft), (whole, of_decode)))  # fmt: skip
    args = kv_args(
        kv_data_ptrs=bases(rng, mine, SRC), kv_item_lens=mine, prefill_start_layer=start,
        prefill_end_layer=start + layers, num_draft_entries=groups * draft, kv_buf_groups=groups,
        hidden_kv_layers=whole, draft_kv_layers=draft,
    )  # fmt: skip
    return args, {"pp_size": 1 if single else 2}, bases(rng, theirs, DST), theirs


def whole_pages(rng: random.Random) -> Drawn:
    """send_kvcache: plain K and V, latent attention in groups, DeepSeek-V4, layer ids; stages, a call a layer."""
    kind = rng.choice(["groups", "groups", "v4", "halves", "layer ids"])
    fields: dict[str, Any] = {}
    dst_layers: list[int] = []
    if kind == "groups":
        args, fields, pointers, _ = grouped(rng)
    elif kind == "v4":
        ratios = [rng.choice([0, 4, 128]) for _ in range(rng.randrange(3, 12))]
        start = rng.choice([0, rng.randrange(len(ratios))])
        end = rng.randrange(start + 1, len(ratios) + 1) if start else len(ratios)
        held, whole = ratios[start:end].count(4), ratios.count(4)
        if not held or (held == whole and start):
            return whole_pages(rng)
        mine, theirs = ([1024] * count + [256] * count + [32] * count for count in (held, whole))
        args = kv_args(kv_data_ptrs=bases(rng, mine, SRC), kv_item_lens=mine, prefill_start_layer=start,
                       prefill_end_layer=end, mla_compression_ratios=ratios)  # fmt: skip
        fields, pointers = {"pp_size": 2 if start or held < whole else 1}, bases(rng, theirs, DST)
    elif kind == "halves":
        layers, extra = rng.randrange(1, 8), rng.choice([0, 1])  # a draft that decode alone has
        mine, theirs = [512] * (2 * layers), [512] * (2 * layers) + [64] * (2 * extra)
        args = kv_args(kv_data_ptrs=bases(rng, mine, SRC), kv_item_lens=mine, prefill_end_layer=layers)
        fields, pointers = {"is_mla_backend": False}, bases(rng, theirs, DST)
    else:
        total = sorted(rng.sample(range(60), rng.randrange(1, 9)))
        held_ids = sorted(rng.sample(total, rng.randrange(1, len(total) + 1)))
        sizes = {layer: rng.choice([256, 512]) for layer in total}
        dst_layers = total * 2
        mine, theirs = [sizes[x] for x in held_ids * 2], [sizes[x] for x in dst_layers]
        args = kv_args(kv_data_ptrs=bases(rng, mine, SRC), kv_item_lens=mine, kv_layer_ids=held_ids * 2)
        fields = {"is_mla_backend": False, "is_hybrid_mla_backend": True, "pp_size": 2}
        pointers = bases(rng, theirs, DST)
    fields["enable_custom_mem_pool"] = rng.random() < 0.25
    count = rng.randrange(0, 48)
    src, dst = ids(rng, count), ids(rng, count)
    return args, fields, lambda made: made.send_kvcache("peer", src, pointers, dst, EXECUTOR, dst_layer_ids=dst_layers)


def pages_in_turn(rng: random.Random) -> Drawn:
    """send_kvcache_dcp of pools with index keys: whole pages in turn, chunks at any place, prefixes, stages."""
    args, fields, pointers, theirs = grouped(rng)
    drafts, whole = args.num_draft_entries, args.hidden_kv_layers
    index = args.kv_item_lens.count(192) - drafts // 3
    latent = len(args.kv_item_lens) - drafts - index
    if args.kv_buf_groups != 3 or (2 * index < latent and len(theirs) != len(args.kv_item_lens)):
        return pages_in_turn(rng)  # SGLang counts a third of the entries as index keys, where the sides differ
    page, size = rng.choice([2, 4, 16]), rng.choice([2, 3, 4])
    args.page_size = page
    fields["_dcp_remote_decode_layout"] = [False] * latent + [True] * (index + drafts)
    theirs = [each * (1 if number < 2 * whole else size) for number, each in enumerate(theirs)]
    pointers = bases(rng, theirs, DST)
    count, before = rng.randrange(1, 12), rng.randrange(0, 6)
    prefix, rank = rng.randrange(0, 3) * page * size, rng.randrange(size)
    tokens = count * page - rng.randrange(page) + rng.choice([0, page])  # of a shared chunk this rank has a part
    src, dst = ids(rng, count), ids(rng, -(-(before + count) // size) + rng.randrange(2), PAGES // size)
    said = theirs if rng.random() < 0.5 else []
    return args, fields, lambda made: made.send_kvcache_dcp(
        "peer", src, pointers, dst, dcp_token_item_lens=[each // page for each in args.kv_item_lens],
        dst_dcp_size=size, dst_dcp_rank=rank, src_page_offset=before, decode_prefix_len=prefix, num_kv_tokens=tokens,
        executor=EXECUTOR, dst_layer_ids=[], pack_buffer=None, dst_kv_item_lens=said, dst_tp_rank=rank,
        dst_attn_tp_size=1,
    )  # fmt: skip


def state_of_stages(rng: random.Random) -> Drawn:
    """_send_kvcache_generic: Ascend's state components of DeepSeek-V4, from a stage to the whole model."""
    ratios = [rng.choice([0, 4, 128]) for _ in range(rng.randrange(3, 10))]
    start = rng.randrange(len(ratios))
    end = rng.randrange(start + 1, len(ratios) + 1)
    stage = ratios[start:end]
    state, held, whole = rng.choice([
        (AscendStateType.DSV4_C128, stage.count(128), ratios.count(128)),
        (AscendStateType.DSV4_C4_STATE, 2 * stage.count(4), 2 * ratios.count(4)),
        (StateType.SWA, len(stage), len(ratios)),
    ])  # fmt: skip
    if not held or held == whole or whole == 3 * ratios.count(4):
        return state_of_stages(rng)
    pointers, others = bases(rng, [256] * held, SRC), bases(rng, [256] * whole, DST)
    args = kv_args(
        state_data_ptrs=[pointers], state_data_lens=[[PAGES * 256] * held], state_item_lens=[[256] * held],
        state_types=[state, AscendStateType.DSV4_C4_STATE], prefill_start_layer=start, prefill_end_layer=end,
        mla_compression_ratios=ratios,
    )  # fmt: skip
    count = rng.randrange(0, 20)
    src, dst = ids(rng, count), ids(rng, count)
    return args, {"pp_size": 2}, lambda made: made._send_kvcache_generic(
        mooncake_session_id="peer", src_data_ptrs=pointers, dst_data_ptrs=others, item_lens=[256] * held,
        prefill_data_indices=src, dst_data_indices=dst, executor=EXECUTOR, state_type=state, src_layer_ids=[],
        dst_layer_ids=[], dst_item_lens=[256] * whole, bootstrap_room=1,
    )  # fmt: skip


@pytest.mark.parametrize(
    "draw",
    [whole_pages, pages_in_turn, state_of_stages, test_equal.heads, test_equal.context_parallel,
     test_equal.window_heads, test_equal.recurrent_state],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_the_same_bytes_go_to_the_same_places(draw: Callable[[random.Random], Drawn]) -> None:
    moved = 0
    for seed in range(CALLS):
        args, fields, call = draw(random.Random(seed))
        theirs, ours = (manager(planned, args, ASCEND, **fields) for planned in (False, True))
        assert call(theirs) == call(ours) == 0, seed
        want, found = merged(theirs.engine.calls), merged(ours.engine.calls)
        assert want == found, f"seed {seed}: {len(want)} and {len(found)} stretches"
        moved += bool(want)
    assert moved > CALLS // 2


def test_two_lists_of_page_ids_are_served_as_over_mooncake() -> None:
    """SGLang refuses them over Ascend. Over Mooncake it serves them, with as many buffers on both sides."""
    for seed in range(CALLS):
        rng = random.Random(seed)
        c4, latent = rng.randrange(1, 5), rng.random() < 0.5
        draft = rng.randrange(1, 3) if latent else 0
        sizes = [768] * c4 + [320] * draft if latent else [1024] * c4 + [256] * c4 + [32] * c4
        args = kv_args(
            kv_data_ptrs=bases(rng, sizes, SRC), kv_item_lens=sizes, prefill_end_layer=c4, num_draft_entries=draft,
            mla_compression_ratios=None if latent else [4] * c4,
        )  # fmt: skip
        pointers, count = bases(rng, sizes, DST), rng.randrange(1, 30)
        src, host, device = (ids(rng, count) for _ in range(3))

        def call(made: Any, where: Any = (src, pointers, host, device)) -> Any:
            source, bases, host, device = where
            return made.send_kvcache("peer", source, bases, host, EXECUTOR, dst_device_kv_indices=device)

        with pytest.raises(NotImplementedError, match="does not support HiSparse destination device KV indices"):
            call(manager(False, args, ASCEND))
        mooncake, ours = manager(False, args), manager(True, args, ASCEND)
        assert call(mooncake) == call(ours) == 0
        assert merged(mooncake.engine.calls) == merged(ours.engine.calls), seed
        ours.peers.register("peer", None)


def test_stages_of_grouped_pools_over_mooncake() -> None:
    """There SGLang reckons as if each layer had one entry, and sends to wrong places; kvplan sends as over Ascend."""
    wrong = 0
    for seed in range(200):
        args, fields, pointers, _ = grouped(random.Random(seed))
        src, dst = ids(random.Random(seed), 5), ids(random.Random(seed + 1), 5)
        theirs, mooncake, ours = (
            manager(planned, args, classes, **fields)
            for planned, classes in ((False, ASCEND), (False, MOONCAKE), (True, MOONCAKE))
        )
        assert theirs.send_kvcache("peer", src, pointers, dst, EXECUTOR) == 0
        assert ours.send_kvcache("peer", src, pointers, dst, EXECUTOR) == 0
        assert merged(theirs.engine.calls) == merged(ours.engine.calls), seed
        mooncake.send_kvcache("peer", src, pointers, dst, EXECUTOR)
        wrong += merged(theirs.engine.calls) != merged(mooncake.engine.calls)
    assert wrong > 20


# --- refusals


def pages(**fields: Any) -> Any:
    """A call of send_kvcache_dcp with whole pages, and what it needs: (manager, call)."""
    sizes = [64, 64, 32]
    args = kv_args(kv_data_ptrs=bases(random.Random(0), sizes, SRC), kv_item_lens=sizes, kv_buf_groups=3, page_size=4,
                   prefill_end_layer=1)  # fmt: skip
    given = {
        "prefill_kv_indices": np.array([1, 2], np.int32), "dst_kv_indices": np.array([3], np.int32),
        "dcp_token_item_lens": [16, 16, 8], "dst_dcp_size": 2, "dst_dcp_rank": 1, "src_page_offset": 0,
        "decode_prefix_len": 0, "num_kv_tokens": 8, "executor": EXECUTOR, "dst_layer_ids": [],
        "dst_kv_ptrs": bases(random.Random(1), [64, 64, 64], DST), "dst_kv_item_lens": [64, 64, 64],
    } | fields  # fmt: skip
    layout = given.pop("layout", [False, False, True])
    made = manager(True, args, ASCEND, _dcp_remote_decode_layout=layout)
    return made, lambda: made.send_kvcache_dcp("peer", **given)


def test_pages_in_turn() -> None:
    made, call = pages()
    assert call() == 0
    first, second, index = made.kv_args.kv_data_ptrs
    there = bases(random.Random(1), [64, 64, 64], DST)
    assert merged(made.engine.calls) == sorted(
        [(first + 2 * 64, there[0] + 3 * 64, 64), (second + 2 * 64, there[1] + 3 * 64, 64),
         (index + 32, there[2] + 3 * 64, 64)], key=lambda each: each[1],
    )  # fmt: skip


@pytest.mark.parametrize("wrong, error, reason", [
    ({"num_kv_tokens": None}, PlanError, "how many tokens"),
    ({"num_kv_tokens": 4}, PlanError, "2 source pages, and a chunk of 4 tokens, 4 a page"),
    ({"decode_prefix_len": 4}, PlanError, "a prefix of 4 tokens does not end with a decode page, of 8"),
    ({"dst_kv_item_lens": [64, 64, 32]}, NotToldError, "kv.2 layer 0: a decode page takes 32 bytes, and must take 6"),
    ({"dst_kv_item_lens": [128, 64, 64]}, NotToldError, "kv.0 layer 0: a decode page takes 128 bytes, and must"),
    ({"layout": [False]}, RuntimeError, "layout does not match its source KV entries"),
    ({"prefill_kv_indices": np.array([1, PAGES], np.int32)}, PlanError, "source page id 64 at position 1"),
    ({"dst_kv_indices": np.array([-1], np.int32)}, PlanError, "destination page id -1 at position 0"),
    ({"src_page_offset": 2}, PlanError, "the destination list is 1 pages, and prefill pages 2 to 3 take 2"),
])  # fmt: skip
def test_pages_in_turn_that_do_not_fit(wrong: dict[str, Any], error: type[Exception], reason: str) -> None:
    made, call = pages(**wrong)
    with pytest.raises(error, match=reason):
        call()
    assert not made.engine.calls


@pytest.mark.parametrize("groups", [2, 3])
def test_counts_that_do_not_tell_are_refused(groups: int) -> None:
    """Index keys of some layers alone, in a stage: SGLang divides the entries by the number of groups."""
    sizes = [64] * (groups * 4 - 1)
    args = kv_args(kv_data_ptrs=bases(random.Random(0), sizes, SRC), kv_item_lens=sizes, kv_buf_groups=groups,
                   hidden_kv_layers=8, draft_kv_layers=0, prefill_start_layer=4, prefill_end_layer=8)  # fmt: skip
    made, page = manager(True, args, ASCEND, pp_size=2), np.array([1], np.int32)
    with pytest.raises(NotToldError, match="does not say which belong together"):
        made.send_kvcache("peer", page, bases(random.Random(1), [64] * (groups * 8), DST), page, EXECUTOR)
    assert not made.engine.calls


@pytest.mark.parametrize("groups, ratios, reason", [
    (3, None, "does not say which page ids number them"), (1, [4, 4], "it is not known which are host memory"),
])  # fmt: skip
def test_two_lists_for_pools_that_do_not_tell_are_refused(groups: int, ratios: Any, reason: str) -> None:
    sizes = [64] * (3 if groups == 3 else 5)
    args = kv_args(kv_data_ptrs=bases(random.Random(0), sizes, SRC), kv_item_lens=sizes, kv_buf_groups=groups,
                   prefill_end_layer=2 if ratios else 1, mla_compression_ratios=ratios)  # fmt: skip
    made, page = manager(True, args, ASCEND), np.array([1], np.int32)
    pointers = bases(random.Random(1), sizes, DST)
    with pytest.raises(NotToldError, match=reason):
        made.send_kvcache("peer", page, pointers, page, EXECUTOR, dst_device_kv_indices=page)
    assert not made.engine.calls


# --- rooms


def test_one_bad_room_of_four() -> None:
    page, device = test_rooms.PAGE, np.array([5], np.int32)
    made, failed, _ = test_rooms.serving(classes=ASCEND)
    test_rooms.work(made, {0: page, 1: np.array([-1], np.int32), 2: page, 3: page}, device=device)
    assert list(failed) == [1] and "space 'host': destination page id -1 at position 0" in failed[1]
    assert made.request_status == {0: KVPoll.Success, 1: KVPoll.Failed, 2: KVPoll.Success, 3: KVPoll.Success}
    assert not made.failed_sessions and len(made.engine.calls) == 6


def test_sglang_alone_ends_its_thread_where_device_page_ids_come() -> None:
    page = test_rooms.PAGE
    made, *_ = test_rooms.serving(planned=False, classes=ASCEND)
    with pytest.raises(RuntimeError, match="Ascend PD transfer does not support HiSparse destination device"):
        test_rooms.work(made, {0: page, 1: page}, device=page)
    assert not made.engine.calls


# --- what chooses it, the decode side's gate, and its engine


def test_the_class_lies_where_sglang_looks_for_it() -> None:
    assert issubclass(PlannedAscendManager, AscendKVManager)
    order = PlannedAscendManager.__mro__
    assert order.index(AscendKVManager) < order.index(MooncakeKVManager)
    for name in ("init_engine", "register_buffer_to_engine", "requires_dcp_relayout", "prepare_dcp_token_item_lens",
                 "get_mla_kv_ptrs_with_pp", "_is_generic_kvcache_state_type"):  # fmt: skip
        assert getattr(PlannedAscendManager, name) is getattr(AscendKVManager, name)


def test_the_seam_chooses_for_sglangs_own_ascend_manager_alone(caplog: pytest.LogCaptureFixture) -> None:
    class Other(AscendKVManager):
        pass

    assert choose(AscendKVManager, TransferBackend.ASCEND, KVClassType.MANAGER) is PlannedAscendManager
    assert choose(Other, TransferBackend.ASCEND, KVClassType.MANAGER) is None
    assert "Other to SGLang: it is not SGLang's own AscendKVManager" in caplog.text
    assert choose(AscendKVSender, TransferBackend.ASCEND, KVClassType.SENDER) is None


def test_the_gate_of_the_decode_side(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = gate_of_sglang()

    class Queue:
        transfer_backend, kv_manager = TransferBackend.ASCEND, object.__new__(PlannedAscendManager)

        def pop_preallocated(self) -> bool:
            asked(self)
            return self.transfer_backend == TransferBackend.ASCEND

    monkeypatch.setattr(decode, "DecodePreallocQueue", Queue)
    with pytest.raises(NotImplementedError, match="requires the Mooncake backend"):
        Queue().pop_preallocated()
    gate.open_for(DisaggregationMode.PREFILL, TransferBackend.ASCEND, PlannedAscendManager)
    with pytest.raises(NotImplementedError):
        Queue().pop_preallocated()
    gate.open_for(DisaggregationMode.DECODE, TransferBackend.ASCEND, PlannedAscendManager)
    queue = Queue()
    assert queue.pop_preallocated() and queue.transfer_backend is TransferBackend.ASCEND
    queue.kv_manager = object.__new__(AscendKVManager)
    with pytest.raises(NotImplementedError):
        queue.pop_preallocated()
    gate.open_for(DisaggregationMode.DECODE, TransferBackend.NIXL, dict)  # the other back end passes beside it
    queue.transfer_backend, queue.kv_manager = TransferBackend.NIXL, {}
    assert not queue.pop_preallocated()


def test_memfabric_gets_lists_whatever_mooncake_is_asked_to_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp")
    monkeypatch.setattr(handover, "LIST_PIECE", 2000)

    class Engine(Recorder):
        lock = threading.Lock()

        def batch_transfer_sync(self, session: str, src: Any, dst: Any, nbytes: Any) -> int:
            assert type(src) is type(dst) is type(nbytes) is list and type(src[0]) is int
            return super().batch_transfer_sync(session, src, dst, nbytes)

        def batch_transfer_sync_write(self, *_: Any) -> int:
            raise AssertionError("not through SGLang's engine")

    made_of = Engine()
    made_of.engine = made_of  # type: ignore[attr-defined]
    args = kv_args(kv_data_ptrs=[SRC], kv_item_lens=[64], prefill_end_layer=1)
    args.kv_data_lens = [64 * 10_000]
    made, source = manager(True, args, ASCEND, engine=made_of), np.arange(0, 6000, 2, dtype=np.int32)
    assert made.send_kvcache("peer", source, [DST], source[::-1].copy(), EXECUTOR) == 0
    assert [len(call) for call in made_of.calls] == [2000, 1000]
