"""What the host code of every stage needs to check tensors and launch kernels."""

import contextlib
import inspect

import torch
import triton
import triton.language as tl

BLOCK = 1024  # items a program works on
TILED = {"BLOCK": BLOCK, "num_warps": 8}  # four items a lane where a warp has 32: more would not stay in registers


def kernel(function):
    """`triton.jit` for a kernel that compiles once for all sizes and alignments.

    Without it a plan of a new size would wait for the compiler.
    """
    names = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is not tl.constexpr]
    return triton.jit(function, do_not_specialize=names)


def tiles(items: int, block: int = BLOCK) -> int:
    """Number of programs for this many items; at least one."""
    return max(1, -(-items // block))


def leap(rows: int) -> int:
    """First step of `last_not_above` among this many rows: the largest power of two below `rows`, or 0."""
    return 1 << (rows - 1).bit_length() - 1 if rows > 1 else 0


def device_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager:
    """Context in which kernels are launched on the tensor's device."""
    return contextlib.nullcontext() if tensor.is_cpu else torch.accelerator.device_index(tensor.device.index)


def check_words(tensor: torch.Tensor, what: str, device: torch.device, pinned: bool = False) -> None:
    """Refuse a tensor that a kernel on `device` cannot use as consecutive int64 words.

    Args:
        tensor: the tensor.
        what: its name in the error.
        device: where the kernel runs; the tensor must be there.
        pinned: whether the tensor may be in pinned host memory instead. Kernels may write there; they do not read it.

    Raises:
        RuntimeError: the tensor is not int64, not contiguous, or elsewhere.
    """
    torch._check(
        tensor.dtype == torch.int64 and tensor.is_contiguous(),
        lambda: f"{what} must be a contiguous int64 tensor, not {tensor.dtype} with strides {tensor.stride()}",
    )
    reachable = tensor.device == device or (pinned and tensor.is_cpu and (tensor.numel() == 0 or tensor.is_pinned()))
    places = f"{device} or in pinned memory" if pinned else f"{device}"
    torch._check(reachable, lambda: f"{what} must be on {places}, not on {tensor.device}")
