"""Regions of two layouts become the tables that every request to a peer is planned with."""

from .match import match
from .tables import PairingTables
from .words import describe

__all__ = ["PairingTables", "describe", "match"]
