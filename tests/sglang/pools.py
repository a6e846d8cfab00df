"""The pools of both sides of a two-process run: NumPy arrays that stand for KV memory, and what they must hold after.

A case says which buffers there are, and which bytes of the prefill side each decode buffer must get. Nothing here uses
kvplan: the right bytes follow from page ids and row numbers alone.
"""

from __future__ import annotations

import dataclasses
import zlib

import numpy as np

POOL = 96  # pages of every buffer
RATIOS = [0, 0] + [4 if layer % 2 == 0 else 128 for layer in range(2, 43)]  # DeepSeek-V4-Flash
C4, C128 = RATIOS.count(4), RATIOS.count(128)
V4_PAGES = [37440] * C4 + [8448] * C4 + [1728] * C128
WINDOW = [4096] * 5


@dataclasses.dataclass(frozen=True)
class Case:
    """Buffers of one model on both sides, and how a request lies in them.

    Attributes:
        prefill, decode: bytes of a page of each KV buffer, in SGLang's order.
        host: decode buffers that host page ids number.
        draft: how many of the prefill and of the decode buffers, the last, are a draft model's.
        page_size: tokens of a prefill page.
        other_page_size: tokens of a decode page, where it differs.
        pages, chunk: prefill pages of a request, and of one chunk.
        tokens: tokens of a request.
        ratios: compression of each layer, or None.
        window: bytes of a page of each buffer of the sliding window.
        dcp: (size, rank) of the decode process.
        heads: KV heads of a row, in which K and V entries lie one half after the other; 0 for latent attention.
        ranks: decode processes, each with its share of the heads.
        own: whether pools, state and decode page ids are SGLang's own (sglang_pools.py), and no arrays of this file.
        groups: SGLang's `kv_buf_groups`, of Ascend's pools of latent attention. With 3, DCP shares out whole pages, and
            decode holds all pages of the last third of its buffers.
    """

    prefill: list[int]
    decode: list[int]
    host: int
    draft: tuple[int, int] = (0, 0)
    page_size: int = 256
    other_page_size: int | None = None
    pages: int = 60
    chunk: int = 20
    tokens: int = 60 * 256
    ratios: list[int] | None = None
    window: list[int] = dataclasses.field(default_factory=list)
    dcp: tuple[int, int] = (1, 0)
    heads: int = 0
    ranks: int = 1
    own: bool = False
    groups: int = 1

    @property
    def decode_page_size(self) -> int:
        """Tokens of a decode page, of those that this decode process holds."""
        return self.other_page_size or self.page_size

    @property
    def decode_pages(self) -> int:
        """Decode page ids of a request."""
        return -(-self.tokens // (self.decode_page_size * self.dcp[0]))


def _dcp(rank: int) -> Case:
    row, draft_row, page = 1152, 512, 16
    return Case([row * page] * 4 + [draft_row * page], [row * page] * 4 + [draft_row * page * 2], 4, (1, 1), page, None,
                30, 10, 30 * page - 5, dcp=(2, rank))  # fmt: skip


def _paged(page: int, other: int, heads: int = 0) -> Case:
    """Decode pages of another size than prefill pages; chunks that end inside a decode page."""
    row, ranks = (128, 2) if heads else (1152, 1)
    return Case([row * page] * 4, [row * other // ranks] * 4, 4, (0, 0), page, other, 480 // page, max(1, 160 // page),
                480 - 5, heads=heads, ranks=ranks)  # fmt: skip


def _dcp_pages(rank: int) -> Case:
    latent, rope, index, page = 1024, 128, 256, 16
    mine = [latent * page] * 2 + [rope * page] * 2 + [index * page] * 2
    theirs = [latent * page] * 2 + [rope * page] * 2 + [index * page * 2] * 2
    return Case(mine, theirs, 6, page_size=page, pages=30, chunk=10, tokens=30 * page - 5, dcp=(2, rank), groups=3)


_V4 = Case(V4_PAGES, V4_PAGES, C4, ratios=RATIOS, window=WINDOW)
CASES = {
    "v4": _V4,
    "decode_only_draft": dataclasses.replace(_V4, decode=[*V4_PAGES, 37440, 8448], draft=(0, 2)),
    "latent_decode_only_draft": Case([18432] * 6, [18432] * 6 + [4096], 6, (0, 1), 16, tokens=60 * 16),
    "v4_own_pools": Case(
        [37440] * 3 + [8448] * 3 + [1728] * 3,
        [37440] * 3 + [8448] * 3 + [1728] * 3,
        3,
        tokens=60 * 256 - 5,  # so that C128 layers have a row that is not yet full
        ratios=[0, 0, 4, 128, 4, 128, 4, 128],
        own=True,
    ),
    "heads": Case([2 * 64 * 16] * 6, [64 * 16] * 6, 6, page_size=16, tokens=60 * 16, heads=2, ranks=2),
    "pages_16_to_64": _paged(16, 64),
    "pages_32_to_16": _paged(32, 16),
    "pages_16_to_24": _paged(16, 24),
    "heads_pages_16_to_64": _paged(16, 64, 2),
    "heads_pages_32_to_16": _paged(32, 16, 2),
    "dcp_rank_0": _dcp(0),
    "dcp_rank_1": _dcp(1),
}
#: Of Ascend's pools alone: DeepSeek-V4 as C4 KV, index keys and their scales; latent attention with index keys, which
#: is SGLang's own pool (sglang_pools.LatentNpu).
ASCEND_CASES = {
    "npu_v4": Case([37440] * C4 + [8192] * C4 + [256] * C4, [37440] * C4 + [8192] * C4 + [256] * C4, C4, ratios=RATIOS,
                   window=WINDOW),
    "npu_dcp_pages_rank_0": _dcp_pages(0),
    "npu_dcp_pages_rank_1": _dcp_pages(1),
}  # fmt: skip


def ids(what: str, room: int, count: int) -> np.ndarray:
    """Page ids of a room, int32 [count], in no order; the same wherever they are asked for."""
    rng = np.random.default_rng(zlib.crc32(what.encode()) + room)
    return rng.permutation(POOL)[:count].astype(np.int32)


def filled(pages: list[int], seed: int) -> list[np.ndarray]:
    """A prefill pool: buffers uint8 [POOL, page bytes] of known random bytes."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 255, (POOL, each), dtype=np.uint8) for each in pages]


def empty(pages: list[int]) -> list[np.ndarray]:
    """A decode pool of zeros."""
    return [np.zeros((POOL, each), np.uint8) for each in pages]


def first_wrong(
    case: Case,
    pool: list[np.ndarray],
    source: list[np.ndarray],
    room: int,
    where: dict[str, np.ndarray],
    rank: int = 0,
) -> str | None:
    """The first decode buffer that does not hold what a room must leave in it, or None. `where`: page ids by space."""
    src = ids("prefill", room, case.pages)
    sent = len(case.prefill) - case.draft[0]
    for number, buffer in enumerate(pool):
        draft = number - (len(case.decode) - case.draft[1])
        space = "host" if number < case.host else "device"
        dst = where[space]
        want = np.zeros_like(buffer)
        if case.heads:
            rows = source[number][src].reshape(case.pages * case.page_size, case.ranks, -1)[: case.tokens, rank]
            position, stored = np.arange(case.tokens), case.decode_page_size
            want.reshape(POOL * stored, -1)[dst[position // stored] * stored + position % stored] = rows
        elif draft < 0:
            share = (1, 0) if case.groups == 3 and 3 * number >= 2 * len(pool) else case.dcp
            _place(case, want, dst, source[number], src, share)
        elif draft < case.draft[0]:
            _place(case, want, dst, source[sent + draft], src, (1, 0))
        if not np.array_equal(want, buffer):
            page = int(np.flatnonzero((want != buffer).any(axis=1))[0])
            return f"buffer {number}, page {page}"
    return None


def _place(case: Case, want: np.ndarray, dst: np.ndarray, held: np.ndarray, src: np.ndarray, share: tuple[int, int]
           ) -> None:  # fmt: skip
    """Copy what one decode buffer must get: rows where rows are shared out, else pages, the last one whole."""
    size, rank = share
    if case.dcp[0] == 1 and case.decode_page_size == case.page_size:
        want[dst] = held[src]
        return
    position = np.arange(rank, case.tokens, size)
    if case.groups == 3:
        every = np.arange(case.pages * case.page_size)
        position = every[every // case.page_size % size == rank]
    rows = held.reshape(POOL * case.page_size, -1)[src[position // case.page_size] * case.page_size
                                                    + position % case.page_size]  # fmt: skip
    stored = want.shape[1] // rows.shape[1]  # rows that a decode page stores
    local = np.arange(len(position))
    want.reshape(POOL * stored, -1)[dst[local // stored] * stored + local % stored] = rows
