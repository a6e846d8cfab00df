"""The torch ops of kvplan: loading, fakes for tracing, and thin documented calls."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

EXTENSION = Path(__file__).parent / "_C.so"


def _load() -> None:
    if not EXTENSION.exists():
        raise ImportError(
            f"kvplan's compiled extension {EXTENSION.name} is missing: build it with "
            f"'pip install --no-build-isolation .' in the source tree (needs g++ and cmake). If that is done, you are "
            f"in the source tree, which hides the installed package: leave this folder, or install with --editable"
        )
    torch.ops.load_library(EXTENSION)


_load()

_plan = torch.ops.kvplan.plan.default
_page_indices = torch.ops.kvplan.page_indices.default
_check_pages = torch.ops.kvplan.check_pages.default
_find_runs = torch.ops.kvplan.find_runs.default
_expand = torch.ops.kvplan.expand.default
_copy = torch.ops.kvplan.copy_.default


def plan(tables: torch.Tensor, pages: torch.Tensor, windows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """All stages of planning in one call, for one request or many.

    Args:
        tables: int64 [T], the tables of a Pairing (structs Header, Entry, Group, Space in csrc/entry.h).
        pages: int32 or int64 [P], the page lists of all requests behind one another.
        windows: for each request, for each space, seven numbers (struct Window): offset and length of the source list
            in `pages`, the same of the destination list, then src_start, dst_start (-1: none), num_tokens (-1: all).

    Returns:
        table: int64 [3, N]: src address, dst address, nbytes; N = 0 where the status is not 0.
        info: int64: status (Code in csrc/entry.h), its request, space, position and value; where the status is 0, then
            [segments * requests + 1] offsets into the table.
    """
    return _plan(tables, pages, windows)


def page_indices(slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Page ids of a request from its token slots.

    Args:
        slots: int32 or int64 [T]: slot of each token. Slot s lies in page s // page_size. The slots of one page must be
            consecutive and begin at the page's start; the last page may be partly filled.
        page_size: tokens a page.

    Returns:
        pages: int64 [ceil(T / page_size)].
        bad: int64 [1]: position of the first slot that breaks the rule, or -1. Where it is not -1, pages is void.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    return _page_indices(slots, page_size)


def check_pages(pages: torch.Tensor, limit: int, distinct: bool) -> torch.Tensor:
    """The checks that `plan` makes of a list of page ids.

    Args:
        pages: int32 or int64 [P].
        limit: ids must be 0 to limit - 1.
        distinct: whether no id may be there twice, as on the destination.

    Returns:
        int64 [3]: status (Code in csrc/entry.h, 0 where all is well), position and value of the first bad id.
    """
    return _check_pages(pages, limit, distinct)


def find_runs(src: torch.Tensor, dst: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Longest stretches in which both indices go up by one.

    Args:
        src, dst: int64 [n].

    Returns:
        runs: int64 [3, n]: first src index, first dst index, length; zeros behind the last run.
        count: int64 [1]: how many runs.
    """
    if src.shape != dst.shape or src.dim() != 1:
        raise ValueError(f"src and dst must be 1-D of one length, not {list(src.shape)} and {list(dst.shape)}")
    return _find_runs(src, dst)


def expand(
    entries: torch.Tensor, runs: torch.Tensor, indptr: torch.Tensor, steps: torch.Tensor, capacity: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Descriptors of all entries over the runs of their groups, by entry, then position.

    Args:
        entries: int64 [E, 6] (struct Entry in csrc/entry.h).
        runs: int64 [3, R]: first src index, first dst index, length.
        indptr: int64 [G + 1]: the runs of group g are indptr[g] to indptr[g + 1] - 1.
        steps: int64 [G, 2]: index steps from one pair of a run to the next, on each side.
        capacity: descriptors there is room for.

    Returns:
        table: int64 [3, capacity]: src address, dst address, nbytes; zeros behind the last descriptor.
        count: int64 [1]: descriptors. Where it exceeds the capacity, the table is all zeros: nothing is cut off.

    Raises:
        RuntimeError: a run or entry is malformed, or an address passes 64 bits.
    """
    return _expand(entries, runs, indptr, steps, capacity)


def copy_(table: torch.Tensor, written: Sequence[torch.Tensor] = ()) -> None:
    """Carries out the descriptors of `table` in this process.

    Args:
        table: int64 [3, N]: src address, dst address, nbytes. All addresses must be reachable here.
        written: tensors over the memory written, so that a compiler keeps this call in its place.
    """
    _copy(table, list(written))


@torch.library.register_fake("kvplan::plan")
def _(tables, pages, windows):  # type: ignore[no-untyped-def]
    context = torch.library.get_ctx()
    table = tables.new_empty((3, context.new_dynamic_size()))
    return table, tables.new_empty(context.new_dynamic_size())


@torch.library.register_fake("kvplan::page_indices")
def _(slots, page_size):  # type: ignore[no-untyped-def]
    pages = (slots.shape[0] + page_size - 1) // page_size
    return slots.new_empty(pages, dtype=torch.int64), slots.new_empty(1, dtype=torch.int64)


@torch.library.register_fake("kvplan::check_pages")
def _(pages, limit, distinct):  # type: ignore[no-untyped-def]
    return pages.new_empty(3, dtype=torch.int64)


@torch.library.register_fake("kvplan::find_runs")
def _(src, dst):  # type: ignore[no-untyped-def]
    return src.new_empty((3, src.shape[0])), src.new_empty(1)


@torch.library.register_fake("kvplan::expand")
def _(entries, runs, indptr, steps, capacity):  # type: ignore[no-untyped-def]
    return entries.new_empty((3, capacity)), entries.new_empty(1)


@torch.library.register_fake("kvplan::copy_")
def _(table, written):  # type: ignore[no-untyped-def]
    return None
