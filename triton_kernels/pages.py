"""Token slots -> page ids, and the checks on page ids. The Triton counterpart of csrc/cuda/pages.cuh."""

import torch
import triton
import triton.language as tl

from .words import (
    CHECK,
    DST_TWICE,
    ENTRY,
    GROUP,
    HEADER,
    JOB_SIZE,
    LIST,
    SPACE,
    TILED,
    UNKNOWN_JOB,
    check_here,
    check_words,
    device_of,
    items_of,
    kernel,
    last_not_above,
    tiles,
)

NO_ROW = tl.constexpr(-2)
# A compare-and-swap of more than one word a lane does not compile for AMD in Triton 3.6.
PLACES = {"BLOCK": 256, "num_warps": 4}
NEVER = tl.constexpr((1 << 63) - 1)  # a position behind all others


@kernel
def page_indices_kernel(
    slots,
    rows,  # [B] or None: rows in turn
    lengths,  # [B] or None: whole rows
    stride: tl.int64,  # slots from one row to the next
    num_rows: tl.int64,
    row_length: tl.int64,
    page_size: tl.int64,
    pages,  # [B, columns]
    columns: tl.int64,
    bad,  # uint64 [B], all bits set before
    row_tiles: tl.int64,  # programs a request
    BLOCK: tl.constexpr,
):
    """One lane a slot: reads it and its page's first one; the lane of a page's first slot writes the page's id."""
    program = tl.program_id(0).to(tl.int64)
    request = program // row_tiles
    at = items_of(program - request * row_tiles, BLOCK)
    row, valid = request, row_length
    if rows is not None:
        row = tl.load(rows + request)
    if lengths is not None:
        valid = tl.load(lengths + request)
    inside = (row >= 0) & (row < num_rows) & (valid >= 0) & (valid <= row_length)
    page = at // page_size
    first_at = page * page_size
    given = inside & (at < valid)
    slot = tl.load(slots + row * stride + at, mask=given, other=-1).to(tl.int64)
    first = tl.load(slots + row * stride + first_at, mask=given, other=-1).to(tl.int64)
    begins = at == first_at
    id = tl.where(slot >= 0, slot // page_size, -1)
    good = tl.where(begins, (slot >= 0) & (slot == id * page_size), (slot >= first) & (slot - first == at - first_at))
    worst = tl.min(tl.where(given & ~good, at, NEVER))
    tl.atomic_min(bad + request, worst.to(tl.uint64), mask=inside & (worst != NEVER))
    tl.store(bad + request, (row * 0 + NO_ROW).to(tl.uint64), mask=~inside)
    tl.store(pages + request * columns + page, id, mask=begins & (at < row_length))


def page_indices(
    slots: torch.Tensor, page_size: int, rows: torch.Tensor | None = None, lengths: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Page ids of requests from the slots of their tokens; see kvplan.ops.page_indices."""
    torch._check(page_size > 0, lambda: "page_size must be positive")
    torch._check(slots.dtype in (torch.int32, torch.int64), lambda: "slots must be int32 or int64")
    torch._check(slots.dim() in (1, 2), lambda: "slots must be [T] or [R, L]")
    torch._check(slots.shape[-1] <= 1 or slots.stride(-1) == 1, lambda: "the slots of a row must lie side by side")
    torch._check(
        slots.dim() == 2 or (rows is None and lengths is None), lambda: "rows and lengths go with slots [R, L]"
    )
    num_rows, row_length = (1, len(slots)) if slots.dim() == 1 else slots.shape
    requests = num_rows
    if rows is not None:
        check_words(rows, "rows")
        check_here(rows, "rows", slots.device)
        requests = rows.numel()
    if lengths is not None:
        check_words(lengths, "lengths")
        check_here(lengths, "lengths", slots.device)
        torch._check(lengths.numel() == requests, lambda: "lengths must have one number a request")
    columns = -(-row_length // page_size)
    words = {"dtype": torch.int64, "device": slots.device}
    pages = torch.empty(columns if slots.dim() == 1 else (requests, columns), **words)
    bad = torch.full((requests,), -1, **words)
    row_tiles = tiles(row_length)
    if requests > 0:
        with device_of(slots):
            page_indices_kernel[(requests * row_tiles,)](
                slots, rows, lengths, slots.stride(0), num_rows, row_length, page_size, pages, columns,
                bad.view(torch.uint64), row_tiles, **TILED,
            )  # fmt: skip
    return pages, bad


@triton.jit
def hash_of(id, scope):
    """Finalizer of MurmurHash3, which mixes all bits into all."""
    h = id.to(tl.uint64) + scope.to(tl.uint64) * 0x9E3779B97F4A7C15
    h ^= h >> 33
    h *= 0xFF51AFD7ED558CCD
    h ^= h >> 33
    h *= 0xC4CEB9FE1A85EC53
    return h ^ (h >> 33)


@triton.jit
def job_is_known(
    tables, job, tables_words, segments, requests, lists, pieces, checks, pairs, places, hashed, given, most
):
    """Whether what the host takes the job for is what it says."""
    same = (tl.load(job) == requests) & (tl.load(job + 1) == lists) & (tl.load(job + 2) == pieces)
    same &= (tl.load(job + 3) == checks) & (tl.load(job + 4) == pairs) & (tl.load(job + 5) == places)
    same &= (tl.load(job + 6) == hashed) & (tl.load(job + 7) == given) & (tl.load(job + 8) == most)
    entries, groups, spaces, cuts = tl.load(tables), tl.load(tables + 1), tl.load(tables + 2), tl.load(tables + 3)
    same &= (entries >= 0) & (entries <= tables_words) & (groups >= 0) & (groups <= tables_words)
    same &= (spaces >= 0) & (spaces <= tables_words) & (cuts >= 0) & (cuts <= tables_words)
    same &= (pieces == requests * entries) & (lists == requests * groups)
    same &= (cuts == segments) | (requests == 0)  # without requests info does not say how many segments there are
    return same & (tables_words == entries * ENTRY + groups * GROUP + spaces * SPACE + cuts + 1 + HEADER)


@triton.jit
def id_at(pages, check, place, valid):
    """Page id at a place of a check, whose row of the job lies at `check`."""
    at = tl.load(check + 1, mask=valid, other=0) + place - tl.load(check, mask=valid, other=0)
    return tl.load(pages + at, mask=valid, other=0).to(tl.int64)


@kernel
def check_kernel(
    tables,
    tables_words: tl.int64,
    segments: tl.int64,
    job,
    requests: tl.int64,  # struct JobSize, as the host believes it
    lists: tl.int64,
    pieces: tl.int64,
    checks: tl.int64,
    pairs: tl.int64,
    places: tl.int64,
    hashed: tl.int64,
    given: tl.int64,
    most: tl.int64,
    checks_leap: tl.int64,
    pages,
    table,  # [slots + 1], zeroed: places - the first place of an id, by id
    mask: tl.int64,  # slots - 1; they are a power of two
    status,  # zeroed: places - place of the first bad id
    BLOCK: tl.constexpr,
):
    """One lane a place: an id in range, or the first of its scope. Ids of a scope meet in an open hash table; of two
    that meet, the later one is a failure. The first failure in order is kept."""
    known = job_is_known(
        tables, job, tables_words, segments, requests, lists, pieces, checks, pairs, places, hashed, given, most
    )
    tl.atomic_max(status, UNKNOWN_JOB, mask=(known == 0) & (tl.program_id(0) == 0))
    place = items_of(tl.program_id(0), BLOCK)
    valid = known & (place < places)
    rows = job + JOB_SIZE + LIST * (lists + 1)
    check = rows + CHECK * last_not_above(rows, CHECK, place * 0, checks, checks_leap, place)
    id = id_at(pages, check, place, valid)
    twice = valid & (tl.load(check + 2, mask=valid, other=0) == DST_TWICE)
    outside = (id < 0) | (id >= tl.load(check + 3, mask=valid, other=0))
    mine = places - place  # greater: earlier
    failed = tl.where(valid & ~twice & outside, mine, 0)
    scope = tl.load(check + 4, mask=valid, other=0)
    slot = hash_of(id, scope).to(tl.int64)
    looking = twice
    while tl.max(looking.to(tl.int32)) > 0:
        at = table + (slot & mask)
        # A lane that is done looks for what no slot holds: compare-and-swap knows no mask.
        found = tl.atomic_cas(at, tl.where(looking, 0, -1).to(tl.int64), mine, sem="relaxed")
        taken = looking & (found != 0)
        other = places - found
        others = rows + CHECK * last_not_above(rows, CHECK, place * 0, checks, checks_leap, other)
        met = taken & (tl.load(others + 4, mask=taken, other=-1) == scope) & (id_at(pages, others, other, taken) == id)
        before = tl.atomic_max(at, mine, mask=met, sem="relaxed")
        failed = tl.where(met, tl.maximum(failed, tl.minimum(before, mine)), failed)
        looking = taken & ~met
        slot += 1
    worst = tl.max(failed)
    tl.atomic_max(status, worst, mask=worst > 0)
