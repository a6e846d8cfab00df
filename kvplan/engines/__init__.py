"""Engines that carry plans out. All behave alike; only how a chunk is moved differs."""

from .ascend import AscendEngine
from .base import Engine
from .local import LocalEngine
from .mooncake import MooncakeEngine
from .nixl import NixlEngine
from .peer import Peer
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
    "Transfer",
]
