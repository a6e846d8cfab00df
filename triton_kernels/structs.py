"""Sizes and codes that the kernels share with the C++ code: csrc/entry.h, csrc/tables.h and csrc/job.h define them."""

import triton.language as tl

# How many int64 words each struct has.
HEADER = tl.constexpr(4)
ENTRY = tl.constexpr(6)
GROUP = tl.constexpr(12)
SPACE = tl.constexpr(8)
JOB_SIZE = tl.constexpr(9)
LIST = tl.constexpr(7)
CHECK = tl.constexpr(9)
STATUS = tl.constexpr(5)  # the first words of a plan's info

# Codes (enum Code).
DST_TWICE = tl.constexpr(3)
ROOM = tl.constexpr(12)
JOB = tl.constexpr(13)

MOST_DESCRIPTORS = tl.constexpr(1 << 40)  # in one plan; also the most pairs of one run
JOB_MISMATCH = tl.constexpr(1 << 62)  # in the status word of a plan: the tensors do not belong together
