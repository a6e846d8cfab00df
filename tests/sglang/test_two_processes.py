"""SGLang's manager, sender and receiver in their processes over Mooncake TCP: every byte compared; on, off, faults."""

from __future__ import annotations

from typing import Any

import pytest
import two_processes
from pools import CASES

ALL_RIGHT = [True] * two_processes.ROOMS
PLANNED = "PlannedMooncakeManager"


def run(case: str, *flags: str, off: tuple[str, ...] = (), bad: int = -1) -> Any:
    return two_processes.run(case, ["--bad", str(bad), *flags], list(off), "--restart" in flags)


@pytest.mark.parametrize("case", [case for case in CASES if not CASES[case].own])
def test_every_byte_arrives(case: str) -> None:
    found = run(case)
    ranks = CASES[case].ranks
    assert found["DECODE"] == [{"manager": PLANNED, "rooms": ALL_RIGHT}] * ranks
    prefill = found["PREFILL"]
    assert prefill["manager"] == PLANNED and prefill["left"] == []
    function = {"dcp": "send_kvcache_dcp", "heads": "send_kvcache_slice"}.get(case.partition("_")[0], "send_kvcache")
    chunks = CASES[case].pages // CASES[case].chunk * ranks
    assert prefill["planned"][function] == two_processes.ROOMS * chunks
    assert "kvplan plans for MooncakeKVManager (prefill)" in found["log"]["prefill.log"]


def test_sglang_s_own_pools_states_and_preallocation() -> None:
    found = run("v4_own_pools")
    assert found["DECODE"] == [{"manager": PLANNED, "rooms": ALL_RIGHT}]
    # Of each room: three chunks of 20 pages of 9 KV buffers, 14 buffers of windows and C4 state, 3 of C128 state.
    assert found["PREFILL"]["calls"] == [180, 180, 180, 14, 3] * two_processes.ROOMS
    assert run("v4_own_pools", off=("prefill", "decode"))["DECODE"][0]["rooms"] == ALL_RIGHT


def test_a_call_a_layer_where_a_custom_memory_pool_is_in_use() -> None:
    found = run("v4", "--by-layer")
    assert found["DECODE"] == [{"manager": PLANNED, "rooms": ALL_RIGHT}]
    # Of each room: three chunks of 20 pages of 62 buffers, then 4 pages of each of the window's 5, in a call each.
    assert found["PREFILL"]["calls"] == ([20] * (3 * 62) + [4] * 5) * two_processes.ROOMS


def test_batches_of_indices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES", "8")
    found = run("v4")
    assert found["DECODE"] == [{"manager": PLANNED, "rooms": ALL_RIGHT}]
    assert found["PREFILL"]["calls"] == ([8 * 62, 8 * 62, 4 * 62] * 3 + [4 * 5]) * two_processes.ROOMS


@pytest.mark.parametrize("off", [("prefill", "decode"), ("decode",), ("prefill",)], ids="-".join)
def test_with_the_plugin_off_on_either_side(off: tuple[str, ...]) -> None:
    found = run("v4", off=off)
    assert found["DECODE"][0]["rooms"] == ALL_RIGHT
    assert (found["PREFILL"]["manager"] == PLANNED) == ("prefill" not in off)
    assert (found["DECODE"][0]["manager"] == PLANNED) == ("decode" not in off)


def test_a_bad_page_id_and_malformed_messages_cost_their_own_room() -> None:
    found = run("v4", "--malformed", bad=1)
    rooms = found["DECODE"][0]["rooms"]
    assert [rooms[room] for room in (0, 2, 3)] == [True] * 3
    assert rooms[1] == (
        "kvplan: space 'host': destination page id 1000000 at position 7 is out of range: region c4_kv layer 2 has "
        "pages 0 to 95"
    )
    assert found["PREFILL"]["polls"] == [4, 0, 4, 4]
    log = found["log"]["prefill.log"]
    for reason in (
        "493 bytes are no multiple of 8",
        "TP size is b'x'",
        "lists do not fit into 4 bytes",
        "has 1 frames",
    ):
        assert reason in log


def test_without_the_plugin_a_bad_page_id_costs_all_later_rooms() -> None:
    found = run("v4", bad=1, off=("prefill", "decode"))
    assert [room is True for room in found["DECODE"][0]["rooms"]] == [True, False, False, False]


def test_page_sizes_that_differ_need_the_plugin_on_the_prefill_side() -> None:
    rooms = run("pages_16_to_64", off=("prefill",))["DECODE"][0]["rooms"]
    assert all(isinstance(room, str) and "memory was written" not in room for room in rooms)


def test_a_bad_page_id_where_page_sizes_differ() -> None:
    rooms = run("pages_16_to_24", bad=1)["DECODE"][0]["rooms"]
    assert [rooms[room] for room in (0, 2, 3)] == [True] * 3
    assert "destination page id 1000000 at position 7 is out of range" in rooms[1]


def test_a_bad_page_id_of_a_peer_without_the_plugin() -> None:
    rooms = run("v4", bad=1, off=("decode",))["DECODE"][0]["rooms"]
    assert [room is True for room in rooms] == [True, False, True, True]
    assert "page id 1000000 at position 7 is out of range" in rooms[1]


def test_a_decode_process_that_starts_anew() -> None:
    found = run("v4", "--restart")
    assert [life["rooms"] for life in found["DECODE"]] == [ALL_RIGHT, ALL_RIGHT]
    assert found["PREFILL"]["polls"] == [4] * (2 * two_processes.ROOMS)
