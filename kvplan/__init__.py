"""kvplan: which bytes of a KV cache go where, between prefill and decode machines; exact and fast.

Names are loaded when first used, so that `python -m kvplan doctor` can say what is missing where torch or the compiled
extension is. `import kvplan.ops` registers the torch ops.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import engines, ops
    from .errors import LayoutError, PairingError, PlanError, TransferError, TransferTimeout
    from .layout import Heads, Interleave, Layout, Memory, Region, deepseek_v4, mha, mla
    from .ops import get_num_threads, set_num_threads
    from .planning import Cluster, Packed, Pairing, Plan, Request, Segment, execute, pair

__version__ = "0.2.0"

__all__ = [
    "Cluster",
    "Heads",
    "Interleave",
    "Layout",
    "LayoutError",
    "Memory",
    "Packed",
    "Pairing",
    "PairingError",
    "Plan",
    "PlanError",
    "Region",
    "Request",
    "Segment",
    "TransferError",
    "TransferTimeout",
    "deepseek_v4",
    "engines",
    "execute",
    "get_num_threads",
    "mha",
    "mla",
    "ops",
    "pair",
    "set_num_threads",
]

# The floors that public names come from, lowest first.
_FLOORS = ("errors", "ops", "layout", "planning")


def __getattr__(name: str) -> Any:
    if name in ("engines", "metrics", "ops"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    for floor in _FLOORS:
        module = importlib.import_module(f"{__name__}.{floor}")
        if hasattr(module, name):
            globals()[name] = getattr(module, name)
            return globals()[name]
    raise AssertionError(f"no floor of kvplan has the public name {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
