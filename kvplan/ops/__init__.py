"""The stages as torch ops: schemas, tags, fakes for tracing, and thin documented calls.

Every op takes tensors of one device and returns its results there. On a GPU no op waits: results have a fixed size, and
what is found on the way (a count, a status) is a tensor too. So all ops but `plan` and `prepare`, which run on the CPU,
trace under `torch.compile(fullgraph=True)` and capture into a CUDA graph. `kvplan.ops.backend` says who runs them.
"""

from . import backend
from .calls import (
    SIZES,
    check_pages,
    copy_,
    expand,
    find_runs,
    first_collision,
    get_num_threads,
    pack,
    page_indices,
    plan,
    plan_,
    plan_into,
    prepare,
    set_num_threads,
)

EXTENSION = backend.EXTENSION

__all__ = [
    "EXTENSION",
    "SIZES",
    "backend",
    "check_pages",
    "copy_",
    "expand",
    "find_runs",
    "first_collision",
    "get_num_threads",
    "pack",
    "page_indices",
    "plan",
    "plan_",
    "plan_into",
    "prepare",
    "set_num_threads",
]

backend.register(EXTENSION)
