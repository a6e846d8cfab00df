"""The stages as Triton kernels: the back end for GPUs without CUDA kernels (AMD, Intel, or no CUDA compiler).

The same results as csrc/cuda to the bit. Each function has the signature of the torch op of that name (kvplan/ops.py),
never waits for the device, and takes CPU tensors where TRITON_INTERPRET=1.
"""

from .copy import copy_
from .descriptors import expand
from .pages import page_indices
from .plan import plan_
from .runs import find_runs

__all__ = ["copy_", "expand", "find_runs", "page_indices", "plan_"]
