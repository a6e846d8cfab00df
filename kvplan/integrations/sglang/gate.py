"""SGLang's decode side asks for Mooncake before it sends device page ids: NIXL with kvplan passes as well."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.disaggregation.utils import TransferBackend

logger = logging.getLogger("kvplan.sglang")


class _NixlThatPasses:
    """NIXL's member of TransferBackend, but for one question: `!= TransferBackend.MOONCAKE` is answered with no.

    That question, in `DecodePreallocQueue.pop_preallocated`, is the gate. What compares with `==` finds NIXL.
    """

    name, value = TransferBackend.NIXL.name, TransferBackend.NIXL.value

    def __eq__(self, other: object) -> bool:
        return other is TransferBackend.NIXL or other is self

    def __ne__(self, other: object) -> bool:
        return other not in (TransferBackend.NIXL, TransferBackend.MOONCAKE, self)

    def __hash__(self) -> int:
        return hash(TransferBackend.NIXL)


def open_gate(queue_class: Any, manager_class: type) -> None:
    """Have `queue_class.pop_preallocated` send device page ids over NIXL too, where its manager is a `manager_class`.

    Args:
        queue_class: SGLang's DecodePreallocQueue.
        manager_class: the manager class that can send them.
    """
    pop: Callable[..., Any] = queue_class.pop_preallocated
    if getattr(pop, "kvplan_passes", False):
        return

    @functools.wraps(pop)
    def pop_preallocated(self: Any, *args: Any, **more: Any) -> Any:
        backend = self.transfer_backend
        if backend is not TransferBackend.NIXL or not isinstance(self.kv_manager, manager_class):
            return pop(self, *args, **more)
        self.transfer_backend = _NixlThatPasses()
        try:
            return pop(self, *args, **more)
        finally:
            self.transfer_backend = backend

    pop_preallocated.kvplan_passes = True  # type: ignore[attr-defined]
    queue_class.pop_preallocated = pop_preallocated
