"""Explanations: of pairings, plans and refusals; and the picture."""

import json
from pathlib import Path

import pytest

from kvplan import Heads, Interleave, Layout, Memory, Region, pair
from kvplan import __main__ as cli

CASES = Path(__file__).parent / "cases"


def explain(capsys, name, *options):
    status = cli.main(["explain", str(CASES / f"{name}.json"), *options])
    return status, capsys.readouterr().out


def test_two_spaces(capsys):
    status, out = explain(capsys, "report_host_and_device_ids_differ")
    assert status == 0
    assert "segment VRAM:0 -> DRAM:" in out and "segment VRAM:0 -> VRAM:0:" in out
    assert "entry 0, group 0: c4_kv layer 2, space 'device' -> 'host': whole pages, 37440 bytes each" in out
    assert "6 descriptors, 142848 bytes" in out
    assert "segment VRAM:0 -> DRAM: descriptors 0 to 1 (2), 112320 bytes" in out
    assert "1 of 74880 bytes" in out


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("report_missing_layer", 1, "REFUSED when paired: source region mla_kv layer 7 has no destination"),
        ("report_padding_minus_one", 1, "REFUSED when planned: space 'device': source page id -1 at position 1"),
        ("report_space_missing", 1, "REFUSED when planned: dst_pages lacks space 'host'"),
        ("heads_0_0", 0, "rows (heads 0 to 7 -> 4 to 5), 128 bytes each"),
        ("dcp_0", 0, "rows (all rows -> rank 5 of 8)"),
        ("page_sizes_0", 0, "rows (128 -> 64 rows a page)"),
        ("decode_only_draft_0", 0, "not written: region draft_kv layer 0"),
    ],
)
def test_rules_and_refusals_are_told_with_their_place(capsys, name, status, text):
    found, out = explain(capsys, name)
    assert found == status and text in out


def test_every_case_is_explained(capsys):
    for path in sorted(CASES.glob("*.json")):
        status, out = explain(capsys, path.stem)
        assert status == (1 if "error" in json.loads(path.read_text()) else 0), out
        assert out.count("\n") >= 2


def test_what_is_left_unsent_and_what_is_merged():
    def pool(base, heads):
        regions = [Region("kv", k, base + 64 * k, 64, 8, page_stride=64 * 4, heads=heads) for k in range(3)]
        return [*regions, Region("other", 0, base + 192, 64, 8, page_stride=64 * 4, heads=Heads(0, 1, 2))]

    src = Layout([*pool(1 << 20, Heads(0, 1, 2)), Region("draft", 0, 1 << 30, 64, 8)], page_size=4)
    dst = Layout(
        [*pool(1 << 24, Heads(0, 1, 2))[:3], Region("other", 0, 1 << 28, 64, 8, heads=Heads(1, 2, 2))], page_size=4
    )
    text = pair(src, dst, allow_unsent=["draft"]).explain()
    assert "kv layer 0 to 2" in text and "3 regions side by side in memory moved as one" in text
    assert "not sent: region draft layer 0: allowed to stay unsent" in text
    assert "not sent: region other layer 0: this peer holds none of its heads" in text
    replica = Layout(src.regions[:3], page_size=4, replica=(1, 2))
    assert "not sent: region kv layer 0: sent by another of the 2 replicas" in pair(replica, dst).explain()


def test_a_file_that_is_no_case(capsys, tmp_path):
    for text in ("", "[]", "{}", '{"page_size": 4, "src": [{}], "dst": [], "src_pages": [], "dst_pages": []}'):
        (tmp_path / "bad.json").write_text(text)
        assert cli.main(["explain", str(tmp_path / "bad.json")]) == 2
    assert cli.main(["explain", str(tmp_path / "none.json")]) == 2
    assert "kvplan explain:" in capsys.readouterr().err


def test_picture(capsys, tmp_path):
    for name in ("dsv4_1_stage0", "dcp_0", "heads_0_2"):
        out = tmp_path / f"{name}.png"
        assert explain(capsys, name, "--picture", str(out))[0] == 0
        assert out.read_bytes()[:4] == b"\x89PNG" and out.stat().st_size > 5000


def test_interleave_and_memory_are_words():
    src = Layout([Region("kv", 0, 0, 64, 8, memory=Memory.VRAM(1))], page_size=4)
    dst = Layout([Region("kv", 0, 1 << 20, 64, 8, tokens=8, interleave=Interleave(2, 1))], page_size=4)
    assert "segment VRAM:1 -> DRAM" in pair(src, dst).explain()
