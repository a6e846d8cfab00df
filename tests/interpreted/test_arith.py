"""The arithmetic of the kernels against Python's integers, at the ends of 32 and 64 bits."""

from itertools import product as combinations

import pytest
import torch
import triton.language as tl
from kvplan.triton_kernels import arith, descriptors
from kvplan.triton_kernels.launch import kernel
from stage_inputs import words

TOP = 1 << 63  # the first number past int64
ENDS = [-TOP, -TOP + 1, -2, -1, 0, 1, 2, 3, 8, *(1 << 31 | 1, 1 << 32, 1 << 34, 1 << 62), TOP - 9, TOP - 2, TOP - 1]


@kernel
def product_kernel(a, b, low, fits, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    found, exact = arith.product(tl.load(a + at), tl.load(b + at))
    tl.store(low + at, found)
    tl.store(fits + at, exact.to(tl.int64))


@kernel
def quotient_kernel(a, b, result, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(result + at, arith.quotient(tl.load(a + at), tl.load(b + at)))


@kernel
def address_fits_kernel(base, index, stride, nbytes, fits, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    found = descriptors.address_fits(
        tl.load(base + at), tl.load(index + at), tl.load(stride + at), tl.load(nbytes + at)
    )
    tl.store(fits + at, found.to(tl.int64))


@kernel
def highest_of_kernel(first, pairs, step, last, valid, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    found, good = descriptors.highest_of(tl.load(first + at), tl.load(pairs + at), tl.load(step + at))
    tl.store(last + at, found)
    tl.store(valid + at, good.to(tl.int64))


@kernel
def moves_whole_kernel(src_stride, dst_stride, nbytes, src_step, dst_step, whole, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    found = descriptors.moves_whole(
        tl.load(src_stride + at), tl.load(dst_stride + at), tl.load(nbytes + at),
        tl.load(src_step + at), tl.load(dst_step + at),
    )  # fmt: skip
    tl.store(whole + at, found.to(tl.int64))


def results_of(function, rows, outputs, block=None):
    """What a kernel writes, as lists, for rows of arguments; a program takes `block` rows, by default all at once."""
    size = block or 1 << (len(rows) - 1).bit_length()
    padded = [*rows, *[rows[0]] * (-len(rows) % size)]
    columns = words(padded, len(rows[0])).T.contiguous()
    results = torch.full((outputs, len(padded)), 77)
    function[(len(padded) // size,)](*columns, *results, BLOCK=size)
    return results[:, : len(rows)].tolist()


def test_product():
    rows = list(combinations(ENDS, ENDS))
    low, fits = results_of(product_kernel, rows, 2)
    for (a, b), found, exact in zip(rows, low, fits, strict=True):
        assert exact == (a >= 0 and b >= 0 and a * b < TOP), (a, b)
        assert not exact or found == a * b, (a, b)


@pytest.mark.parametrize("block", [1, 64])  # each division alone, and narrow ones with wide ones
def test_quotient(block):
    rows = [(a, b) for a, b in combinations(ENDS, ENDS) if a >= 0 and b > 0]
    rows += [(a, b) for a, b in combinations([(1 << 31) - 1, 1 << 31, (1 << 32) - 1], repeat=2)]
    assert results_of(quotient_kernel, rows, 1, block) == [[a // b for a, b in rows]]


def test_address_fits():
    numbers = [-TOP, -1, 0, 1, 2, 8, 1 << 32, 1 << 62, TOP - 8, TOP - 1]
    bases = [0, 1, TOP - 8, TOP, 2 * TOP - (1 << 33), 2 * TOP - 16, 2 * TOP - 9, 2 * TOP - 8, 2 * TOP - 1]
    rows = list(combinations(bases, numbers, numbers, numbers))
    (fits,) = results_of(address_fits_kernel, rows, 1)
    for (base, index, stride, nbytes), found in zip(rows, fits, strict=True):
        end = index * stride + nbytes
        right = index >= 0 and stride >= 0 and nbytes > 0 and end < TOP and base + end <= 2 * TOP
        assert found == right, (base, index, stride, nbytes)


def test_highest_of():
    rows = list(combinations(ENDS, [1, 2, 3, (1 << 32) + 1, (1 << 34) + 1, TOP - 1], [0, *ENDS[4:], 1 << 30]))
    last, valid = results_of(highest_of_kernel, rows, 2)
    for (first, pairs, step), found, good in zip(rows, last, valid, strict=True):
        right = first + (pairs - 1) * step
        assert good == (first >= 0 and right < TOP), (first, pairs, step)
        assert not good or found == right, (first, pairs, step)


def test_moves_whole():
    strides, steps = [1, 8, 16, (1 << 60) + 1, 1 << 62], [1, 2, 4, 16]  # 16 * (2^60 + 1) is 16 in 64 bits
    rows = list(combinations(strides, strides, [1, 8, 16, 1 << 62], steps, steps))
    (whole,) = results_of(moves_whole_kernel, rows, 1)
    for (src_stride, dst_stride, nbytes, src_step, dst_step), found in zip(rows, whole, strict=True):
        right = src_stride * src_step == nbytes == dst_stride * dst_step
        assert found == right, (src_stride, dst_stride, nbytes, src_step, dst_step)
