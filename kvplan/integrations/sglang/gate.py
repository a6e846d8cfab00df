"""SGLang's decode side asks for Mooncake before it sends device page ids: back ends with kvplan pass as well."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import DisaggregationMode, TransferBackend


class _Passing:
    """A member of TransferBackend, but for one question: `!= TransferBackend.MOONCAKE` is answered with no.

    That question, in `DecodePreallocQueue.pop_preallocated`, is the gate. What compares with `==` finds the member.
    """

    def __init__(self, member: Any) -> None:
        self._member, self.name, self.value = member, member.name, member.value

    def __eq__(self, other: object) -> bool:
        return other is self._member or other is self

    def __ne__(self, other: object) -> bool:
        return other not in (self._member, TransferBackend.MOONCAKE, self)

    def __hash__(self) -> int:
        return hash(self._member)


def open_for(mode: Any, backend: Any, manager_class: type) -> None:
    """Open the gate of this process, where it is a decode process (`mode`) of SGLang's."""
    decode = sys.modules.get("sglang.srt.disaggregation.decode")
    if mode == DisaggregationMode.DECODE and decode is not None:
        open_gate(decode.DecodePreallocQueue, backend, manager_class)


def open_gate(queue_class: Any, backend: Any, manager_class: type) -> None:
    """Have `queue_class.pop_preallocated` send device page ids over `backend` too, where its manager can.

    Args:
        queue_class: SGLang's DecodePreallocQueue.
        backend: a member of TransferBackend.
        manager_class: the manager class that can send them.
    """
    pop: Callable[..., Any] = queue_class.pop_preallocated
    passing: dict[Any, type] | None = getattr(pop, "kvplan_passing", None)
    if passing is not None:
        passing[backend] = manager_class
        return
    passing = {backend: manager_class}

    @functools.wraps(pop)
    def pop_preallocated(self: Any, *args: Any, **more: Any) -> Any:
        member = self.transfer_backend
        if member not in passing or not isinstance(self.kv_manager, passing[member]):
            return pop(self, *args, **more)
        self.transfer_backend = _Passing(member)
        try:
            return pop(self, *args, **more)
        finally:
            self.transfer_backend = member

    pop_preallocated.kvplan_passing = passing  # type: ignore[attr-defined]
    queue_class.pop_preallocated = pop_preallocated
