"""The demo: its allocators, its check, and all of it end to end over the real engine."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from engine_peer import need

from kvplan import Heads
from kvplan.demo import run
from kvplan.demo.allocator import (
    OutOfPages,
    PageAllocator,
    Request,
    decode_life,
    prefill_life,
    read_trace,
    replay,
    stretches,
    workload,
)
from kvplan.demo.channel import MAX_MESSAGE, Channel
from kvplan.demo.decode import Due, check
from kvplan.demo.pools import DRAFT, GUARD, SOURCE, Pools, identify, page_keys, pattern
from kvplan.demo.prefill import chunks

# ---- allocators


@pytest.mark.parametrize("order", ["fifo", "lifo", "sorted"])
def test_allocator_never_hands_out_a_page_twice(order):
    rng = random.Random(order)
    allocator = PageAllocator(50, order)
    held: list[list[int]] = []
    for _ in range(2000):
        want = rng.randint(0, 12)
        if rng.random() < 0.5 and want <= allocator.available:
            held.append(allocator.allocate(want))
        elif held:
            allocator.free(held.pop(rng.randrange(len(held))))
        pages = list(itertools.chain(*held))
        assert len(set(pages)) == len(pages) and all(0 <= page < 50 for page in pages)
        assert allocator.available == 50 - len(pages)


def test_allocator_orders():
    taken = {}
    for order in ("fifo", "lifo", "sorted"):
        allocator = PageAllocator(6, order)
        pages = allocator.allocate(4)
        allocator.free([pages[3]])
        allocator.free([pages[1]])
        taken[order] = allocator.allocate(4)
    assert taken == {"fifo": [4, 5, 3, 1], "lifo": [1, 3, 4, 5], "sorted": [1, 3, 4, 5]}


def test_allocator_refuses_whole():
    allocator = PageAllocator(4, "fifo")
    pages = allocator.allocate(3)
    with pytest.raises(OutOfPages):
        allocator.allocate(2)
    assert allocator.available == 1
    for wrong in ([pages[0], pages[0]], [pages[0], 3], [pages[0], 4], [-1]):
        with pytest.raises(ValueError, match="not allocated"):
            allocator.free(wrong)
    assert allocator.available == 1
    with pytest.raises(ValueError, match="order"):
        PageAllocator(4, "random")


def test_churn_fragments_and_spaces_are_independent():
    churn, moved = workload(None, [131072, 6244, 2048], None, seed=1)
    pages = sum(request.pages for request in moved)
    allocators = {"host": PageAllocator(pages + 200, "lifo"), "device": PageAllocator(pages + 300, "sorted")}
    tables, _ = replay(churn, allocators, decode_life, moved)
    assert [len(tables[request.id][space]) for request in moved for space in allocators] == [512, 512, 25, 25, 8, 8]
    for space in allocators:
        everything = list(itertools.chain(*(tables[request.id][space] for request in moved)))
        assert len(set(everything)) == len(everything) == pages
        assert sum(stretches(tables[request.id][space]) for request in moved) > 20
    for request in moved:
        assert tables[request.id]["host"] != tables[request.id]["device"]


def test_replay_turns_away_and_makes_the_kept_wait():
    allocators = {"device": PageAllocator(10, "fifo")}
    early = [Request(0, 0, 2000, 1), Request(1, 1, 2000, 1)]  # the second finds 2 free pages
    tables, turned_away = replay(early, allocators, decode_life, [Request(2, 2, 6 * 256, 1)])
    assert turned_away == 1
    assert tables == {2: {"device": [8, 9, 0, 1, 2, 3]}}  # after the first has ended
    with pytest.raises(OutOfPages):
        replay([], allocators, prefill_life, [Request(3, 3, 5 * 256, 1)])


def test_stretches():
    assert [stretches(pages) for pages in ([], [3], [3, 4, 5], [3, 5, 6, 2], [2, 1, 0])] == [0, 1, 1, 3, 3]


def write_trace(path: Path, lines: int) -> str:
    rng = random.Random(0)
    entry = {"hash_ids": [0, 1]}
    rows = [
        {"timestamp": 400 * n, "input_length": rng.randint(1, 9000), "output_length": rng.randint(0, 600), **entry}
        for n in range(lines)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_workload(tmp_path):
    trace = write_trace(tmp_path / "trace.jsonl", 100)
    churn, moved = workload(trace, None, 7, seed=3)
    assert (churn, moved) == workload(trace, None, 7, seed=3)
    assert len({workload(trace, None, 7, seed)[1][0].id for seed in range(10)}) > 5
    assert len(moved) == 7 and len(churn) >= 46
    assert [*churn, *moved] == read_trace(trace)[: len(churn) + 7]
    assert len(workload(trace, None, None, seed=0)[1]) == 20
    assert [request.tokens for request in workload(trace, [5, 6], None, 0)[1]] == [5, 6]
    lengths = [request.tokens for request in workload(None, [5, 6], 3, 0)[1]]
    assert lengths[:2] == [5, 6] and len(lengths) == 3
    with pytest.raises(ValueError, match="100 requests, 101 are to be transferred"):
        workload(trace, None, 101, 0)


@pytest.mark.parametrize(
    "line",
    [
        "[]",
        "{",
        '{"timestamp": 0}',
        '{"timestamp": 0, "input_length": 0, "output_length": 1}',
        '{"timestamp": 0, "input_length": 1.5, "output_length": 1}',
        '{"timestamp": 0, "input_length": 99999999999, "output_length": 1}',
        '{"timestamp": null, "input_length": 1, "output_length": 1}',
    ],
)
def test_a_malformed_trace_is_refused_by_line(tmp_path, line):
    path = Path(write_trace(tmp_path / "trace.jsonl", 3))
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ValueError, match=r"trace.jsonl:4: "):
        read_trace(str(path))


@pytest.mark.parametrize("tokens", [1, 255, 256, 257, 1000, 1024, 5000])
@pytest.mark.parametrize("chunk_tokens", [1, 100, 256, 300, 1024, 8192])
def test_chunks_cover_a_request_in_whole_pages(tokens, chunk_tokens):
    parts = list(chunks(tokens, chunk_tokens))
    assert parts[0][0] == 0 and parts[-1][1] == tokens
    assert all(start < stop for start, stop in parts)
    assert all(a[1] == b[0] and b[0] % 256 == 0 for a, b in itertools.pairwise(parts))


# ---- channel


def test_channel():
    ours, theirs = map(Channel, socket.socketpair())
    ours.send("hello", pages=[1, 2])
    assert theirs.receive(1) == {"kind": "hello", "pages": [1, 2]}
    ours.send("hello")
    with pytest.raises(ValueError, match="expected message 'bye'"):
        theirs.expect("bye", 1)
    with pytest.raises(TimeoutError):
        theirs.receive(0.01)
    for malformed in (b"[]", b'{"a": 1}', b"nonsense"):
        ours.sock.sendall(len(malformed).to_bytes(4, "big") + malformed)
        with pytest.raises(ValueError):
            theirs.receive(1)
    ours.sock.sendall((MAX_MESSAGE + 1).to_bytes(4, "big"))
    with pytest.raises(ValueError, match="more than"):
        theirs.receive(1)
    ours.sock.close()
    with pytest.raises(EOFError):
        theirs.receive(1)


# ---- the check


def test_every_word_is_unlike_any_other_and_tells_where_it_belongs():
    parts = []
    for side, region in itertools.product((SOURCE, GUARD), (0, 1, 61)):
        words = pattern(page_keys(side, region, torch.tensor([0, 1, 700])), 216)
        assert identify(int(words[1, 200])) == (side, region, 1, 200)
        assert identify(int(words[2, 3])) == (side, region, 700, 3)
        parts.append(words.flatten())
    words = torch.cat(parts)
    assert len(words.unique()) == len(words)
    # Nor do two pages share many bytes, however little they differ in: 1 in 256, as chance has it.
    for one, other in itertools.combinations(words.view(-1, 216), 2):
        assert (one ^ other).view(torch.uint8).eq(0).float().mean() < 0.02


@pytest.fixture
def arrived():
    """Decode pools in which one request of three pages has arrived as it should, and what is due."""
    pools = Pools(8, 6)
    pools.fill(GUARD)
    tables = {"host": [5, 0, 2], "device": [1, 7, 6]}
    source = [9, 4, 30]
    due = {space: Due() for space in tables}
    for space, pages in tables.items():
        due[space].add(77, pages, source)
    for region in pools.layout.regions:
        view = pools.pages(region)
        keys = page_keys(SOURCE, pools.number[region.key], torch.tensor(source))
        view[torch.tensor(tables[region.space])] = pattern(keys, view.shape[1]).to(view.device)
    return pools, due


def test_check_passes_what_is_right(arrived):
    assert check(*arrived) == []


@pytest.mark.parametrize(
    "name, layer, page, byte, text",
    [
        ("c4_kv", 2, 5, 0, r"page 5 \(page 0 of request 77, tokens from 0; source page 9\): wrong from byte 0,"),
        ("c4_kv", 42, 2, 37439, r"page 2 \(page 2 of request 77, tokens from 512; source page 30\): .* byte 37439,"),
        ("c4_kv", 20, 3, 17, r"page 3 \(where nothing was due\): wrong from byte 17,"),
        ("c4_indexer", 2, 0, 0, r"page 0 \(where nothing was due\): wrong from byte 0,"),
        ("c128_kv", 41, 7, 1727, r"page 7 \(page 1 of request 77, tokens from 256; source page 4\): .* byte 1727,"),
    ],
)
def test_check_finds_one_corrupted_byte(arrived, name, layer, page, byte, text):
    pools, due = arrived
    region = pools.layout.by_key[name, layer]
    pools.pages(region)[page].view(torch.uint8)[byte] ^= 1
    (errors,) = check(pools, due)
    assert (errors.name, errors.layer, errors.space, errors.wrong_bytes) == (name, layer, region.space, 1)
    assert errors.due_pages + errors.other_pages == 1
    assert re.search(f"region {name} layer {layer}, space '{region.space}', {text}", errors.first), errors.first
    assert "which neither side wrote" in errors.first


def test_check_says_what_lies_in_the_wrong_place(arrived):
    pools, due = arrived
    view = pools.pages(pools.layout.by_key["c4_indexer", 4])
    view[1], view[7] = view[7].clone(), view[1].clone()  # pages 0 and 1 of the request
    view = pools.pages(pools.layout.by_key["c128_kv", 3])
    view[1] = pattern(page_keys(GUARD, pools.number["c128_kv", 3], torch.tensor([1])), view.shape[1])[0]
    indexer, c128 = check(pools, due)
    assert (indexer.due_pages, indexer.other_pages) == (2, 0)
    assert indexer.first.endswith("wrong from byte 0, which holds byte 0 of source page 4 of c4_indexer layer 4")
    assert c128.first.endswith("which holds what it held before: nothing arrived")


# ---- end to end


def demo(*options: str) -> int:
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return run.main(parser.parse_args(options))


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the local engine copies ordinary memory")


@pytest.fixture
def mooncake():
    need("mooncake")


def test_demo_moves_every_byte(mooncake, capfd):
    code = demo("--tokens", "6244", "256", "100", "--chunk-tokens", "2000")
    out, err = capfd.readouterr()
    assert code == run.RIGHT, out + err
    assert "Every byte is right: 27 pages" in out
    rows = [line.split() for line in out.splitlines()]
    assert [row[1:4] for row in rows[1:4]] == [["6,244", "25", "4"], ["256", "1", "1"], ["100", "1", "1"]]
    assert rows[4][:4] == ["total", "6,600", "27", "6"]
    assert float(rows[4][5]) == pytest.approx(27 * 998_208 / 1e6, abs=0.1)
    assert err.startswith("starting: ") and "\nprefill: " in err


def test_demo_finds_the_one_space_mistake(mooncake, capfd):
    code = demo("--tokens", "2000", "300", "--one-space")
    out, err = capfd.readouterr()
    assert code == run.WRONG, out + err
    last = out.splitlines()[-1]
    assert last.startswith("WRONG: ")
    assert "The first: region c4_indexer layer 2, space 'device', page " in last
    assert "(page 0 of request " in last
    assert "c4_kv" not in out.split("wrong:")[1]  # host pages were right
    assert "Every byte is right" not in out


def test_demo_replays_a_trace(mooncake, capfd, tmp_path):
    code = demo("--trace", write_trace(tmp_path / "trace.jsonl", 200), "--requests", "3", "--seed", "5")
    out, err = capfd.readouterr()
    assert code == run.RIGHT, out + err


ENGINES = ["mooncake", "nixl", pytest.param("local", marks=NO_GPU)]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("draft", [(), ("--draft",)])
def test_demo_over_every_engine(capfd, name, draft):
    need(name)
    code = demo("--tokens", "700", "300", "--engine", name, *draft)
    out, err = capfd.readouterr()
    assert code == run.RIGHT, out + err


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("route, tp", [("direct", "4:8"), ("packed", "4:8"), ("auto", "8:4")])
def test_demo_moves_rows_by_every_route(capfd, name, route, tp):
    need(name)
    code = demo("--tokens", "700", "300", "--engine", name, "--route", route, "--tp", tp)
    out, err = capfd.readouterr()
    assert code == run.RIGHT, out + err
    total = next(line.split() for line in out.splitlines() if line.startswith("total"))
    assert total[1:5] == ["1,000", "5", "2", "4,000"]  # a row for each token, of K and V, of two layers
    assert total[5] == f"{1000 * 4 * 512 / 1e6:.1f}"


def test_demo_packs_whole_pages_too(mooncake, capfd):
    code = demo("--tokens", "700", "300", "--route", "packed")
    out, err = capfd.readouterr()
    assert code == run.RIGHT, out + err


def test_check_of_rows_knows_heads_and_tokens():
    """Half of a page's heads come from the source, and only rows of tokens: all else must be as it was."""
    mine, sent = Heads(4, 8, 8), Heads(4, 6, 8)
    pools = Pools(8, heads=mine)
    pools.fill(GUARD)
    due = {"device": Due()}
    due["device"].add(7, [3, 5], [1, 0], tokens=300)  # 256 rows, and 44
    for region in pools.layout.regions:
        view = pools.pages(region).view(8, 256, 4, 64)
        keys = page_keys(SOURCE, pools.number[region.key], torch.tensor([1, 0]))
        source = pattern(keys, 256 * 2 * 64).view(2, 256, 2, 64)
        view[3, :, :2] = source[0]
        view[5, :44, :2] = source[1, :44]
    assert check(pools, due, sent) == []
    region = pools.layout.by_key["v", 1]
    view = pools.pages(region).view(8, 256, 4, 64)
    for page, row, head, is_due in ((3, 0, 1, True), (3, 255, 2, True), (5, 44, 0, True), (6, 0, 0, False)):
        view[page, row, head, 63] ^= 1 << 40
        (errors,) = check(pools, due, sent)
        assert (errors.name, errors.layer, errors.wrong_bytes, errors.due_pages) == ("v", 1, 1, int(is_due))
        view[page, row, head, 63] ^= 1 << 40


def test_check_finds_a_byte_in_the_draft_region():
    pools = Pools(8, 6, draft=True)
    pools.fill(GUARD)
    due = {space: Due() for space in ("host", "device")}
    assert check(pools, due) == []
    pools.pages(pools.layout.by_key[DRAFT])[3].view(torch.uint8)[9] ^= 1
    (errors,) = check(pools, due)
    assert (errors.name, errors.wrong_bytes, errors.other_pages) == ("draft_kv", 1, 1)


def test_demo_refuses_what_it_cannot_run(capfd, tmp_path, monkeypatch):
    assert demo("--trace", str(tmp_path / "none")) == run.FAILED
    assert "No such file" in capfd.readouterr().err
    monkeypatch.setattr(run, "available_memory", lambda: 1 << 20)
    assert demo() == run.FAILED
    assert "lower --requests or --tokens" in capfd.readouterr().err
    assert demo("--tp", "4:8", "--draft") == run.FAILED
    assert "leave out --draft" in capfd.readouterr().err
    for wrong in (["--tokens", "0"], ["--requests", "x"], ["--timeout", "0"], ["--engine", "none"], ["--tp", "4:3"],
                  ["--tp", "4"], ["--tp", "0:8"], ["--tp", "4:-8"], ["--route", "fast"]):  # fmt: skip
        with pytest.raises(SystemExit):
            demo(*wrong)


def test_demo_gives_up_in_time(capfd):
    start = time.monotonic()
    assert demo("--timeout", "0.3") == run.FAILED
    assert time.monotonic() - start < 5
    assert "not done after 0.3 s (prefill: starting; decode: " in capfd.readouterr().err


def start_demo() -> tuple[subprocess.Popen[str], dict[str, int]]:
    """A demo in a process of its own, and the pids of its two children."""
    code = (
        # A shell that runs the tests in the background has its jobs ignore SIGINT; a person at a terminal has not.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "import argparse, sys; from kvplan.demo import run; parser = argparse.ArgumentParser();"
        "run.add_arguments(parser); sys.exit(run.main(parser.parse_args()))"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    pids: dict[str, int] = {}
    deadline = time.monotonic() + 60
    while len(pids) < 2 and time.monotonic() < deadline:
        for pid in Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            pids.update({name: int(pid) for name in ("prefill", "decode") if f"kvplan.demo.{name}".encode() in command})
        time.sleep(0.02)
    assert len(pids) == 2
    return parent, pids


def gone(pids: dict[str, int]) -> bool:
    """Whether all of these end within 10 s."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        if not any(os.path.exists(f"/proc/{pid}") for pid in pids.values()):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds processes in /proc")
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_demo_leaves_no_orphan(mooncake, sign):
    parent, pids = start_demo()
    parent.send_signal(sign)
    out, err = parent.communicate(timeout=30)
    assert parent.returncode != 0, out + err
    assert gone(pids)
    assert "Traceback" not in err


@pytest.mark.skipif(not os.path.exists("/proc/self/task"), reason="finds processes in /proc")
@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_demo_shows_which_process_failed(mooncake, name):
    parent, pids = start_demo()
    os.kill(pids[name], signal.SIGKILL)
    out, err = parent.communicate(timeout=60)
    assert parent.returncode == run.FAILED, out + err
    assert f"the {name} process failed: was ended by signal 9 before it was done" in err
    assert gone(pids)
