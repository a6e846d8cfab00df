"""Arithmetic and searches on blocks of 64-bit numbers. The Triton counterpart of csrc/arith.h."""

import triton
import triton.language as tl


@triton.jit
def last_not_above(firsts, stride: tl.constexpr, low, rows, leap, places):
    """Number of the last row, from `low` up to `rows` - 1, whose first word is not above the place.

    The first words rise, and row `low` must begin at or before the place. Rows are `stride` words apart. `leap` is
    launch.leap of at least the number of rows searched.
    """
    while leap > 0:
        probe = low + leap
        inside = probe < rows
        first = tl.load(firsts + probe * stride, mask=inside, other=0)
        low = tl.where(inside & (first <= places), probe, low)
        leap = leap >> 1
    return low


@triton.jit
def quotient(a, b):
    """a // b, for a >= 0 and b > 0. A GPU needs about a hundred instructions for it in 64 bits, a fifth in 32."""
    if tl.max((a | b) >> 31) == 0:  # noqa: SIM108 (Triton compiles no such expression)
        result = (a.to(tl.int32) // b.to(tl.int32)).to(tl.int64)
    else:
        result = a // b
    return result


@triton.jit
def product(a, b):
    """a * b, and whether it is exact: neither a nor b is negative, and a * b is below 2^63."""
    low = a * b
    high = tl.umulhi(a.to(tl.uint64), b.to(tl.uint64))
    return low, (a >= 0) & (b >= 0) & (high == 0) & (low >= 0)
