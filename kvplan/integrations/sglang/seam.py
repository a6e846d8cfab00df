"""The one place where kvplan hooks into SGLang: the function that names the KV manager class."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
from typing import Any

logger = logging.getLogger("kvplan.sglang")

#: Releases of SGLang whose planner was compared with kvplan's, call by call.
TRIED = ("0.5.23",)

#: Back ends, and the name of each in SGLang's class names and in kvplan's.
_MANAGERS = {"MOONCAKE": "Mooncake", "NIXL": "Nixl", "ASCEND": "Ascend"}

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
    if backend not in _MANAGERS:
        served = ", ".join(_MANAGERS.values())
        logger.warning("kvplan leaves the %s backend to SGLang: it plans for %s only", backend, served)
        return None
    name, module = _MANAGERS[backend], backend.lower()
    own = getattr(importlib.import_module(f"sglang.srt.disaggregation.{module}.conn"), f"{name}KVManager")
    if chosen is not own:
        logger.warning("kvplan leaves %s to SGLang: it is not SGLang's own %s", chosen.__qualname__, own.__qualname__)
        return None
    return getattr(importlib.import_module(f".{module}", __package__), f"Planned{name}Manager")
