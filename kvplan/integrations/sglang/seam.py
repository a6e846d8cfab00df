"""The one place where kvplan hooks into SGLang: the function that names the KV manager class."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from typing import Any

logger = logging.getLogger("kvplan.sglang")

#: Releases of SGLang whose planner was compared with kvplan's, call by call.
TRIED = ("0.5.23",)

_TARGET = "sglang.srt.disaggregation.utils.get_kv_class"


def load() -> None:
    """Have SGLang's KV managers plan with kvplan. SGLang calls this in each process, before it makes a manager.

    The environment variable KVPLAN_SGLANG=0 switches it off. A release of SGLang that was not tried is left as it is,
    with a warning.
    """
    if os.environ.get("KVPLAN_SGLANG", "1") == "0":
        logger.info("kvplan leaves SGLang as it is: KVPLAN_SGLANG=0")
        return
    version = importlib.metadata.version("sglang")
    if version not in TRIED:
        logger.warning("kvplan leaves SGLang %s as it is: tried with %s only", version, ", ".join(TRIED))
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_TARGET, choose, HookType.AFTER)


def choose(chosen: Any, transfer_backend: Any, class_type: Any) -> Any:
    """What `get_kv_class` returns in place of `chosen`: a subclass that plans with kvplan, or None for no change."""
    if getattr(class_type, "name", None) != "MANAGER":
        return None
    backend = getattr(transfer_backend, "name", str(transfer_backend))
    if backend == "NIXL":
        from sglang.srt.disaggregation.nixl.conn import NixlKVManager

        if not _is_own(chosen, NixlKVManager):
            return None
        from .nixl import PlannedNixlManager

        return PlannedNixlManager
    if backend != "MOONCAKE":
        logger.warning("kvplan leaves the %s backend to SGLang: it plans for Mooncake and NIXL only", backend)
        return None
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVManager

    if not _is_own(chosen, MooncakeKVManager):
        return None
    from .mooncake import PlannedMooncakeManager

    return PlannedMooncakeManager


def _is_own(chosen: Any, expected: type) -> bool:
    """Whether SGLang has chosen its own manager. Any other class is left as it is, with a warning."""
    if chosen is not expected:
        logger.warning(
            "kvplan leaves %s to SGLang: it is not SGLang's own %s", chosen.__qualname__, expected.__qualname__
        )
    return chosen is expected
