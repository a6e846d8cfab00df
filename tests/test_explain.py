"""Explanations: of pairings, plans and refusals; and the picture."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kvplan import Heads, Interleave, Layout, Memory, PlanError, Region, Request, pair
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
        regions = [
            Region("kv", k, base + 64 * k, 64, 8, page_stride=64 * 4, row_bytes=16, heads=heads) for k in range(3)
        ]
        return [*regions, Region("other", 0, base + 192, 64, 8, page_stride=64 * 4, row_bytes=16, heads=Heads(0, 1, 2))]

    src = Layout([*pool(1 << 20, Heads(0, 1, 2)), Region("draft", 0, 1 << 30, 64, 8)], page_size=4)
    dst = Layout(
        [*pool(1 << 24, Heads(0, 1, 2))[:3], Region("other", 0, 1 << 28, 64, 8, row_bytes=16, heads=Heads(1, 2, 2))],
        page_size=4,
    )
    text = pair(src, dst, allow_unsent=["draft"]).explain()
    assert "kv layer 0 to 2" in text and "3 regions side by side in memory moved as one" in text
    assert "not sent: region draft layer 0: allowed to stay unsent" in text
    assert "not sent: region other layer 0: this peer holds none of its heads" in text
    replica = Layout(src.regions[:3], page_size=4, replica=(1, 2))
    assert "not sent: region kv layer 0, 2: sent by another of the 2 replicas" in pair(replica, dst).explain()


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
    src = Layout([Region("kv", 0, 0, 64, 8, row_bytes=16, memory=Memory.VRAM(1))], page_size=4)
    dst = Layout([Region("kv", 0, 1 << 20, 64, 8, tokens=8, row_bytes=16, interleave=Interleave(2, 1))], page_size=4)
    assert "segment VRAM:1 -> DRAM" in pair(src, dst).explain()


# ----------------------------------------------------------------------------------------- refusals, kept and explained


def two_spaces():
    def layout(base, host):
        regions = [Region("c4", k, base + (k << 16), 64, 10, space="host" if host else "device") for k in range(4)]
        return Layout([*regions, Region("idx", 0, base + (9 << 16), 16, 10)], page_size=4)

    return pair(layout(1 << 20, False), layout(1 << 30, True))


LISTS = {
    "one source list": lambda: ([1, 2], {"host": [3, 4], "device": [5, 5]}, {}),
    "a chunk": lambda: (np.array([1, 2]), {"host": [3, 99, 5], "device": torch.tensor([5, 6, 7])},
                        {"src_start": 4, "dst_start": 0, "num_tokens": 7}),
    "by name": lambda: ({"host": [1, 2], None: [3]}, {"host": (3, 3), "device": [5]}, {}),
    "starts by name": lambda: ({"host": [1, 2], "device": [3]}, {"host": [3, 77], "device": [5, 6]},
                               {"src_start": {"host": 4, "device": 8}, "dst_start": {"device": 4},
                                "num_tokens": {"host": 7}}),
    "starts for others": lambda: ([1, 2], {"host": [3, 77], "device": [5]}, {"dst_start": {None: 0, "device": 4}}),
    "no start": lambda: ([1, 2], {"host": [3, 77], "device": [5]}, {"dst_start": {"host": 0, "hots": 4}}),
    "lengths": lambda: ([1, 2], {"host": [3, 4, 5], "device": [5, 6]}, {}),
    "a space missing": lambda: ([1, 2], {"host": [3, 4]}, {}),
    "no page ids": lambda: (None, {"host": [3, 4], "device": [5, 6]}, {}),
    "no position": lambda: ([1, 2], {"host": [3, 4], "device": [5, 6]}, {"src_start": 0.5}),
}  # fmt: skip


@pytest.mark.parametrize("kind", LISTS)
def test_a_refused_request_is_kept_and_explained(capsys, tmp_path, kind):
    src_pages, dst_pages, positions = LISTS[kind]()
    first, request = Request([0], {"host": [0], "device": [0]}), Request(src_pages, dst_pages, **positions)
    for plan in (
        lambda: two_spaces().plan(src_pages, dst_pages, **positions),
        lambda: two_spaces().plan_batch([first, request]),
        lambda: two_spaces().planner([request], device="cpu").run().wait(),
    ):
        with pytest.raises(PlanError) as error:
            plan()
        file = tmp_path / "case.json"
        file.write_text(json.dumps(error.value.case()))
        assert cli.main(["explain", str(file)]) == 1
        out = capsys.readouterr().out
        assert "entries 0 to 3, group 0: c4 layer 0 to 3, space 'device' -> 'host'" in out
        told = out.split("REFUSED when planned: ")[1].strip()
        if kind not in ("no page ids", "no position"):  # of these the words say what stood in the file
            assert told.removeprefix("request 0: ") == str(error.value).removeprefix("request 0: ")


def test_a_case_holds_the_ids_that_were_refused(tmp_path):
    ids = np.array([1, 77, 3])
    with pytest.raises(PlanError, match="page id 77 at position 1") as error:
        two_spaces().plan(ids, {"host": [1, 2, 3], "device": [1, 2, 3]})
    ids[:] = 5  # a buffer that is used again
    assert error.value.case()["requests"][0]["src_pages"] == [1, 77, 3]
    assert PlanError("about no request").case() is None


def test_what_may_stay_unsent_is_kept_by_name_or_by_name_and_layer(capsys, tmp_path):
    def layout(base, *keys):
        regions = [Region(*key, base + (k << 16), 64, 10, row_bytes=16) for k, key in enumerate(keys)]
        return Layout(regions, page_size=4)

    src = layout(1 << 20, ("kv", 0), ("kv", 1), ("kv", 2), ("draft", 0), ("draft", 1))
    dst = layout(1 << 30, ("kv", 0))
    with pytest.raises(PlanError) as error:
        pair(src, dst, allow_unsent=[("kv", 1), ("kv", 2), "draft"]).plan([77], [1])
    case = error.value.case()
    assert case["allow_unsent"] == ["draft", ["kv", 1], ["kv", 2]]
    file = tmp_path / "case.json"
    file.write_text(json.dumps(case))
    assert cli.main(["explain", str(file)]) == 1
    assert "page id 77" in capsys.readouterr().out
    file.write_text(json.dumps(case | {"allow_unsent": ["draft", ["kv", 1]]}))
    assert cli.main(["explain", str(file)]) == 1
    assert "source region kv layer 2 has no destination" in capsys.readouterr().out
    bad = {
        "kv": "allow_unsent must be a list, not 'kv'",
        7: "allow_unsent must be a list, not 7",
        (3,): 'allow_unsent item 0 must be "name" or ["name", layer], not 3',
        (("kv",),): "allow_unsent item 0 must be",
        ("kv", ("kv", "1")): "allow_unsent item 1: layer of 'kv' must be an integer, not '1'",
        ((1, "kv"),): "allow_unsent item 0 must be",
        (("kv", 1 << 63),): "allow_unsent item 0: layer of 'kv' is 9223372036854775808, outside",
    }
    for allowed, words in bad.items():
        file.write_text(json.dumps(case | {"allow_unsent": allowed}))
        assert cli.main(["explain", str(file)]) == 2
        assert words in capsys.readouterr().err


def test_layouts_as_they_are_sent_are_explained(capsys, tmp_path):
    pairing = two_spaces()
    file = tmp_path / "layouts.json"
    file.write_text(json.dumps({"src": pairing.src.to_dict(), "dst": pairing.dst.to_dict()}))
    assert cli.main(["explain", str(file)]) == 0
    assert "5 entries" in capsys.readouterr().out


def test_deep_nesting_is_refused(capsys, tmp_path):
    file = tmp_path / "deep.json"
    deep = "[" * 200_000 + "]" * 200_000
    for text in (deep, '{"src": ' + deep + "}", '{"page_size": 4, "src": [], "dst": [], "src_pages": ' + deep + "}"):
        file.write_text(text)
        assert cli.main(["explain", str(file)]) == 2
    assert capsys.readouterr().err.count("nested too deeply") == 3


def test_a_picture_without_matplotlib_says_what_to_install(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert explain(capsys, "dcp_0", "--picture", str(tmp_path / "x.png"))[0] == 2
    cli.main(["explain", str(CASES / "dcp_0.json"), "--picture", str(tmp_path / "x.png")])
    assert "pip install matplotlib" in capsys.readouterr().err
