"""NIXL on a machine without a GPU: memory that SGLang calls VRAM is registered as DRAM of device 1 and more.

To NIXL these are as unlike DRAM of device 0 as VRAM is: a descriptor under the wrong one is refused
(tests/test_nixl.py). All else is NIXL's own: its agent, UCX and TCP over loopback.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from kvplan.engines import nixl_load


def install() -> None:
    """Have SGLang import the NIXL that is installed, with an agent that takes VRAM for DRAM of another device."""
    os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", UCX_MODULES="^ib")
    api = nixl_load.load()

    class Agent(api.nixl_agent):  # type: ignore[name-defined, misc]
        def register_memory(self, rows: Any, kind: str) -> Any:
            if kind == "VRAM":
                rows = [(base, nbytes, 1 + device, tag) for base, nbytes, device, tag in rows]
            return super().register_memory(rows, "DRAM")

        def get_xfer_descs(self, rows: Any, kind: str) -> Any:
            return super().get_xfer_descs(moved(rows, kind), "DRAM")

        def prep_xfer_dlist(self, name: str, rows: Any, kind: str | None = None) -> Any:
            # SGLang gives runs (uint64 [N, 5]) here, or a list that get_xfer_descs has made.
            return super().prep_xfer_dlist(name, moved(rows, kind or ""), "DRAM" if kind else None)

    api.nixl_agent = Agent
    package = api.__name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name == package or name.startswith(f"{package}."):
            sys.modules["nixl" + name[len(package) :]] = module


def moved(rows: Any, kind: str) -> Any:
    """Rows of VRAM as rows of the DRAM that stands for it."""
    if kind != "VRAM" or not isinstance(rows, np.ndarray | list):
        return rows
    rows = np.array(rows, np.uint64)
    rows[:, 2] += 1
    return rows
