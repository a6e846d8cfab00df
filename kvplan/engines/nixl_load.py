"""What NIXL needs of a machine: its package, and a UCX that can end."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import Any

_INSTALL = (
    "pip install 'kvplan[nixl]' (CUDA 12) or 'kvplan[nixl-cuda13]'; without a GPU: pip install --no-deps nixl-cu12"
)
_NO_RDMA = (
    "this machine has no RDMA device, and UCX's module for them ends such a process with a segmentation fault when it "
    "exits: set UCX_MODULES=^ib in its environment, or pass ucx={'UCX_MODULES': '^ib'} before anything has loaded UCX"
)


def check_ucx() -> None:
    """Raises RuntimeError where a process that uses UCX would end with a crash."""
    if not _has_rdma() and not _leaves_out_ib(os.environ.get("UCX_MODULES", "")):
        raise RuntimeError(_NO_RDMA)


def transport(backend: str) -> str:
    """Over what a back end goes here, as `COSTS` calls it; the name of another back end as it is."""
    if backend != "UCX":
        return backend.lower()
    only_tcp = set(os.environ.get("UCX_TLS", "all").split(",")) <= {"tcp", "self", "sysv", "posix", "sm", "shm"}
    return "tcp" if only_tcp or not _has_rdma() else "rdma"


def load() -> Any:
    """NIXL's Python API; ImportError says what to install."""
    reasons = []
    for package in ("nixl", "nixl_cu13", "nixl_cu12"):
        try:
            return importlib.import_module(f"{package}._api")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith("nixl"):
                reasons.append(f"{package}: {error}")
        except ImportError as error:
            reasons.append(f"{package}: {error}")
    if reasons:
        raise ImportError(f"NIXL does not load ({'; '.join(reasons)}). {_INSTALL}")
    raise ImportError(f"NixlEngine needs NIXL: {_INSTALL}")


def _has_rdma() -> bool:
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def _leaves_out_ib(modules: str) -> bool:
    """Whether UCX does not load its module for InfiniBand, given its variable UCX_MODULES."""
    names = modules.lstrip("^").split(",")
    return "ib" in names if modules.startswith("^") else bool(modules) and "ib" not in names and "all" not in names
