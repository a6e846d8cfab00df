"""SGLang's buffers as layouts: one pairing for each way in which SGLang moves them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from kvplan import Heads, Interleave, Layout, Memory, Pairing, PairingError, Region, pair

from .names import Key, Model, NotToldError

#: Index spaces of the decode side. HiSparse keeps what attention reads sparsely in host memory, under host page ids.
HOST, DEVICE = "host", "device"

_HOST_NAMES = ("c4_kv", "c4_rope")  # of DeepSeek-V4's entries, those that HiSparse keeps in host memory


@dataclasses.dataclass(frozen=True)
class Buffers:
    """One side's buffers, a column each.

    Attributes:
        keys: name and layer of each.
        bases: where each begins.
        page_bytes: bytes of a page of each.
        num_pages: pages of each; None where the side does not say.
    """

    keys: Sequence[Key]
    bases: Sequence[int]
    page_bytes: Sequence[int]
    num_pages: Sequence[int | None]

    @classmethod
    def own(cls, keys: Sequence[Key], bases: Sequence[int], page_bytes: Sequence[int], nbytes: Sequence[int] | None,
            ) -> Buffers:  # fmt: skip
        """Buffers of this process, whose sizes in bytes are known."""
        pages = [None] * len(keys) if nbytes is None else _page_counts(nbytes, page_bytes)
        return cls(keys, bases, page_bytes, pages)

    def without(self, left_out: Callable[[Key], bool]) -> Buffers:
        """These buffers but those whose key is left out."""
        kept = [number for number, key in enumerate(self.keys) if not left_out(key)]
        columns = (self.keys, self.bases, self.page_bytes, self.num_pages)
        return Buffers(*([column[number] for number in kept] for column in columns))  # type: ignore[arg-type]

    def layout(self, page_size: int, **fields: Any) -> Layout:
        """Them as a layout; `fields` as `Layout.from_columns` takes them, `rows` among them.

        SGLang's pools of rows have no padding: it counts bytes of a token as item length / page size.
        """
        rows = fields["rows"] if isinstance(fields["rows"], list) else [fields["rows"]] * len(self.keys)
        row_bytes = [0 if each % count else each // count for each, count in zip(self.page_bytes, rows, strict=True)]
        return Layout.from_columns(
            [name for name, _ in self.keys], [layer for _, layer in self.keys], list(self.bases),
            list(self.page_bytes), list(self.num_pages), page_size=page_size, row_bytes=row_bytes, **fields,
        )  # fmt: skip


def _page_counts(nbytes: Sequence[int], page_bytes: Sequence[int]) -> list[int | None]:
    # A buffer of zero bytes is elided: it has no page, and is left out before it becomes a region.
    return [total // each if each and total >= each else None for total, each in zip(nbytes, page_bytes, strict=True)]


def whole_pages(src: Buffers, dst: Buffers, model: Model | None, two_spaces: bool) -> Pairing:
    """Pages that move whole. With `two_spaces`, the decode side numbers host pages and device pages apart.

    Raises:
        LayoutError, PairingError: the two sides do not fit.
    """
    spaces: list[str] = [DEVICE] * len(dst.keys)
    if two_spaces and model is not None:
        spaces = [space_of(model, number, key, len(dst.keys)) for number, key in enumerate(dst.keys)]
    return pair(src.layout(1, rows=1), dst.layout(1, rows=1, space=spaces))


def space_of(model: Model, number: int, key: Key, count: int) -> str:
    """The index space of decode entry `number` of `count`, where decode numbers host pages and device pages apart.

    Raises:
        NotToldError: what is known of the pool does not tell.
    """
    if model.ratios:
        if key[0] == "entry":
            raise NotToldError(f"{count} KV entries fit no pool that is known: it is not known which are host memory")
        return HOST if key[0] in _HOST_NAMES else DEVICE
    if model.groups > 2:
        raise NotToldError("index keys lie among the KV entries, and SGLang does not say which page ids number them")
    draft = key[0] == "draft" or number >= count - model.draft
    return DEVICE if draft else HOST


def rank_heads(total: int, ranks: int, rank: int) -> Heads:
    """The KV heads of one rank of attention TP; with fewer heads than ranks, neighbours hold the same head.

    Raises:
        NotToldError: the heads do not divide evenly.
    """
    if max(total, ranks) % min(total, ranks):
        raise NotToldError(f"{total} KV heads do not divide evenly over {ranks} ranks")
    held, replicas = max(1, total // ranks), max(1, ranks // total)
    start = rank % ranks // replicas * held
    return Heads(start, start + held, total)


def heads(src: Buffers, dst: Buffers, page_size: int, src_heads: Heads, dst_heads: Heads) -> Pairing:
    """Rows whose heads differ between the sides.

    Raises:
        LayoutError, PairingError: the two sides do not fit.
    """
    pairing = paged(src, dst, page_size, page_size, (src_heads, dst_heads))
    if len(src.keys) and not len(pairing.entries):
        raise PairingError(f"prefill holds heads {src_heads} and decode {dst_heads}: none of them is to be sent")
    return pairing


def paged(
    src: Buffers, dst: Buffers, src_page: int, dst_page: int, heads: tuple[Heads | None, Heads | None]
) -> Pairing:
    """Rows between pages of `src_page` and of `dst_page` tokens. `heads`: of both sides, where rows are cut by heads.

    Raises:
        LayoutError, PairingError: the two sides do not fit.
    """
    return pair(
        src.layout(src_page, rows=src_page, heads=heads[0]), dst.layout(dst_page, rows=dst_page, heads=heads[1])
    )


def interleaved(src: Buffers, dst: Buffers, page_size: int, share: Interleave, draft: Draft, two_spaces: bool,
                memory: tuple[Any, Any] = (Memory.DRAM, Memory.DRAM),
                whole: Callable[[Key], bool] = lambda key: key[0] == "draft") -> Pairing:  # fmt: skip
    """Rows for one rank of decode context parallelism.

    `memory`: where both sides' buffers lie, one for all or a list. `whole`: whether an entry is not interleaved, so
    that decode stores all its rows; by default those of a draft model.

    Raises:
        LayoutError, PairingError: the two sides do not fit.
    """
    virtual = page_size * share.size
    all_rows = [whole(key) for key in dst.keys]
    own = dict(zip(src.keys, src.page_bytes, strict=True))
    sides = {key: draft.heads(own[key] // page_size, each // virtual)
             for key, each, every in zip(dst.keys, dst.page_bytes, all_rows, strict=True)
             if every and key in own}  # fmt: skip
    mine, theirs = ([sides.get(key, (None, None))[k] for key in keys] for k, keys in enumerate((src.keys, dst.keys)))
    return pair(
        src.layout(page_size, rows=page_size, heads=mine, memory=memory[0]),
        dst.layout(
            virtual,
            rows=[virtual if every else page_size for every in all_rows],
            interleave=[None if every else share for every in all_rows],
            heads=theirs,
            space=[HOST if two_spaces and not every else DEVICE for every in all_rows],
            memory=memory[1],
        ),
    )


@dataclasses.dataclass(frozen=True)
class Draft:
    """How the KV heads of a draft model lie over the ranks of attention TP.

    Attributes:
        src_tp, src_rank: ranks of the prefill side, and this one.
        dst_tp, dst_rank: the same of the decode side.
        sliced: whether heads may differ between the sides: not for latent attention, where prefill ranks stand back.
    """

    src_tp: int
    src_rank: int
    dst_tp: int
    dst_rank: int
    sliced: bool

    def heads(self, src_row: int, dst_row: int) -> tuple[Heads | None, Heads | None]:
        """The heads of both sides, counted in the smaller of the two rows, whose bytes are given.

        Raises:
            NotToldError: one row is no multiple of the other, or rows of this model may not differ.
        """
        if src_row == dst_row:
            return None, None
        small, large = sorted((src_row, dst_row))
        if not small or large % small or not self.sliced:
            raise NotToldError(
                f"a draft row takes {src_row} bytes on the prefill side and {dst_row} on the decode side"
            )
        count = large // small
        src_span, dst_span = src_row * self.src_tp, dst_row * self.dst_tp
        if src_row > dst_row:
            first = self.dst_rank // max(1, dst_span // src_span) % count
            return Heads(0, count, count), Heads(first, first + 1, count)
        first = self.src_rank % self.src_tp // max(1, src_span // dst_span) % count
        return Heads(first, first + 1, count), Heads(0, count, count)


def blocks(src: Buffers, dst: Buffers, cut: Callable[[int, int], list[tuple[int, int, int]]]) -> Pairing:
    """Parts of slots: `cut(i, j)` gives (source offset, destination offset, bytes) for source i and destination j.

    Raises:
        LayoutError, PairingError: the two sides do not fit.
    """
    place = {key: number for number, key in enumerate(dst.keys)}
    sides: tuple[list[Region], list[Region]] = [], []
    for i, (name, layer) in enumerate(src.keys):
        j = place.get((name, layer))
        if j is None:
            raise PairingError(f"state {name} layer {layer} has no destination")
        for number, (*offsets, nbytes) in enumerate(cut(i, j)):
            for side, at, buffers, offset in zip(sides, (i, j), (src, dst), offsets, strict=True):
                if offset < 0 or nbytes < 1 or offset + nbytes > buffers.page_bytes[at]:
                    raise PairingError(
                        f"state {name} layer {layer}: {nbytes} bytes at {offset} pass a slot of "
                        f"{buffers.page_bytes[at]}"
                    )
                side.append(
                    Region(f"{name}.{number}", layer, buffers.bases[at] + offset, nbytes, buffers.num_pages[at],
                           page_stride=buffers.page_bytes[at], tokens=1, rows=1, space=DEVICE)
                )  # fmt: skip
    return pair(*(Layout(side, page_size=1) for side in sides))
