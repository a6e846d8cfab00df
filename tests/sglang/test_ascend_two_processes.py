"""SGLang's Ascend manager, sender, receiver and bootstrap server in their processes; every byte compared.

memfabric, which moves bytes between NPUs, has a stand-in (memfabric_stand_in.py) that passes them to Mooncake over TCP.
"""

from __future__ import annotations

from typing import Any

import pytest
import two_processes

ALL_RIGHT = [True] * two_processes.ROOMS
PLANNED = "PlannedAscendManager"


def run(case: str, *flags: str, off: tuple[str, ...] = (), bad: int = -1) -> Any:
    return two_processes.run(case, ["--backend", "ASCEND", "--bad", str(bad), *flags], list(off), False)


@pytest.mark.parametrize("case, function", [
    ("npu_v4", "send_kvcache"), ("latent_decode_only_draft", "send_kvcache"), ("heads", "send_kvcache_slice"),
    ("dcp_rank_1", "send_kvcache_dcp"), ("npu_dcp_pages_rank_0", "send_kvcache_dcp"),
    ("npu_dcp_pages_rank_1", "send_kvcache_dcp"),
])  # fmt: skip
def test_every_byte_arrives(case: str, function: str) -> None:
    """Two index spaces, a draft that decode alone has, heads, rows of DCP under two lists, pages of DCP."""
    found = run(case)
    shape = two_processes.CASES[case]
    assert found["DECODE"] == [{"manager": PLANNED, "rooms": ALL_RIGHT}] * shape.ranks
    prefill = found["PREFILL"]
    assert prefill["manager"] == PLANNED and prefill["left"] == []
    assert prefill["planned"][function] == two_processes.ROOMS * (shape.pages // shape.chunk) * shape.ranks
    assert "kvplan plans for AscendKVManager (prefill)" in found["log"]["prefill.log"]


@pytest.mark.parametrize("off", [("prefill", "decode"), ("decode",), ("prefill",)], ids="-".join)
def test_one_list_with_the_plugin_off_on_either_side(off: tuple[str, ...]) -> None:
    found = run("npu_v4", "--one-list", off=off)
    assert found["DECODE"][0]["rooms"] == ALL_RIGHT
    assert (found["PREFILL"]["manager"] == PLANNED) == ("prefill" not in off)
    assert (found["DECODE"][0]["manager"] == PLANNED) == ("decode" not in off)


def test_pages_in_turn_without_the_plugin() -> None:
    """What these tests compare with is what SGLang's own function leaves in decode's memory."""
    assert run("npu_dcp_pages_rank_1", off=("prefill", "decode"))["DECODE"][0]["rooms"] == ALL_RIGHT


def test_a_bad_page_id_and_malformed_messages_cost_their_own_room() -> None:
    found = run("npu_v4", "--malformed", bad=1)
    rooms = found["DECODE"][0]["rooms"]
    assert [rooms[room] for room in (0, 2, 3)] == [True] * 3
    assert rooms[1] == (
        "kvplan: space 'host': destination page id 1000000 at position 7 is out of range: region c4_kv layer 2 has "
        "pages 0 to 95"
    )
    assert found["PREFILL"]["polls"] == [4, 0, 4, 4]
    assert "TP size is b'x'" in found["log"]["prefill.log"]
