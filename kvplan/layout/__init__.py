"""What lies where: regions, layouts, their wire form, and the layouts of known models."""

from .layout import Layout
from .models import deepseek_v4, mha, mla
from .region import Heads, Interleave, Memory, Region
from .tensors import from_planes, from_slots, from_tensor
from .wire import MAX_REGIONS

__all__ = [
    "MAX_REGIONS",
    "Heads",
    "Interleave",
    "Layout",
    "Memory",
    "Region",
    "deepseek_v4",
    "from_planes",
    "from_slots",
    "from_tensor",
    "mha",
    "mla",
]
