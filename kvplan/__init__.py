"""kvplan: which bytes of a KV cache go where, between prefill and decode machines; exact and fast.

Names are loaded when first used, so that `python -m kvplan doctor` can say what is missing where torch or the compiled
extension is. `import kvplan.ops` registers the torch ops.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import engines, ops
    from .copy import execute
    from .errors import LayoutError, PairingError, PlanError, TransferError, TransferTimeout
    from .layout import Heads, Interleave, Layout, Memory, Region
    from .models import deepseek_v4, mha, mla
    from .pairing import Pairing, pair
    from .plan import Plan, Request, Segment

__version__ = "0.1.0"

__all__ = [
    "Heads",
    "Interleave",
    "Layout",
    "LayoutError",
    "Memory",
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
    "mha",
    "mla",
    "ops",
    "pair",
]

_MODULES = ("errors", "layout", "models", "pairing", "plan", "copy")  # models gives Layout its constructors


def __getattr__(name: str) -> Any:
    if name in ("engines", "ops"):
        return importlib.import_module(f"{__name__}.{name}")
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    modules = [importlib.import_module(f"{__name__}.{module}") for module in _MODULES]
    for module in modules:
        for public in __all__:
            # Only where it is defined: a module also holds what it imports.
            if getattr(getattr(module, public, None), "__module__", None) == module.__name__:
                globals()[public] = getattr(module, public)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
