"""Memory that an engine may use: registered by whole layouts, each span once."""

from __future__ import annotations

import abc
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ..errors import clipped
from .check import Span, Spans, check_registrable, nearest

if TYPE_CHECKING:
    from ..layout import Layout
    from .lanes import Lock

_log = logging.getLogger("kvplan.engines")


class Registration(abc.ABC):
    """The part of an engine that knows what memory is registered with it."""

    def __init__(self) -> None:
        self._lock: Lock = threading.RLock()  # guards all that an engine knows, but for _registry
        self._registry = threading.Lock()  # one registration, or close, at a time
        self._closed = False  # refuses what is new
        self._spans = Spans([])
        self._registering = Spans([])  # what `_register` and `_unregister` are about now

    @abc.abstractmethod
    def _register(self, spans: Sequence[Span]) -> None:
        """Make all `spans` known to the engine, or raise RuntimeError having kept none."""

    @abc.abstractmethod
    def _unregister(self, spans: Sequence[Span]) -> None:
        """Undo `_register`, though not necessarily of the same list. No peer reaches `spans` when it returns."""

    @abc.abstractmethod
    def _under_way(self) -> int:
        """Transfers that use this memory now. Called with the lock held."""

    def register(self, layout: Layout) -> None:
        """Register all memory of `layout`: peers may then write to it and read it, and plans may use it on this side.

        Two layouts may share a memory span only if it is the same span in both.

        Raises:
            LayoutError: a span overlaps a part of what is registered already.
            RuntimeError: the engine refused; nothing of the layout stays registered.
        """
        with self._registry:
            old = self._usable_spans()
            new = Spans([*old.layouts, layout])
            check_registrable(new)
            added = _ordered(new.all - old.all)
            self._registering = new
            self._register(added)
            with self._lock:
                self._spans = new
            self._log_memory("registered", layout, added)

    def unregister(self, layout: Layout) -> None:
        """Undo `register`. Peers that still use this memory get an error.

        Raises:
            ValueError: `layout` is not registered.
            RuntimeError: transfers from this engine are under way, or the engine refused.
        """
        with self._registry:
            with self._lock:
                old = self._usable_spans()
                if layout not in old.layouts:
                    raise ValueError(f"{layout} is not registered with {self!r}")
                if busy := self._under_way():
                    raise RuntimeError(f"cannot unregister: {busy} transfers from {self!r} are under way; wait first")
                remaining = list(old.layouts)
                remaining.remove(layout)
                self._spans = Spans(remaining)
            removed = _ordered(old.all - self._spans.all)
            self._registering = old
            self._unregister(removed)
            self._log_memory("unregistered", layout, removed)

    def _log_memory(self, did: str, layout: Layout, spans: Sequence[Span]) -> None:
        total = sum(nbytes for _, _, nbytes in spans)
        _log.info("%r %s %s: %d spans of memory, %d bytes", self, did, layout, len(spans), total)

    def _usable_spans(self) -> Spans:
        if self._closed:
            raise RuntimeError(f"{self!r} is closed")
        return self._spans

    def _named_span(self, span: Span) -> str:
        """A span that is being registered or unregistered, for messages: with the region that lies there."""
        memory, base, nbytes = span
        region = nearest(self._registering.layouts, base, memory)
        return f"{nbytes} bytes of {memory} at {base:#x}" + ("" if region is None else f" ({clipped(str(region))})")

    def _unregister_each(self, spans: Iterable[Span], call: Callable[[int], int], who: str) -> None:
        """Have `call` unregister every span by its address, whatever it says of those before.

        Raises:
            RuntimeError: it returned something else than 0 for one; names the first, and `who` refused.
        """
        codes = [(span, call(span[1])) for span in spans]
        for span, code in codes:
            if code != 0:
                raise RuntimeError(f"{who} did not unregister {self._named_span(span)}: {code}")


def _ordered(spans: set[Span]) -> list[Span]:
    return sorted(spans, key=lambda s: (s[0].kind, s[0].device, s[1]))
