"""Where planning says how long it took. `kvplan.metrics` puts a function here; at most one listens."""

from __future__ import annotations

from collections.abc import Callable

planned: Callable[[float], object] | None = None  #: called with the seconds that a plan took; None: nobody asks
