"""Page ids become descriptors: page lists, requests, plans and refusals, on the CPU and on a GPU."""

from .cluster import Cluster
from .copy import execute
from .device import DevicePlan, Planner
from .packed import Packed
from .pairing import Pairing, pair
from .plan import Plan, Request, Segment

__all__ = ["Cluster", "DevicePlan", "Packed", "Pairing", "Plan", "Planner", "Request", "Segment", "execute", "pair"]
