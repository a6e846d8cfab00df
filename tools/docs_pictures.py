"""python tools/docs_pictures.py: draws the pictures of docs/concepts.md with kvplan's own commands."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import kvplan
from kvplan.__main__ import main
from kvplan.demo.allocator import PAGE

OUT = Path(__file__).resolve().parents[1] / "docs/img"
SOURCE_PAGES = [3, 4, 5, 6, 12, 13, 14, 1, 20, 21, 22, 23]
HOST_PAGES = [40, 41, 42, 43, 44, 10, 11, 12, 30, 31, 32, 33]
DEVICE_PAGES = [5, 6, 7, 16, 17, 18, 19, 20, 21, 1, 2, 3]


def case(src: kvplan.Layout, dst: kvplan.Layout, dst_pages: dict[str, list[int]]) -> dict:
    return {"src": src.to_dict(), "dst": dst.to_dict(), "src_pages": SOURCE_PAGES, "dst_pages": dst_pages}


def heads(base: int, rank: int, size: int) -> kvplan.Layout:
    """One rank of `size` that share 8 heads of 256 bytes: two layers, pages of 16 tokens."""
    share = 8 // size
    mine = kvplan.Heads(rank * share, (rank + 1) * share, 8)
    return kvplan.Layout.mha(base, layers=2, num_pages=64, heads=mine, page_size=16, head_bytes=256)


def draw(command: str, content: dict, name: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(content, file)
        file.flush()
        status = main([command, file.name, "--picture", str(OUT / name)])
    if status:
        raise SystemExit(f"{name}: kvplan {command} ended with {status}")


if __name__ == "__main__":
    v4 = [kvplan.Layout.deepseek_v4(1 << 40, num_pages=64)]
    v4.append(kvplan.Layout.deepseek_v4(1 << 41, num_pages=64, num_host_pages=64))
    assert {layout.page_size for layout in v4} == {PAGE}
    draw("explain", case(*v4, {"host": HOST_PAGES, "device": DEVICE_PAGES}), "two_spaces.png")
    prefill = [heads((rank + 1) << 36, rank, 2) for rank in range(2)]
    decode = [heads((rank + 1) << 40, rank, 4) for rank in range(4)]
    draw("explain", case(prefill[0], decode[1], {"device": DEVICE_PAGES}), "heads.png")
    cluster = {
        side: [layout.to_dict() for layout in ranks] for side, ranks in (("prefill", prefill), ("decode", decode))
    }
    draw("check", cluster, "cluster.png")
