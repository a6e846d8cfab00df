"""The same over NIXL, with UCX's TCP. DRAM of device 1 stands for VRAM (nixl_stand_in.py): every byte compared."""

from __future__ import annotations

from typing import Any

import pytest
import two_processes
from pools import CASES

from kvplan.engines import nixl_load

try:
    nixl_load.load()
except ImportError as error:
    pytest.skip(f"SGLANG OVER NIXL IS NOT TESTED: {error}", allow_module_level=True)

ALL_RIGHT = [True] * two_processes.ROOMS
PLANNED = "PlannedNixlManager"
LEFT = [["whole pages and heads over NIXL", "its prepared lists serve them"]]


def run(case: str, *flags: str, off: tuple[str, ...] = (), bad: int = -1, restart: bool = False) -> Any:
    arguments = ["--backend", "NIXL", "--bad", str(bad), *flags] + ["--restart"] * restart
    return two_processes.run(case, arguments, list(off), restart)


@pytest.mark.parametrize("case", [case for case in CASES if "pages_" not in case])  # those go over Mooncake alone
def test_every_byte_arrives(case: str) -> None:
    """Host pages and device pages under their own ids, a draft that decode alone has, DCP, heads to host memory."""
    found = run(case)
    ranks = CASES[case].ranks
    assert found["DECODE"] == [{"manager": PLANNED, "rooms": ALL_RIGHT}] * ranks
    function = {"dcp": "send_kvcache_dcp", "heads": "send_kvcache_slice"}
    chunks = CASES[case].pages // CASES[case].chunk * ranks
    assert found["PREFILL"]["planned"] == {
        function.get(case.partition("_")[0], "send_kvcache_mixed"): two_processes.ROOMS * chunks
    }
    assert found["PREFILL"]["left"] == []


@pytest.mark.parametrize("off", [("decode",), ("prefill",), ("prefill", "decode")], ids="-".join)
def test_a_peer_without_the_plugin_is_served_as_before(off: tuple[str, ...]) -> None:
    """SGLang alone sends one list of page ids, for mixed memory as well."""
    found = run("v4", "--one-list", off=off)
    assert found["DECODE"][0]["rooms"] == ALL_RIGHT
    assert found["PREFILL"]["left"] == (None if "prefill" in off else LEFT)


def test_a_draft_that_a_decode_side_without_the_plugin_has() -> None:
    found = run("decode_only_draft", "--one-list", off=("decode",))
    assert found["DECODE"] == [{"manager": "NixlKVManager", "rooms": ALL_RIGHT}]
    assert found["PREFILL"]["left"] == []


def test_device_page_ids_fail_at_a_prefill_side_without_the_plugin() -> None:
    """It reads the message, and NIXL finds none of the pages in it: no room gets bytes under the wrong ids."""
    found = run("v4", off=("prefill",))
    assert found["DECODE"][0]["rooms"] == ["NIXL_ERR_INVALID_PARAM"] * two_processes.ROOMS
    assert found["PREFILL"]["polls"] == [0] * two_processes.ROOMS


def test_the_two_lists_are_two() -> None:
    """Without the plugin on either side, and without SGLang's gate, device buffers are written under host page ids."""
    rooms = run("v4", off=("prefill", "decode"))["DECODE"][0]["rooms"]
    first_of_the_device = f"buffer {CASES['v4'].host}, "
    assert all(str(room).startswith(first_of_the_device) for room in rooms), rooms


def test_a_bad_page_id_and_malformed_messages_cost_their_own_room() -> None:
    found = run("v4", "--malformed", bad=1)
    rooms = found["DECODE"][0]["rooms"]
    assert [rooms[room] for room in (0, 2, 3)] == [True] * 3
    assert rooms[1] == (
        "kvplan: space 'host': destination page id 1000000 at position 7 is out of range: region c4_kv layer 2 has "
        "pages 0 to 95"
    )
    assert found["PREFILL"]["polls"] == [4, 0, 4, 4]
    for reason in (
        "493 bytes are no multiple of 8",
        "TP size is 0",
        "4294967295 lists do not fit into 4 bytes",
        "memory kinds [b'VRAM', b'CPU']",
        "62 KV buffers of 37440 bytes a page, and page sizes",
        "DCP rank 0 of 0",
        "drops the registration of another agent",
        "the layout frame of 9 bytes is none of this version",
        "it begins with [b'None']",
        "room is b'-7'",
        "page ids: 3 bytes are no multiple of 4",
        "auxiliary index is b'None'",
        "the page id frame has 51 bytes",
        "not those of 4294967295 and 4294967295 page ids",
        "the room has 1 page ids, and 4 host page ids",
    ):
        assert reason in found["log"]["prefill.log"], reason


def test_a_bad_page_id_in_sglangs_own_lists() -> None:
    """SGLang reckons with page ids, so that one past a buffer's end is a page of the next buffer."""
    rooms = run("v4", "--one-list", bad=1, off=("decode",))["DECODE"][0]["rooms"]
    assert rooms == [
        True,
        "kvplan: destination page id 1000000 at position 7 is out of range: pages 0 to 95",
        True,
        True,
    ]


def test_a_decode_process_that_starts_anew() -> None:
    found = run("v4", restart=True)
    assert [life["rooms"] for life in found["DECODE"]] == [ALL_RIGHT, ALL_RIGHT]
    assert found["PREFILL"]["polls"] == [4] * (2 * two_processes.ROOMS)
