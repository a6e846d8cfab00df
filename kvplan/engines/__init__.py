"""Engines that carry plans out. All behave alike; only how a chunk is moved differs."""

from .ascend import AscendEngine
from .base import Engine
from .costs import COSTS, Cost
from .group import TransferGroup
from .local import LocalEngine
from .mooncake import MooncakeEngine
from .nixl import NixlEngine
from .outcome import Times
from .peer import Peer
from .quarantine import Quarantine
from .staging import Staging
from .stats import PeerStats, Stats
from .transfer import Transfer

#: Every kind, by the name that commands know it by.
KINDS: dict[str, type[Engine]] = {
    "local": LocalEngine,
    "mooncake": MooncakeEngine,
    "nixl": NixlEngine,
    "ascend": AscendEngine,
}

__all__ = [
    "COSTS",
    "KINDS",
    "AscendEngine",
    "Cost",
    "Engine",
    "LocalEngine",
    "MooncakeEngine",
    "NixlEngine",
    "Peer",
    "PeerStats",
    "Quarantine",
    "Staging",
    "Stats",
    "Times",
    "Transfer",
    "TransferGroup",
]
