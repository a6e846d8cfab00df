"""kvplan inside SGLang: its KV managers plan with kvplan. See docs/sglang.md.

SGLang calls `load` in each of its processes (entry-point group `sglang.srt.plugins`). Nothing else of kvplan is
imported before a KV manager class is asked for.
"""

from .seam import load

__all__ = ["load"]
