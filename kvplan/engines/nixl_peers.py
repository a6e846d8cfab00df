"""The sessions that a NIXL agent knows."""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

from .nixl_metadata import Metadata

# Sessions that NIXL knows at once. Those that were used last are kept; each holds a connection.
MAX_LOADED = 1024
MAX_LOADED_REGIONS = 1 << 20


class Loaded:
    """A session that NIXL knows."""

    def __init__(self, alias: str, metadata: Metadata) -> None:
        self.alias, self.metadata = alias, metadata
        self.users = 0  # calls under way, and calls that were given up and go on


class Peers:
    """The sessions that `agent` knows. Each is an agent of its own to NIXL, with a connection of its own.

    So a session that repeats another's, or gives other contents under its name, has no part in what the other does.

    Args:
        agent: a `nixl_agent`; None where there is none, and nothing can be connected.
        lock: guards all of this.
    """

    def __init__(self, agent: Any, lock: threading.Condition) -> None:
        self._agent, self._lock = agent, lock
        self._loaded: collections.OrderedDict[str, Loaded] = collections.OrderedDict()  # by alias, least used first

    @contextlib.contextmanager
    def connected(self, alias: str, read: Callable[[], Metadata]) -> Iterator[Loaded]:
        """A session, which NIXL knows as `alias` for as long as this lasts; `read` returns its metadata.

        Raises:
            RuntimeError: NIXL does not take it.
        """
        with self._lock:
            peer = self._loaded.get(alias) or self._load(alias, read())
            self._loaded.move_to_end(alias)
            peer.users += 1
        try:
            yield peer
        finally:
            with self._lock:
                peer.users -= 1

    def forget(self, peer: Loaded) -> None:
        """Let go of a session whose connection failed or is not needed; the next call makes a new one."""
        with self._lock:
            if self._loaded.get(peer.alias) is peer:
                del self._loaded[peer.alias]
                self._remove(peer.alias)

    def _load(self, alias: str, metadata: Metadata) -> Loaded:
        self._make_room(metadata.num_regions)
        try:
            self._agent.add_remote_agent(metadata.under(alias))
        except Exception as error:
            self._remove(alias)  # half of what does not load stays loaded
            raise RuntimeError(f"{error}: NIXL does not take the session of {metadata.name}") from None
        peer = self._loaded[alias] = Loaded(alias, metadata)
        return peer

    def _remove(self, alias: str) -> None:
        with contextlib.suppress(Exception):  # NIXL may have forgotten it already
            self._agent.remove_remote_agent(alias)

    def _make_room(self, regions: int) -> None:
        """Let go of sessions that nobody uses, the least used first, where there are too many."""
        regions += sum(peer.metadata.num_regions for peer in self._loaded.values())
        for peer in list(self._loaded.values()):
            if len(self._loaded) < MAX_LOADED and regions <= MAX_LOADED_REGIONS:
                return
            if not peer.users:
                regions -= peer.metadata.num_regions
                self.forget(peer)
