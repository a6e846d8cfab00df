"""kvplan inside vLLM: KvplanConnector. See docs/vllm.md.

vLLM calls `load` in each of its processes (entry-point group `vllm.general_plugins`). Nothing else of kvplan is
imported before the connector is asked for.
"""

from .seam import load

__all__ = ["load"]
