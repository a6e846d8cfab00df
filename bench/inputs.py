"""Inputs shared by kvplan's benchmarks and the peers' scripts. Needs NumPy only: peers run in their own environment."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

PAGES = (64, 512, 4096)
PATTERNS = ("contiguous", "runs of 8", "scattered")
NUM_PAGES = 65_536  # pages of each pool
SEED = 0

# One page of DeepSeek-V4-Flash, region by region: 21 C4 KV (host pages), 21 C4 indexers and 20 C128 KV (device pages).
C4, INDEXER, C128 = (21, 37_440), (21, 8_448), (20, 1_728)
PAGE_BYTES = [size for count, size in (C4, INDEXER, C128) for _ in range(count)]
HOST_REGIONS = C4[0]

SRC_BASE, DST_BASE = 1 << 44, 1 << 46


def base(start: int, region: int) -> int:
    """Where a region lies: far enough apart that none overlap."""
    return start + (region << 33)


def make_pages(rng: np.random.Generator, n: int, pattern: str, num_pages: int = NUM_PAGES) -> npt.NDArray[np.int32]:
    """`n` distinct page ids below `num_pages`, int32 [n]; one draw from `rng`.

    "runs of 8": aligned blocks of eight consecutive ids, in random order. "scattered": any ids in random order.
    """
    if pattern == "contiguous":
        return np.int32(rng.integers(0, num_pages - n + 1)) + np.arange(n, dtype=np.int32)
    run = {"runs of 8": 8, "scattered": 1}[pattern]
    blocks = rng.permutation(num_pages // run)[: n // run].astype(np.int32)
    return (blocks[:, None] * run + np.arange(run, dtype=np.int32)).reshape(-1)


def request(n: int, pattern: str) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(source, host, device) page ids of one request, drawn independently."""
    rng = np.random.default_rng([SEED, n, PATTERNS.index(pattern)])
    source, host, device = (make_pages(rng, n, pattern) for _ in range(3))
    return source, host, device


# Row-wise plans: one decode rank of DCP 8, and one pair of ranks of TP 4 to 8.
LAYERS, PAGE_TOKENS = 61, 64
DCP_SIZE, DCP_RANK, DCP_TOKENS, DCP_ROW = 8, 3, 131_072, 1_152
SLICE_TOKENS, HEADS, HEAD_BYTES, SRC_TP, DST_TP, SLICE_SRC_RANK, SLICE_DST_RANK = 32_768, 8, 256, 4, 8, 1, 3


def dcp_request() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(source, destination) page ids, scattered: pages of 64 tokens, and of 64 rows that stand for 512."""
    rng = np.random.default_rng(SEED)
    pages = DCP_TOKENS // PAGE_TOKENS
    return make_pages(rng, pages, "scattered"), make_pages(rng, pages // DCP_SIZE, "scattered")


def slice_request() -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """(source, destination) page ids, scattered."""
    rng = np.random.default_rng(SEED)
    pages = SLICE_TOKENS // PAGE_TOKENS
    return make_pages(rng, pages, "scattered"), make_pages(rng, pages, "scattered")
