"""Regions of two layouts become the tables that every request to a peer is planned with."""

from . import coverage
from .columns import Columns
from .cut import cut
from .match import Unsent, match, named
from .tables import PairingTables, Room
from .words import describe

__all__ = ["Columns", "PairingTables", "Room", "Unsent", "coverage", "cut", "describe", "match", "named"]
