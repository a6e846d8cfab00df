"""kvplan: which bytes of a KV cache go where, between prefill and decode machines; exact and fast."""

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
