"""The stages as Triton kernels: the back end for GPUs without CUDA kernels (AMD, Intel, or no CUDA compiler).

The results are the same as those of csrc/cuda, to the bit. Each function has the signature of the torch op of the same
name (see kvplan.ops) and never waits for the device. With TRITON_INTERPRET=1 they take CPU tensors.
"""

from .copy import copy_
from .descriptors import expand
from .pages import page_indices
from .plan import plan_
from .runs import find_runs

__all__ = ["copy_", "expand", "find_runs", "page_indices", "plan_"]
