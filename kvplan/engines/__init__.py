"""Engines that carry plans out. All behave alike; only how a chunk is written differs."""

from .base import Engine, Peer, Transfer
from .local import LocalEngine
from .mooncake import MooncakeEngine

__all__ = ["Engine", "LocalEngine", "MooncakeEngine", "Peer", "Transfer"]
