"""The other side of transfers, as it declares itself."""

from __future__ import annotations

import dataclasses
import functools

from ..errors import clipped
from ..layout import Layout
from .check import Spans


@dataclasses.dataclass(frozen=True, repr=False)
class Peer:
    """The other side of transfers: what a process declares to those that write to it or read from it.

    Args:
        session: `Engine.session` of the peer.
        layout: what the peer has registered with its engine: `Layout.from_dict` of what it sent.

    Raises:
        ValueError: the session is no string. What it says is checked by `Engine.submit`, which knows what it must be.
        TypeError: the layout is no Layout.
    """

    session: str
    layout: Layout

    def __post_init__(self) -> None:
        if not isinstance(self.session, str):
            raise ValueError(f"a peer's session must be a string, not a {type(self.session).__name__}")
        if not isinstance(self.layout, Layout):
            raise TypeError(
                f"a peer's layout must be a Layout, not a {type(self.layout).__name__}; see Layout.from_dict"
            )

    def __repr__(self) -> str:
        return f"Peer('{clipped(self.session)}', {len(self.layout.regions)} regions)"

    @functools.cached_property
    def _spans(self) -> Spans:
        return Spans([self.layout])
