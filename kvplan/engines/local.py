"""The engine of one process: copies between buffers that are both mapped here, with the manners of a real engine."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import TYPE_CHECKING

from ..copy import execute
from .base import Engine
from .check import Spans, check

if TYPE_CHECKING:
    from ..layout import Memory
    from ..plan import Plan


class LocalEngine(Engine):
    """Carries plans to other `LocalEngine`s of this process, with `kvplan.execute`.

    It needs no network and no package, and refuses what the others refuse: so tests, demos and prefill and decode in
    one process run the code that a cluster runs.
    """

    _engines: weakref.WeakValueDictionary[str, LocalEngine] = weakref.WeakValueDictionary()
    _numbers = itertools.count()
    _stops_on_failure = True
    _unsettled = "It is being copied at this moment: neither reuse nor free its pages until done() is True."

    def __init__(self) -> None:
        super().__init__()
        self._mapped = threading.Lock()  # held by a copy into this engine's memory
        self.session = f"local:{next(self._numbers)}"
        self._engines[self.session] = self

    def _register(self, memory: Memory, base: int, nbytes: int) -> None:
        pass

    def _unregister(self, memory: Memory, base: int, nbytes: int) -> None:
        with self._mapped:  # a copy into it ends first; the next one finds it gone
            pass

    def _write(self, session: str, chunk: Plan) -> int:
        target = self._engines.get(session)
        if target is None:
            raise ConnectionError(f"there is no open LocalEngine {session!r} in this process")
        with target._mapped:
            check(chunk, self._spans, target._spans)
            execute(chunk)
        return 0

    def _shut_down(self, spans: Spans) -> None:
        with self._mapped:
            self._spans = Spans([])
        self._engines.pop(self.session, None)
