"""What the parts of an engine need of it: its transfers, fences and queues import this, and the engine imports them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

from .outcome import Op

if TYPE_CHECKING:
    from ..planning import Plan


class Owner(Protocol):
    """An engine, as its parts see it. `transfer` is always a `Transfer`."""

    _lock: Any
    _closed: bool
    _lanes: Any  # Lanes
    _counters: Any  # Counters
    _events: Any  # a deque of calls that are made once the lock is free
    _unsettled_transfers: Any  # Unsettled
    _stagings: list[Any]  # Staging
    _waiting: Any  # Waiting
    _unsettled: str
    _going_on: str

    @property
    def _stops_on_failure(self) -> bool: ...

    def _chunks(self, plan: Plan) -> Iterator[Plan]: ...

    def _peer_name(self, session: str) -> str: ...

    def _key_of(self, session: str) -> str: ...

    def _where(self, transfer: Any) -> str: ...

    def _fence(self, session: str, op: Op) -> Plan | None: ...

    def _make_fence(self, plan: Plan, session: str, op: Op) -> Any: ...

    def _prove_settled(self, transfer: Any, deadline: float) -> str | None: ...

    def _close_transfer(self, transfer: Any) -> None: ...

    def _update_settled(self, transfer: Any) -> None: ...

    def _run_callbacks(self) -> None: ...
