"""What an engine has done and has to do, counted: for each peer, and in all."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .transfer import Transfer

_MOST_PEERS = 1024  # whose counts are kept; what those before them did stays in the counts of all


@dataclasses.dataclass(frozen=True)
class PeerStats:
    """Counts of one peer, or of all.

    Attributes:
        bytes, descriptors: confirmed to have arrived, a chunk at a time; from the peer as well, where transfers read.
        arrived, failed, cancelled: transfers, by their end.
        in_flight: transfers with a call of the engine, or a copy into or out of staging, at work now.
        queued: transfers that have not ended, with no call at work now.
        unsettled: transfers that failed or were cancelled, and may still read or write their pages.
    """

    bytes: int = 0
    descriptors: int = 0
    arrived: int = 0
    failed: int = 0
    cancelled: int = 0
    in_flight: int = 0
    queued: int = 0
    unsettled: int = 0


@dataclasses.dataclass(frozen=True)
class Stats(PeerStats):
    """Counts of all peers there ever were, and of each: the 1,024 used last, and those with something to do."""

    peers: dict[str, PeerStats] = dataclasses.field(default_factory=dict)


class Counters:
    """Counts of what is over. Guarded by the engine's lock."""

    def __init__(self) -> None:
        self._all: collections.Counter[str] = collections.Counter()
        self._peers: collections.OrderedDict[str, collections.Counter[str]] = collections.OrderedDict()

    def moved(self, transfer: Transfer, descriptors: int, nbytes: int) -> None:
        """So many of its descriptors, and bytes, have arrived."""
        if not transfer._is_fence:
            self._add(transfer._peer_name, bytes=nbytes, descriptors=descriptors)

    def ended(self, transfer: Transfer) -> None:
        assert transfer._end is not None
        self._add(transfer._peer_name, **{transfer._end: 1})

    def _add(self, key: str, **counts: int) -> None:
        peer = self._peers.setdefault(key, collections.Counter())
        self._peers.move_to_end(key)
        if len(self._peers) > _MOST_PEERS:
            self._peers.popitem(last=False)
        for counter in (self._all, peer):
            counter.update(counts)

    def stats(self, transfers: Iterable[Transfer], unsettled: Iterable[Transfer]) -> Stats:
        """All counts, with those of the transfers that have not ended, or not settled."""
        peers = {key: collections.Counter(counter) for key, counter in self._peers.items()}
        total = collections.Counter(self._all)
        for names in (
            ((t._peer_name, "in_flight" if t._busy else "queued") for t in transfers),
            ((t._peer_name, "unsettled") for t in unsettled),
        ):
            for key, name in names:
                total[name] += 1
                peers.setdefault(key, collections.Counter())[name] += 1
        return Stats(**total, peers={key: PeerStats(**counter) for key, counter in peers.items()})
