"""Engines that carry plans out. All behave alike; only how a chunk is moved differs."""

from .ascend import AscendEngine
from .base import Engine
from .group import TransferGroup
from .local import LocalEngine
from .mooncake import MooncakeEngine
from .nixl import NixlEngine
from .outcome import Times
from .peer import Peer
from .quarantine import Quarantine
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
    "KINDS",
    "AscendEngine",
    "Engine",
    "LocalEngine",
    "MooncakeEngine",
    "NixlEngine",
    "Peer",
    "PeerStats",
    "Quarantine",
    "Stats",
    "Times",
    "Transfer",
    "TransferGroup",
]
