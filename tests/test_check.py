"""python -m kvplan check: what it prints, draws and returns."""

import json
import sys

import pytest

from kvplan import Heads, Layout
from kvplan import __main__ as cli


def ranks(count, base, heads=4):
    each = max(heads // count, 1)
    held = [Heads(rank * heads // count, rank * heads // count + each, heads) for rank in range(count)]
    return [Layout.mha(base, layers=range(2, 5), num_pages=8, page_size=4, heads=h, head_bytes=8) for h in held]


@pytest.fixture
def write(tmp_path):
    def write(prefill, decode, **more):
        path = tmp_path / "cluster.json"
        sides = {"prefill": [layout.to_dict() for layout in prefill], "decode": [layout.to_dict() for layout in decode]}
        path.write_text(json.dumps(sides | more))
        return str(path)

    return write


def test_a_right_cluster(write, capsys, tmp_path):
    picture = tmp_path / "cluster.png"
    path = write(ranks(1, 1 << 20), [*ranks(2, 1 << 30), ranks(2, 1 << 30)[0]])
    assert cli.main(["check", path, "--picture", str(picture)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "prefill 0 -> decode 0, 2: k, v layer 2 to 4: head 0 to 1 of 4, all rows",
        "prefill 0 -> decode 1: k, v layer 2 to 4: head 2 to 3 of 4, all rows",
        "right: 1 prefill ranks write every region, layer, head and row of 3 decode ranks exactly once",
        f"picture: {picture}",
    ]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_what_is_missing_and_what_is_doubled(write, capsys, tmp_path):
    first, second = ranks(2, 1 << 20)
    path = write([first, first], ranks(2, 1 << 30))
    assert cli.main(["check", path, "--picture", str(tmp_path / "wrong.svg")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "prefill 0 to 1 -> decode 0: k, v layer 2 to 4: head 0 to 1 of 4, all rows"
    what = "send region k layer 2 to 4, region v layer 2 to 4, head 0 to 1 of 4, all rows, to decode rank 0"
    assert f"WRONG: prefill ranks 0 and 1 both {what}" in lines
    what = "region k layer 2 to 4, region v layer 2 to 4, head 2 to 3 of 4, all rows, to decode rank 1"
    assert f"WRONG: nobody sends {what}" in lines
    assert "#ff0000" in (tmp_path / "wrong.svg").read_text()
    assert cli.main(["check", write([first, second], ranks(2, 1 << 30))]) == 0


def test_what_cannot_be_paired(write, capsys):
    assert cli.main(["check", write(ranks(2, 1 << 20), ranks(2, 1 << 30, heads=8))]) == 1
    assert capsys.readouterr().out.startswith("REFUSED: prefill rank 0 and decode rank 0: region k layer 2")


def test_what_may_stay_unsent_and_unwritten(write, capsys):
    prefill = [Layout.mla(1 << 20, layers=[0], num_pages=4), Layout.mla(1 << 20, layers=[1], num_pages=4, name="draft")]
    decode = [Layout.mla(1 << 30, layers=[0, 7], num_pages=4)]
    assert cli.main(["check", write(prefill, decode)]) == 1
    assert "no decode rank holds region draft layer 1" in capsys.readouterr().out
    assert cli.main(["check", write(prefill, decode, allow_unsent=["draft"])]) == 1
    assert "WRONG: nobody sends region mla_kv layer 7, all heads, all rows" in capsys.readouterr().out
    assert cli.main(["check", write(prefill, decode, allow_unsent=["draft"], allow_unwritten=[["mla_kv", 7]])]) == 0


def test_long_lists_are_cut_unless_all_is_asked_for(write, capsys):
    path = write(ranks(64, 1 << 20, heads=64), ranks(64, 1 << 30, heads=64))
    assert cli.main(["check", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 42 and lines[40] == "... and 24 more such lines: --all prints them"
    assert cli.main(["check", path, "--all"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 65


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "no JSON"),
        ("[]", "must hold an object with prefill and decode"),
        ('{"prefill": [], "decode": []}', "prefill must be a list of layouts, one a rank, and not empty"),
        ('{"prefill": [3], "decode": [3]}', "prefill rank 0: "),
        ('{"prefill": [], "decode": [], "names": 1}', "unknown fields ['names']"),
        ('{"prefill": [], "decode": [], "allow_unsent": "kv"}', "allow_unsent must be a list"),
        ('{"prefill": [], "decode": [], "allow_unwritten": [["kv", true]]}', "layer of 'kv' must be an integer"),
        ('{"prefill": [], "decode": [], "allow_unsent": [["kv"]]}', "allow_unsent item 0 must be"),
    ],
)
def test_files_that_hold_something_else(tmp_path, capsys, text, says):
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert cli.main(["check", str(path)]) == 2
    assert says in capsys.readouterr().err


def test_no_file_and_no_matplotlib(tmp_path, write, capsys, monkeypatch):
    assert cli.main(["check", str(tmp_path / "none.json")]) == 2
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["check", write(ranks(1, 1 << 20), ranks(1, 1 << 30)), "--picture", "x.png"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err
