"""Token slots -> page ids, and the checks on page ids. The Triton counterpart of csrc/cuda/pages.cuh."""

import torch
import triton
import triton.language as tl

from .arith import last_not_above
from .launch import TILED, check_words, device_of, kernel, tiles
from .scan import own_items, tile_items
from .structs import CHECK, DST_TWICE, ENTRY, GROUP, HEADER, JOB_MISMATCH, JOB_SIZE, LIST, SPACE

NO_ROW = tl.constexpr(-2)  # in `bad`: the request names no row, or more tokens than a row has
NEVER = tl.constexpr((1 << 63) - 1)  # a position behind all others
# One place a lane: Triton 3.6 compiles no compare-and-swap of more than one word a lane for AMD.
PLACES = {"BLOCK": 256, "num_warps": 4}


@kernel
def page_indices_kernel(
    slots,
    rows,  # [B]: the row of each request; or None: request b has row b
    lengths,  # [B]: the tokens of each request; or None: whole rows
    stride: tl.int64,  # slots from one row to the next
    num_rows: tl.int64,
    row_length: tl.int64,
    page_size: tl.int64,
    pages,  # [B, columns]
    columns: tl.int64,
    bad,  # uint64 [B], all bits set before: gets the position of the first slot that breaks the rule
    row_tiles: tl.int64,  # programs a request
    BLOCK: tl.constexpr,
):
    """Each lane compares one slot with the first slot of its page; the lane of that first slot writes the page id."""
    program = tl.program_id(0).to(tl.int64)
    request = program // row_tiles
    at = tile_items(program - request * row_tiles, BLOCK)
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
    """Find the page ids of requests from the slots of their tokens; see kvplan.ops.page_indices."""
    torch._check(page_size > 0, lambda: f"page_size must be positive; it is {page_size}")
    torch._check(slots.dtype in (torch.int32, torch.int64), lambda: f"slots must be int32 or int64, not {slots.dtype}")
    torch._check(slots.dim() in (1, 2), lambda: f"slots must be [T] or [R, L], not {list(slots.shape)}")
    torch._check(
        slots.shape[-1] <= 1 or slots.stride(-1) == 1,
        lambda: f"the slots of a row must lie side by side, not {slots.stride(-1)} words apart",
    )
    torch._check(
        slots.dim() == 2 or (rows is None and lengths is None),
        lambda: f"rows and lengths need slots [R, L], not {list(slots.shape)}",
    )
    num_rows, row_length = (1, len(slots)) if slots.dim() == 1 else slots.shape
    requests = num_rows
    if rows is not None:
        check_words(rows, "rows", slots.device)
        requests = rows.numel()
    if lengths is not None:
        check_words(lengths, "lengths", slots.device)
        torch._check(
            lengths.numel() == requests,
            lambda: f"lengths must have a number for each of {requests} requests, not {lengths.numel()}",
        )
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
    """Hash of a page id and its scope: the finalizer of MurmurHash3, in which every bit depends on every bit."""
    h = id.to(tl.uint64) + scope.to(tl.uint64) * 0x9E3779B97F4A7C15
    h ^= h >> 33
    h *= 0xFF51AFD7ED558CCD
    h ^= h >> 33
    h *= 0xC4CEB9FE1A85EC53
    return h ^ (h >> 33)


@triton.jit
def job_matches(
    tables, job, tables_words, segments, requests, lists, pieces, checks, pairs, places, hashed, given, most
):
    """Whether job and tables say the same as the host, which sized the launches by the other arguments.

    Sizes in the tables are bounded before they are multiplied, so that no sum wraps.
    """
    same = (tl.load(job) == requests) & (tl.load(job + 1) == lists) & (tl.load(job + 2) == pieces)
    same &= (tl.load(job + 3) == checks) & (tl.load(job + 4) == pairs) & (tl.load(job + 5) == places)
    same &= (tl.load(job + 6) == hashed) & (tl.load(job + 7) == given) & (tl.load(job + 8) == most)
    entries, groups, spaces, cuts = tl.load(tables), tl.load(tables + 1), tl.load(tables + 2), tl.load(tables + 3)
    same &= (entries >= 0) & (entries <= tables_words) & (groups >= 0) & (groups <= tables_words)
    same &= (spaces >= 0) & (spaces <= tables_words) & (cuts >= 0) & (cuts <= tables_words)
    same &= (pieces == requests * entries) & (lists == requests * groups)
    same &= (cuts == segments) | (requests == 0)  # without requests the host cannot tell the segments
    return same & (tables_words == entries * ENTRY + groups * GROUP + spaces * SPACE + cuts + 1 + HEADER)


@triton.jit
def check_at(job, lists, checks, checks_leap, place):
    """Pointer to the struct Check that covers a place. Places number the page ids to look at, check by check."""
    rows = job + JOB_SIZE + LIST * (lists + 1)
    return rows + CHECK * last_not_above(rows, CHECK, place * 0, checks, checks_leap, place)


@triton.jit
def id_at(pages, check, place, valid):
    """Page id at a place that `check`, a pointer to its struct Check, covers."""
    at = tl.load(check + 1, mask=valid, other=0) + place - tl.load(check, mask=valid, other=0)
    return tl.load(pages + at, mask=valid, other=0).to(tl.int64)


@kernel
def check_kernel(
    tables,
    tables_words: tl.int64,
    segments: tl.int64,
    job,
    requests: tl.int64,  # from here to `most`: struct JobSize, as the host has it
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
    table,  # [slots], 0 before: hash table; a slot holds `places` minus the first place of an id
    mask: tl.int64,  # slots - 1; the number of slots is a power of two
    status,  # 0 before; gets `places` minus the place of the first bad id, or JOB_MISMATCH
    BLOCK: tl.constexpr,
):
    """Each lane checks one place: its id is in range, or, for a check of distinct ids, occurs at no earlier place.

    Ids of one scope that are equal when shifted meet in the hash table; the later place fails. Of all failures the
    first is kept: places are stored as `places` minus the place, so that the first is the largest.
    """
    matches = job_matches(
        tables, job, tables_words, segments, requests, lists, pieces, checks, pairs, places, hashed, given, most
    )
    tl.atomic_max(status, JOB_MISMATCH, mask=(matches == 0) & (tl.program_id(0) == 0))
    _, place = own_items(BLOCK)
    valid = matches & (place < places)
    check = check_at(job, lists, checks, checks_leap, place)
    id = id_at(pages, check, place, valid)
    twice = valid & (tl.load(check + 2, mask=valid, other=0) == DST_TWICE)
    outside = (id < 0) | (id >= tl.load(check + 3, mask=valid, other=0))
    mine = places - place
    failed = tl.where(valid & ~twice & outside, mine, 0)
    scope = tl.load(check + 4, mask=valid, other=0)
    page = id + tl.load(check + 8, mask=valid, other=0)
    slot = hash_of(page, scope).to(tl.int64)
    looking = twice
    while tl.max(looking.to(tl.int32)) > 0:
        at = table + (slot & mask)
        # Compare-and-swap takes no mask: a lane that is done compares with -1, which no slot holds.
        found = tl.atomic_cas(at, tl.where(looking, 0, -1).to(tl.int64), mine, sem="relaxed")
        taken = looking & (found != 0)
        other = places - found
        others = check_at(job, lists, checks, checks_leap, other)
        there = id_at(pages, others, other, taken) + tl.load(others + 8, mask=taken, other=0)
        met = taken & (tl.load(others + 4, mask=taken, other=-1) == scope) & (there == page)
        before = tl.atomic_max(at, mine, mask=met, sem="relaxed")
        failed = tl.where(met, tl.maximum(failed, tl.minimum(before, mine)), failed)
        looking = taken & ~met
        slot += 1
    worst = tl.max(failed)
    tl.atomic_max(status, worst, mask=worst > 0)
