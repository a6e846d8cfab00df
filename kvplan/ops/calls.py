"""The stages as thin documented calls of torch ops."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import shown
from . import schemas as _schemas  # noqa: F401  # defines the ops
from .backend import EXTENSION

SIZES = 9  # words of struct JobSize (csrc/job.h), with which a job begins

_plan = torch.ops.kvplan.plan.default
_plan_into = torch.ops.kvplan.plan_into.default
_prepare = torch.ops.kvplan.prepare.default
_plan_ = torch.ops.kvplan.plan_.default
_page_indices = torch.ops.kvplan.page_indices.default
_check_pages = torch.ops.kvplan.check_pages.default
_find_runs = torch.ops.kvplan.find_runs.default
_expand = torch.ops.kvplan.expand.default
_copy = torch.ops.kvplan.copy_.default
_pack = torch.ops.kvplan.pack.default
_first_collision = torch.ops.kvplan.first_collision.default


def plan(tables: torch.Tensor, pages: torch.Tensor, windows: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """All stages of planning in one call on the CPU, for one request or many.

    Args:
        tables: int64 [T], the tables of a Pairing (structs Header, Entry, Group, Space in csrc/entry.h).
        pages: int32 or int64 [P], the page lists of all requests, concatenated.
        windows: a *window* says which part of `pages` one request uses in one space. Seven numbers (struct Window) for
            each request, for each space: offset and length of the source list in `pages`, offset and length of the
            destination list, src_start, dst_start (-1: none), num_tokens (-1: all).

    Returns:
        table: int64 [3, N]: src address, dst address, nbytes; N = 0 where the status is not 0.
        info: int64: status (Code in csrc/entry.h), its request, space, position and value; where the status is 0, then
            [segments * requests + 1] offsets into the table.

    Raises:
        RuntimeError: tables or windows are malformed.
    """
    return _plan(tables, pages, windows)


def plan_into(tables: torch.Tensor, pages: torch.Tensor, windows: Sequence[int], info: torch.Tensor) -> torch.Tensor:
    """`plan`, which writes its info into memory that the caller keeps: to make a tensor takes longer than a small plan.

    Args:
        tables, pages, windows: as `plan` takes them.
        info: int64 [6 + segments * requests] or longer, written: the words of `plan`'s info. What follows them stays.

    Returns:
        table: as `plan` returns it.

    Raises:
        RuntimeError: tables or windows are malformed, or info is too short.
    """
    return _plan_into(tables, pages, windows, info)


def prepare(tables: torch.Tensor, windows: Sequence[int], num_pages: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Check lengths and positions, and build a *job*: the tensor of work that `plan_` does. No page id is read.

    Args:
        tables, windows: as `plan` takes them; tables on the CPU.
        num_pages: page ids there will be.

    Returns:
        job: int64 [J] for `plan_`, to be moved to the device as it is; empty where the status is not 0. It begins with
            the SIZES words of struct JobSize (csrc/job.h); the last of them, `most`, bounds the descriptors.
        status: int64 [5]: status (Code in csrc/entry.h), its request, space, position and value.

    Raises:
        RuntimeError: tables or windows are malformed.
    """
    return _prepare(tables, windows, num_pages)


def plan_(
    tables: torch.Tensor,
    job: torch.Tensor,
    pages: torch.Tensor,
    sizes: Sequence[int],
    table: torch.Tensor,
    info: torch.Tensor,
) -> None:
    """Plan a prepared job where the page ids are, into tensors that are given; nothing waits.

    In a CUDA graph, a replay plans whatever `pages` (and `job`, if its sizes stay the same) hold by then.

    Args:
        tables: int64 [T], the tables of a Pairing, on the device of `pages`.
        job: int64 [J], from `prepare`, on that device. A GPU does not check its contents; the CPU refuses a job
            that indexes outside of `pages`, with kJob.
        pages: int32 or int64 [P], the page lists of all requests, concatenated, as the windows say.
        sizes: the first SIZES words of the job, on the host.
        table: int64 [3, room], written: descriptors 0 to N - 1. What lies after them stays as it is. On the device,
            or in pinned host memory.
        info: int64 [6 + segments * requests], written, on the device or in pinned host memory. Words 0 to 4: the status
            as in `plan`. Then, for each segment, for each request, the number of its first descriptor. The last word:
            N. If the status is not 0, all words after it are 0 and the table is untouched. Status kRoom (12): `value`
            is the room needed. Status kJob (13): the tensors were not made for the same planning call.

    Raises:
        RuntimeError: shapes, dtypes or devices are wrong.
    """
    _plan_(tables, job, pages, sizes, table, info)


def page_indices(
    slots: torch.Tensor,
    page_size: int,
    rows: torch.Tensor | None = None,
    lengths: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page ids of requests from the slots of their tokens.

    Slot s lies in page s // page_size. The slots of one page must be consecutive and begin at the page's start; the
    last page may be partly filled.

    Args:
        slots: int32 or int64: [T], one request's; or a table [R, L] with a request's slots in a row (SGLang's
            `req_to_token`), whose rows may lie apart.
        page_size: tokens a page.
        rows: int64 [B], the row of each request in a table; by default every row in turn.
        lengths: int64 [B], the tokens of each; by default whole rows.

    Returns:
        pages: int64 [ceil(T / page_size)], or [B, ceil(L / page_size)] with -1 after a request's end.
        bad: int64 [1] or [B]: position of the first slot that breaks the rule, -1 where none does, -2 where the request
            names no row or more tokens than a row has. Where it is not -1, the request's pages are void.
    """
    if page_size < 1:
        raise ValueError(f"page_size is {page_size}; it must be at least 1")
    return _page_indices(slots, page_size, rows, lengths)


def check_pages(pages: torch.Tensor, limit: int, distinct: bool) -> torch.Tensor:
    """The checks that `plan` makes of a list of page ids, on the CPU.

    Args:
        pages: int32 or int64 [P].
        limit: ids must be 0 to limit - 1.
        distinct: whether no id may be there twice, as on the destination.

    Returns:
        int64 [3]: status (Code in csrc/entry.h, 0 where all is well), position and value of the first bad id.
    """
    return _check_pages(pages, limit, distinct)


def find_runs(
    src: torch.Tensor, dst: torch.Tensor, indptr: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Longest stretches in which both indices go up by one.

    Args:
        src, dst: int64 [n].
        indptr: int64 [B + 1]: pairs indptr[b] to indptr[b + 1] - 1 are list b, and no run reaches over its end. By
            default all are one list.

    Returns:
        runs: int64 [3, n]: first src index, first dst index, length; zeros after the last run.
        run_indptr: int64 [B + 1]: the runs of list b are run_indptr[b] to run_indptr[b + 1] - 1. `expand` takes it. The
            last word is how many runs there are; on a GPU it is -1 where `indptr` does not rise from 0 to n.

    Raises:
        RuntimeError: on the CPU, where `indptr` does not rise from 0 to n.
    """
    if src.shape != dst.shape or src.dim() != 1:
        raise ValueError(f"src and dst must be 1-D of one length, not {list(src.shape)} and {list(dst.shape)}")
    return _find_runs(src, dst, indptr)


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
        table: int64 [3, capacity]: src address, dst address, nbytes; zeros after the last descriptor.
        count: int64 [1]: descriptors. Where it exceeds the capacity, the table is all zeros: nothing is cut off. On a
            GPU it is -1, and the table all zeros, where the CPU would raise.

    Raises:
        RuntimeError: on the CPU, where a run or entry is malformed, or an address passes 64 bits.
    """
    return _expand(entries, runs, indptr, steps, capacity)


def copy_(
    table: torch.Tensor,
    count: torch.Tensor | None = None,
    *,
    read: Sequence[torch.Tensor] = (),
    written: Sequence[torch.Tensor] = (),
    homes: Sequence[int] | None = None,
) -> None:
    """Carry out the descriptors of a table, where the table lies: on the CPU in this process, on a GPU on its stream.

    Args:
        table: int64 [3, N]: src address, dst address, nbytes; on the CPU, rows may lie apart, as in a part of a larger
            table. All addresses must be reachable: on a GPU its own memory and pinned host memory are. Ranges must not
            overlap.
        count: int64 [1], on the table's device: how many of them; by default N. On a GPU nothing moves where it is not
            0 to N, so the last word of a refused plan's info will do.
        read, written: the tensors whose memory this op reads and writes, so that torch.compile keeps the order of
            calls. Memory that is both must be named in both.
        homes: the `data_ptr()` of each tensor of `read`, then of `written`, when the table was made, as int64 (the
            bits). If a compiler passes a copy of a tensor, the addresses in the table are adjusted to that copy.
            Default: where they are now. It must be given while compiling.

    Raises:
        ValueError: while compiling, `homes` is not given.
        RuntimeError: on a GPU, more than 64 of the tensors have been moved. On the CPU, a descriptor crosses the
            end of a moved tensor. On a GPU such a descriptor is skipped.
    """
    if homes is None:
        if torch.compiler.is_compiling() and (read or written):
            raise ValueError("while compiling, copy_ needs homes: where the table's tensors lay when it was made")
        homes = [_signed(tensor.data_ptr()) for tensor in (*read, *written)]
    _copy(table, count, list(read), list(written), list(homes))


def first_collision(ranges: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Number of the first range in `ranges` that overlaps any range in `others`, on the CPU.

    Args:
        ranges: int64 [2, N], the bits of addresses and of bytes; none passes 64 bits. An empty one shares no byte.
        others: int64 [2, M], the same; sorted, apart from each other, none empty.

    Returns:
        int64 [1]: that number, or -1 if none does.

    Raises:
        RuntimeError: `others` is not sorted, overlaps itself or has an empty range; or a tensor has another form.
    """
    return _first_collision(ranges, others)


def pack(
    table: torch.Tensor, cuts: Sequence[int], read: bool, piece: int, edges: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A table by way of staging, whose byte k is byte k of the table: local copies, and descriptors for an engine.

    The *remote* side is the source where `read` is true, else the destination; the *local* side is the other one.
    Descriptors of no bytes are left out. On a GPU, this waits twice for how much there is of what it returns.

    Args:
        table: int64 [3, N]: src address, dst address, nbytes; the words of a row side by side.
        cuts: where each segment begins, and where the last one ends: from 0 to N. No piece crosses a cut.
        read: whether bytes go from the remote side to staging and on to the local side; else the other way.
        piece: bytes of a piece, at most; at least 1. A piece ends behind the last descriptor that fits into it. Where
            not even one does, it is cut.
        edges: int64 [K], the bits of remote addresses, ascending as unsigned ones: no merged descriptor goes on over
            one, unless a single descriptor does.

    Returns:
        copies: int64 [3, C]: src, dst, nbytes of copies between the local side and staging, in order. On the side of
            staging a number is an offset. What follows on at the local side, within a piece, is one copy.
        merged: int64 [3, M]: the same between staging and the remote side. What follows on there is one.
        pieces: int64 [3, P + 1]: the copy, the merged descriptor and the byte of staging with which each piece begins.
            The last column: C, M and the bytes in all.
        info: int64 [2 + segments]: the number of the first descriptor that passes 64 bits, or with which the bytes
            in all pass 2^63 - 1; else -1. Then, where it is -1, the piece with which each segment begins, and P; else
            zeros, and the other results are of no columns but for one of zeros in pieces.

    Raises:
        RuntimeError: cuts do not rise from 0 to N; piece is below 1, or so small that there would be more than 2^24
            pieces; or a tensor has another form.
    """
    return _pack(table, cuts, read, piece, edges)


_MOST_THREADS = 1024
_num_threads = 1


def set_num_threads(threads: int) -> None:
    """How many threads may write the table of a plan on the CPU, or copy, the calling one included; 1 by default.

    `plan` and `plan_` use more than one where a table has more than 32 MB, `copy_` where each has at least 4 MB to
    copy, and no other op does. The threads are kvplan's own, and are kept. The calling thread works too, and waits only
    for work that another thread has begun: where all cores are busy, a thread that was woken may not run for
    milliseconds.

    Raises:
        ValueError: `threads` is not an integer from 1 to 1,024.
    """
    global _num_threads
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MOST_THREADS:
        raise ValueError(f"threads is {shown(threads)}; it must be an integer from 1 to {_MOST_THREADS}")
    if EXTENSION.exists():
        torch.ops.kvplan.set_num_threads(threads)
    _num_threads = threads


def get_num_threads() -> int:
    """What `set_num_threads` was called with last; 1 before."""
    return _num_threads


def _signed(address: int) -> int:
    return address - (1 << 64) if address >= 1 << 63 else address
