"""What a prefill process keeps of each decode peer: its layout where it tells it, and the pairings with it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from kvplan import Layout, Pairing

_MOST_PEERS = 4096  # SGLang does not say when a peer has gone for good: those used longest ago make room

_NONE: dict[Any, Any] = {}


class Peers:
    """Pairings by peer. They go when the peer registers anew, a transfer to it fails, or many newer peers come."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairings: OrderedDict[str, dict[Hashable, tuple[Any, Pairing]]] = OrderedDict()
        self._told: dict[str, Layout] = {}
        self._rejected: dict[str, str] = {}

    def register(self, session: str, told: Layout | None) -> None:
        """A peer has registered, for the first time or anew. `told`: its layout, if it runs kvplan."""
        self.forget(session)
        with self._lock:
            self._rejected.pop(session, None)
            self._told.pop(session, None)
            if told is not None:
                self._told[session] = told

    def reject(self, session: str, reason: str) -> None:
        """A peer's registration is not taken. Rooms with it fail for this reason."""
        with self._lock:
            self._rejected[session] = reason

    def rejection(self, session: str) -> str | None:
        """Why a peer's registration was not taken, if so."""
        return self._rejected.get(session)

    def told(self, session: str) -> Layout | None:
        """The layout that a peer has told."""
        return self._told.get(session)

    def forget(self, session: str) -> None:
        """Drop the pairings with a peer."""
        with self._lock:
            self._pairings.pop(session, None)

    def kept(self, session: str, key: Hashable, registered: Any) -> Pairing | None:
        """The pairing with a peer for one purpose, if there is one yet.

        Args:
            session: the peer.
            key: the purpose, and whatever else the pairing depends on.
            registered: the list of pointers that the peer has registered. A pairing made for another list, even an
                equal one, is not taken.
        """
        found = self._pairings.get(session, _NONE).get(key)
        return None if found is None or found[0] is not registered else found[1]

    def keep(self, session: str, key: Hashable, registered: Any, pairing: Pairing) -> Pairing:
        """Keep a pairing for `kept`, and return it."""
        with self._lock:
            self._pairings.setdefault(session, {})[key] = (registered, pairing)
            self._pairings.move_to_end(session)
            while len(self._pairings) > _MOST_PEERS:
                gone, _ = self._pairings.popitem(last=False)
                self._told.pop(gone, None)
        return pairing

    def pairing(self, session: str, key: Hashable, registered: Any, make: Callable[[], Pairing]) -> Pairing:
        """The pairing with a peer for one purpose, made at its first use."""
        found = self.kept(session, key, registered)
        return self.keep(session, key, registered, make()) if found is None else found

    def __len__(self) -> int:
        return len(self._pairings)
