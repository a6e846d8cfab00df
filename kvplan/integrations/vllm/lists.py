"""From block tables of both sides to the page lists of one request. Nothing of vLLM is imported here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from kvplan import Pairing, PlanError, Request

NULL_BLOCK = 0  # stands in the table of a sliding window for blocks that are out of the window


@dataclasses.dataclass(frozen=True)
class Tables:
    """The block tables of one request on one side.

    Args:
        blocks: {space: block ids from the request's first token on}.
        ratios: {space: kernel blocks in one block}; see `words.Described`.
    """

    blocks: Mapping[str, Sequence[int]]
    ratios: Mapping[str, int]

    def pages(self, space: str, side: str) -> np.ndarray:
        """The kernel blocks of a table, int64."""
        if space not in self.blocks:
            raise PlanError(f"the {side} side gave no block table for {space!r}, but for {sorted(self.blocks)}")
        blocks, ratio = np.asarray(self.blocks[space], np.int64), self.ratios[space]
        if ratio == 1 or not len(blocks):
            return blocks
        return (blocks[:, None] * ratio + np.arange(ratio)).reshape(-1)

    def first_kept(self, space: str) -> int:
        """How many kernel blocks at the head of a table are out of the window."""
        blocks = np.asarray(self.blocks[space], np.int64)
        kept = np.flatnonzero(blocks != NULL_BLOCK)
        return (int(kept[0]) if len(kept) else len(blocks)) * self.ratios[space]


def request(pairing: Pairing, src: Tables, dst: Tables, start: int, stop: int) -> Request:
    """What `Pairing.plan` takes to move the tokens start to stop - 1 of one request.

    Both tables begin at the request's first token, so nothing is ever aligned at the end: blocks behind `stop`, such as
    a lookahead block of the prefill side, are left out. What is out of the window on one side is not sent.

    Args:
        pairing: of the prefill rank with this decode rank.
        src, dst: tables of the prefill side and of this side.
        start: tokens that this side has already (a prefix hit). A multiple of its blocks.
        stop: the end of what is sent; at most what the prefill side holds.

    Raises:
        PlanError: a table is missing. `Pairing.plan` refuses lists that do not cover the tokens.
    """
    src_pages: dict[str | None, np.ndarray] = {}
    dst_pages: dict[str, np.ndarray] = {}
    src_start: dict[str | None, int] = {}
    dst_start: dict[str | None, int] = {}
    num_tokens: dict[str | None, int] = {}
    for space in pairing.space_names:
        there, step = pairing.src_spaces[space], pairing.src_tokens[space]
        here: int = pairing.destination(space).tokens  # type: ignore[assignment]
        theirs, mine = src.pages(there, "prefill"), dst.pages(space, "decode")
        first = min(max(start, src.first_kept(there) * step, dst.first_kept(space) * here), stop)
        at, to = first // step, first // here
        src_pages[space] = theirs[at : -(-stop // step)]
        dst_pages[space] = mine[to : -(-stop // here)]
        if first == stop:
            src_pages[space], dst_pages[space] = theirs[:0], mine[:0]
            at = to = 0
        num_tokens[space] = 0 if first == stop else stop - at * step
        src_start[space], dst_start[space] = at * step, to * here
    return Request(src_pages, dst_pages, src_start, dst_start, num_tokens)
