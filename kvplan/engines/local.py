"""The engine of one process: copies between buffers mapped here, with the same checks as the network engines."""

from __future__ import annotations

import collections
import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import clipped
from ..planning import execute
from .base import Engine
from .check import Span, Spans, check
from .transfer import Op, Outcome

if TYPE_CHECKING:
    from ..planning import Plan


class LocalEngine(Engine):
    """Carries plans between `LocalEngine`s of this process, with `kvplan.execute`.

    It needs no network and no package, and refuses what the others refuse: so tests, demos and prefill and decode in
    one process run the code that a cluster runs.
    """

    _engines: weakref.WeakValueDictionary[str, LocalEngine] = weakref.WeakValueDictionary()
    _numbers = itertools.count()
    _stops_on_failure = True
    _notifies = True
    _unsettled = "It is being copied at this moment."

    def __init__(self) -> None:
        self._inbox: collections.deque[tuple[str, bytes]] = collections.deque(maxlen=1 << 16)
        super().__init__()
        self._mapped = threading.Lock()  # held by a copy into or from this engine's memory for a peer
        self.session = f"local:{next(self._numbers)}"
        self._engines[self.session] = self

    def _register(self, spans: Sequence[Span]) -> None:
        pass

    def _unregister(self, spans: Sequence[Span]) -> None:
        with self._mapped:  # a copy ends first; the next one finds it gone
            pass

    def _target(self, session: str) -> LocalEngine:
        target = self._engines.get(session)
        if target is None:
            raise ConnectionError(f"there is no open LocalEngine '{clipped(session)}' in this process")
        return target

    def _move(self, session: str, chunk: Plan, op: Op) -> Outcome:
        target = self._target(session)
        with target._mapped:
            sides = (self._spans, target._spans)
            check(
                chunk, *(sides if op == "write" else sides[::-1]), op, f"registered with the peer, {clipped(session)}"
            )
            execute(chunk)
        return Outcome()

    def _tell(self, session: str, notice: bytes) -> None:
        self._target(session)._inbox.append((self.session, notice))

    def _receive_notices(self) -> list[tuple[str, bytes]]:
        if self._closed:
            raise RuntimeError(f"{self!r} is closed")
        return [self._inbox.popleft() for _ in range(len(self._inbox))]

    def _shut_down(self, spans: Spans) -> None:
        with self._mapped:
            self._spans = Spans([])
        self._engines.pop(self.session, None)
