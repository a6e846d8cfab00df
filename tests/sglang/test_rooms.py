"""What is refused costs its own room: no worker thread, no session, no other room. And how plans reach Mooncake."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from by_hand import EXECUTOR, MOONCAKE, kv_args, manager
from sglang.srt.disaggregation.base.conn import KVPoll, StateType
from sglang.srt.disaggregation.common.utils import FastQueue, TransferKVChunk

from kvplan.integrations.sglang import handover, seam

SRC, DST, PAGE = 1 << 40, 1 << 44, np.array([1], np.int32)


def serving(planned: bool = True, classes: tuple[type, type] = MOONCAKE, **fields: Any
            ) -> tuple[Any, dict[int, str], list[tuple[int, int]]]:  # fmt: skip
    """A manager with rooms 0 to 3: it, why rooms failed, and the rooms whose auxiliary data was sent."""
    args = kv_args(kv_data_ptrs=[SRC], kv_item_lens=[64], prefill_end_layer=1, aux_data_ptrs=[SRC - 4096],
                   aux_item_lens=[8], **fields)  # fmt: skip
    pointers = [DST]
    peer = SimpleNamespace(
        requires_dcp_relayout=False, dst_kv_ptrs=pointers, dst_kv_layer_ids=[], dst_kv_item_len=64, dst_tp_rank=0,
        dst_kv_item_lens=[64], dst_attn_tp_size=1, dst_aux_ptrs=[DST - 4096], dst_state_data_ptrs=[[DST - 8192]],
        dst_state_item_lens=[[32]], dst_state_dim_per_tensor=[], dst_state_layer_ids=[],
    )  # fmt: skip
    failed: dict[int, str] = {}
    concluded: list[tuple[int, int]] = []
    made = manager(
        planned, args, classes, decode_kv_args_table={"peer:1": peer}, session_lock=threading.Lock(),
        request_status=dict.fromkeys(range(4), KVPoll.WaitingForInput), failed_sessions=set(),
        state_layout_rejections={}, session_failures={"peer:1": 0}, failed_session_probes={},
        enable_trace=False, enable_staging=False, _staging_outstanding=dict.fromkeys(range(4), 0),
        req_to_decode_prefix_len={}, _dcp_pack_buffers=None, bootstrap_port=1, attn_cp_size=1,
        enable_all_cp_ranks_for_transfer=False,
    )  # fmt: skip

    def conclude(*, bootstrap_room: int, status: int, targets: Any = None, failure_reason: str | None = None) -> None:
        if status == KVPoll.Failed:
            failed.setdefault(bootstrap_room, failure_reason or "")
        made.request_status[bootstrap_room] = KVPoll.Failed if bootstrap_room in failed else status
        concluded.append((bootstrap_room, made.request_status[bootstrap_room]))

    made.conclude_transfer = conclude
    made._should_skip_cp_replicated_state_transfer = lambda: False
    made.poison_deferred_ack_room = lambda room: None
    return made, failed, concluded


def work(
    made: Any, ids: dict[int, np.ndarray], source: np.ndarray = PAGE, state: Any = None, device: Any = None
) -> None:
    """Have SGLang's worker send a last chunk of each room, until it is told to end."""
    queue = FastQueue()
    for room, dst in ids.items():
        made.transfer_infos[room] = {"peer:1": SimpleNamespace(
            room=room, mooncake_session_id="peer:1", is_dummy=False, dst_kv_indices=dst, dst_device_kv_indices=device,
            dst_aux_index=2, endpoint="h", dst_port=1, required_dst_info_num=1, dst_state_indices=[[1]],
            decode_prefix_len=0,
        )}  # fmt: skip
        queue.put(TransferKVChunk(room, source, slice(0, len(source)), True, 1, state, len(source)))
    queue.put(None)
    made.transfer_worker(queue, EXECUTOR)


def test_one_bad_room_of_four() -> None:
    made, failed, _ = serving()
    work(made, {0: PAGE, 1: np.array([-1], np.int32), 2: PAGE, 3: PAGE})
    assert list(failed) == [1] and "destination page id -1 at position 0" in failed[1]
    assert made.request_status == {0: KVPoll.Success, 1: KVPoll.Failed, 2: KVPoll.Success, 3: KVPoll.Success}
    assert not made.failed_sessions
    assert len(made.engine.calls) == 6  # pages and auxiliary data of three rooms, nothing of the fourth


def test_sglang_alone_ends_its_thread_where_dcp_meets_device_page_ids() -> None:
    """What kvplan serves in its place: the cases dcp_rank_0 and dcp_rank_1 of test_two_processes.py."""
    made, *_ = serving(planned=False)
    made.decode_kv_args_table["peer:1"].requires_dcp_relayout = True
    with pytest.raises(RuntimeError, match="not supported by PD DCP relayout"):
        work(made, {0: PAGE, 1: PAGE}, device=PAGE)
    assert not made.engine.calls


def test_lists_that_sglang_would_cut_fail_their_room() -> None:
    made, failed, _ = serving()
    work(made, {0: np.array([1, 2], np.int32), 1: PAGE}, source=np.array([1, 2], np.int32))
    assert list(failed) == [1] and "decode gave 1 pages there, 1 in all" in failed[1]
    assert len(made.engine.calls) == 2


def test_a_peer_whose_registration_was_refused_fails_its_rooms() -> None:
    made, failed, _ = serving()
    del made.decode_kv_args_table["peer:1"]
    made.peers.reject("peer:1", "DCP rank 7 of 2")
    work(made, {0: PAGE})
    assert "peer:1 is not taken: DCP rank 7 of 2" in failed[0]


def test_what_sglang_raises_of_a_state_fails_that_room() -> None:
    states = {"state_types": [StateType.QSA_PENDING], "state_data_ptrs": [[SRC - 8192]], "state_data_lens": [[3200]],
              "state_item_lens": [[32]], "state_dim_per_tensor": [[]], "state_layer_ids": [[]]}  # fmt: skip
    made, failed, _ = serving(**states)
    work(made, {0: PAGE, 1: PAGE}, state=[[1, 2]])  # two rows for one: SGLang raises
    assert sorted(failed) == [0, 1] and "state index length mismatch" in failed[0]
    assert not made.failed_sessions


def test_a_failed_call_of_the_engine_gives_the_session_up_as_before() -> None:
    made, failed, _ = serving()
    made.engine.answer = -1
    work(made, {0: PAGE, 1: PAGE})
    assert sorted(failed) == [0, 1] and made.failed_sessions == {"peer:1"}
    assert "Failed to send kv chunk" in failed[0] and "is not alive" in failed[1]
    assert len(made.engine.calls) == 1 and len(made.peers) == 0


class Mooncake:
    """Stands for Mooncake's TransferEngine: takes arrays, views or neither."""

    def __init__(self, takes: str) -> None:
        self.calls: list[Any] = []
        self.engine, self.takes = self, takes
        if takes == "arrays":
            self.batch_transfer_sync_write_arrays = self.keep

    def keep(self, _session: str, *columns: Any) -> int:
        self.calls.append([type(column) for column in columns] + [[int(x) for x in column] for column in columns])
        return 0

    def batch_transfer_sync_write(self, session: str, *columns: Any) -> int:
        if self.takes == "lists" and not isinstance(columns[0], list):
            raise TypeError("incompatible function arguments")
        return self.keep(session, *columns)

    def batch_transfer_sync(self, session: str, *columns: Any) -> int:
        return self.batch_transfer_sync_write(session, *columns)


@pytest.mark.parametrize("takes, kind", [("arrays", np.ndarray), ("views", memoryview), ("lists", list)])
@pytest.mark.parametrize("tcp", [False, True])
def test_plans_reach_mooncake_in_the_form_that_it_takes(
    takes: str, kind: type, tcp: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOONCAKE_PROTOCOL", "tcp" if tcp else "rdma")
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.setattr(handover, "PIECE", 2000)
    monkeypatch.setattr(handover, "LIST_PIECE", 2000)
    mooncake = Mooncake(takes)
    args = kv_args(kv_data_ptrs=[SRC], kv_item_lens=[64], prefill_end_layer=1)
    args.kv_data_lens = [64 * 10_000]
    made = manager(True, args, engine=mooncake)
    ids = np.arange(0, 6000, 2, dtype=np.int32)
    assert made.send_kvcache("peer", ids, [DST], ids[::-1].copy(), EXECUTOR) == 0
    assert {each for call in mooncake.calls for each in call[:3]} == {kind}
    assert [len(call[3]) for call in mooncake.calls] == ([1024, 1024, 952] if tcp else [2000, 1000])
    src, dst, sizes = ([number for call in mooncake.calls for number in call[k]] for k in (3, 4, 5))
    assert src == (SRC + 64 * ids.astype(np.int64)).tolist() and dst == (DST + 64 * ids[::-1].astype(np.int64)).tolist()
    assert set(sizes) == {64}


def test_the_seam_leaves_what_was_not_tried(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend
    from sglang.srt.plugins.hook_registry import HookRegistry

    registered: list[Any] = []
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: registered.append(hook))
    monkeypatch.setattr(seam.importlib.metadata, "version", lambda _name: "0.6.0")
    seam.load()
    assert not registered and "leaves SGLang 0.6.0 as it is: tried with 0.5.23 only" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(HookRegistry, "register", lambda *hook: registered.append(hook))
    monkeypatch.setenv("KVPLAN_SGLANG", "0")
    seam.load()
    assert not registered
    monkeypatch.setenv("KVPLAN_SGLANG", "1")
    seam.load()
    assert len(registered) == 1
    assert seam.choose(object, TransferBackend.MORI, KVClassType.MANAGER) is None
    assert "leaves the MORI backend to SGLang" in caplog.text
    assert seam.choose(type("Other", (), {}), TransferBackend.MOONCAKE, KVClassType.MANAGER) is None
    assert "leaves" in caplog.text and "Other" in caplog.text
    assert seam.choose(object, TransferBackend.MOONCAKE, KVClassType.SENDER) is None
