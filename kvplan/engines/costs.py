"""What a transfer costs by either route: straight, descriptor by descriptor, or packed, by way of staging."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Cost:
    """What an engine needs for descriptors and for bytes, over one transport.

    Args:
        per_descriptor: seconds that a descriptor costs the engine, however small it is.
        bandwidth: bytes a second that large descriptors reach.
        copy: bytes a second that one thread copies between pages and staging, in small rows.
        fixed: seconds that packing costs a transfer, whatever its size: slots, threads, calls of their own.

    Raises:
        ValueError: one is not a finite number above 0 (`per_descriptor` and `fixed` may be 0).
    """

    per_descriptor: float
    bandwidth: float
    copy: float = 4e9
    fixed: float = 5e-4

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in ("per_descriptor", "fixed") else math.ulp(0)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < math.inf:
                raise ValueError(f"{field.name} is {value!r}; it must be a finite number above 0")

    @property
    def smaller_than(self) -> float:
        """Bytes of a descriptor below which its own cost is more than that of its bytes: s* = c x B."""
        return self.per_descriptor * self.bandwidth

    @property
    def more_than(self) -> float:
        """Descriptors above which their cost is more than the fixed cost of packing: N*."""
        return self.fixed / self.per_descriptor if self.per_descriptor else math.inf

    def direct(self, count: float, nbytes: float) -> float:
        """Seconds for so many descriptors of so many bytes in all, as they are."""
        return max(count * self.per_descriptor, nbytes / self.bandwidth)

    def packed(self, merged: float, nbytes: float, piece: float) -> float:
        """Seconds for so many bytes by way of staging, in pieces of at most `piece` bytes.

        The engine is given `merged` descriptors. Copies and calls of the engine overlap, so the slower of them counts,
        and the copies of the first piece, which nothing overlaps.
        """
        copies = nbytes / self.copy
        return self.fixed + max(copies, self.direct(merged, nbytes)) + min(piece, nbytes) / self.copy


#: By engine and transport. TCP: measured on loopback, 2 cores, Mooncake 0.3.13 and NIXL 1.5.1. RDMA: from public
#: reports, named beside each; the bandwidth is that of a 400 Gb/s card. `Engine.cost` overrides it.
COSTS: dict[tuple[str, str], Cost] = {
    ("mooncake", "tcp"): Cost(60e-6, 0.55e9),  # 51 to 82 µs
    ("mooncake", "rdma"): Cost(1.8e-6, 45e9),  # vllm#53825: 32,000 of 16 KB at 9 GB/s
    ("nixl", "tcp"): Cost(15e-6, 0.55e9),  # 2 to 15 µs
    ("nixl", "rdma"): Cost(1.1e-6, 42e9),  # LMCache#4161: 0.9 to 1.4 µs
    ("nixl", "libfabric"): Cost(2.4e-6, 45e9),  # nixl#1514
}
