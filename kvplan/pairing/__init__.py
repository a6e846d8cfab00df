"""Regions of two layouts become the tables that every request to a peer is planned with."""

from .match import match
from .tables import PairingTables, Room
from .words import describe

__all__ = ["PairingTables", "Room", "describe", "match"]
