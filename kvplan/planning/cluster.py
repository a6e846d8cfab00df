"""Clusters: all prefill ranks that work on one request, all decode ranks, and the proof that nothing is left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

from ..errors import PairingError
from ..layout import Layout
from ..pairing import Columns, Unsent, coverage, match, named
from .pairing import Pairing


class Cluster:
    """All ranks that take part in one request, prefill and decode.

    Args:
        prefill: layout of each prefill rank that works on one request: all stages, all tensor-parallel ranks and
            replicas. A second instance, which serves other requests, is a cluster of its own.
        decode: layout of each decode rank that receives it.
        allow_unsent: source regions that no decode rank need hold, whole or in part: names, or (name, layer) pairs.
        allow_unwritten: decode regions that no prefill rank need hold, for example those of a decode-only draft model:
            names, or (name, layer) pairs. Where one is sent in part, it must be sent whole.

    Raises:
        TypeError: something else than layouts, names and pairs.
    """

    def __init__(
        self,
        prefill: Sequence[Layout],
        decode: Sequence[Layout],
        *,
        allow_unsent: Iterable[Unsent] = (),
        allow_unwritten: Iterable[Unsent] = (),
    ) -> None:
        self.prefill, self.decode = tuple(prefill), tuple(decode)
        for side, layouts in (("prefill", self.prefill), ("decode", self.decode)):
            for rank, layout in enumerate(layouts):
                if not isinstance(layout, Layout):
                    raise TypeError(f"{side} rank {rank} must be a Layout, not {type(layout).__name__}")
        self.allow_unsent = frozenset(named(allow_unsent, "allow_unsent"))
        self.allow_unwritten = frozenset(named(allow_unwritten, "allow_unwritten"))

    def __repr__(self) -> str:
        return f"Cluster({len(self.prefill)} prefill ranks, {len(self.decode)} decode ranks)"

    @cached_property
    def _held_by_decode(self) -> frozenset[tuple[str, int]]:
        return frozenset(key for layout in self.decode for key in layout.by_key)

    def pairing(self, i: int, j: int) -> Pairing:
        """What prefill rank `i` sends to decode rank `j`, as `pair` makes it.

        A source region that this decode rank does not hold is no error if another decode rank holds it. So pipeline
        stages may overlap in part, n to m, without `allow_unsent`.

        Raises:
            IndexError: there is no such rank.
            PairingError: as `pair`.
        """
        for side, number, layouts in (("prefill", i, self.prefill), ("decode", j, self.decode)):
            if not 0 <= number < len(layouts):
                raise IndexError(f"{side} rank {number} is not one of the {len(layouts)} of this cluster")
        src, dst = self.prefill[i], self.decode[j]
        try:
            return Pairing(src, dst, match(src, dst, self.allow_unsent | self._held_by_decode))
        except PairingError as error:
            raise PairingError(f"prefill rank {i} and decode rank {j}: {error}") from None

    def check(self) -> None:
        """Prove that the prefill ranks together write every region, layer, head and row of every decode rank once.

        And that nothing is lost: every region, layer, head and row of a prefill rank is held by some decode rank.
        No page ids are needed: it is a proof about layouts, and holds for every request. It also refuses what `pairing`
        would refuse for any two ranks. 64 x 64 ranks of 100 regions take less than a second.

        Raises:
            PairingError: names what nobody sends, or which ranks send the same (name, layers, heads, row positions,
                ranks): a few of them, the rest counted. Or, as `pair`, what cannot be paired; or what a prefill rank
                holds, and no decode rank.
        """
        columns = Columns(self.prefill, self.decode)
        self.check_pairs(columns)
        coverage.refuse(self.faults(columns))

    def check_pairs(self, columns: Columns) -> None:
        """The first half of `check`: what cannot be paired, whoever else sends. `columns`: of this cluster."""
        coverage.unsent_keys(columns, set(self.allow_unsent))
        columns.check_pairs()

    def faults(self, columns: Columns) -> list[coverage.Fault]:
        """The second half of `check`: what is not written once, or lost. `columns`: of this cluster."""
        return coverage.faults(columns, set(self.allow_unsent), set(self.allow_unwritten))
