"""Pairings: made once for each peer, and what a serving stack calls for every request."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch

from ..errors import PlanError
from ..layout import Layout
from ..ops import backend as backends
from ..pairing import PairingTables, Unsent, cut, describe, match
from . import forms
from .case import keep_case
from .device import Planner
from .make import make, planner
from .plan import Plan, Request, Start
from .requests import PageLists


def pair(src: Layout, dst: Layout, *, allow_unsent: Iterable[Unsent] = ()) -> Pairing:
    """Match source with destination regions by (name, layer), once per peer.

    Args:
        src: layout of this prefill rank.
        dst: layout of the decode rank. Its regions without a source are left alone.
        allow_unsent: source regions that may have no destination: names, or (name, layer) pairs. What this layout
            lacks is fine, so every pipeline stage can be given the same. Where another decode rank holds a region,
            `Cluster.pairing` needs no such list.

    Raises:
        PairingError: a source region has no destination, a pair cannot be moved row for row, or two destination
            regions overlap. It names the regions and the reason. Regions of two spaces may overlap where every page of
            one meets at most one page of the other, at equal strides (groups of layers over one buffer): then no two
            lists of a call may write one physical page.
    """
    return Pairing(src, dst, match(src, dst, allow_unsent))


class Pairing(PairingTables):
    """What goes from one source rank to one destination rank: made by `pair`, used for every request.

    Its attributes, the tables, are those of `PairingTables`.
    """

    def explain(self) -> str:
        """In words: which region goes where, under which space and rule, what was merged, what is left alone."""
        return describe(self)

    def layers(self, layers: Collection[int]) -> Pairing:
        """The part of this pairing that moves some layers, for sending layer by layer before prefill has ended.

        Page lists are given, and checked, as for the whole pairing: also those of spaces in which none of these layers
        lies. Parts that hold each layer once together move what the whole moves, byte for byte.

        Args:
            layers: for example range(0, 8). Layers that the pairing does not have are fine.
        """
        return cut(self, layers)

    def prepared(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All pages of the source and of the destination, as lists that an engine prepares once a peer.

        Returns:
            (source, destination), each torch int64 [2, P]: the address (the bit pattern of an unsigned one) and the
            bytes of each page. Entry by entry, in the order of `entries`; of each entry, page 0 to the last page that
            all its regions have. Where all entries have num_pages pages, page p of entry e is number e * num_pages + p.
            NIXL takes such lists in `prep_xfer_dlist`; `Plan.indices` gives the numbers of one request.

        Raises:
            PlanError: rows move, not whole pages; or a list is longer than 2**31.
        """
        return forms.prepared(self)

    def plan(
        self,
        src_pages: Any,
        dst_pages: Any,
        *,
        src_start: Start = 0,
        dst_start: Start | None = None,
        num_tokens: Start | None = None,
        null_page: int | Mapping[str, int] | None = None,
        backend: str | None = None,
    ) -> Plan:
        """The transfer plan of one request, or of one chunk of it.

        Args:
            src_pages: page ids of the source, int32 or int64 [P], in request order: a torch tensor, a NumPy array,
                anything with DLPack, or a list. Or a dict {destination space: such an array}: a list that is given by
                name is matched row by row with that space's, and only positions given by name apply to it. The key
                None holds the list for every space that is not named. If a list is on a GPU, the plan is made there, on
                the current stream, without waiting: see DevicePlan in kvplan/planning/device.py.
            dst_pages: {space: page ids}. An array alone is enough if the destination layout has one space.
            src_start: token position, in the request, of the first token of src_pages[0]. An int is that of the list
                that is not given by name. A dict {destination space: int} gives each list its own, also those given by
                name; the key None, as in src_pages, is for the spaces not named, and the default is 0. The same holds
                for dst_start and num_tokens.
            dst_start: token position of the first token of dst_pages[0]. Default: the same as src_start, and both lists
                must cover the same tokens, each rounded up to its own page. If given, dst_pages may be longer, but must
                cover all tokens sent. It may lie before src_start. It may also lie behind it, where the decode side
                holds a prefix already: what is sent then begins at dst_start. Both must lie a multiple of a page apart
                where whole pages move, else of a row (the tokens that one row stands for).
            num_tokens: valid tokens, counted from src_start. Default: all that src_pages covers.
            null_page: the id that stands in page lists for no page, as the null block 0 does in vLLM's tables of
                sliding windows: one id for the lists of all spaces, or {space: id}. It may be there more than once, and
                is left out. It must stand for the same tokens on both sides. Only for lists on the CPU, planned there:
                to find null pages on a GPU would wait for it.
            backend: back end to require, see kvplan/ops/backend.py. "reference", the oracle, is always available, but
                slow.

        Returns:
            Plan: complete; an empty one where this rank owes the peer nothing.

        Raises:
            PlanError: the request cannot be planned whole. Names region, space, position and value; its `case()` can
                be kept in a file, and explained later.
            ValueError: `backend` is not the active one.
        """
        try:
            return make(PageLists(self).add(src_pages, dst_pages, src_start, dst_start, num_tokens, null_page), backend)
        except PlanError as error:
            keep_case(error, self, [Request(src_pages, dst_pages, src_start, dst_start, num_tokens, null_page)])
            raise

    def planner(
        self,
        requests: Iterable[Request],
        *,
        device: torch.device | str | None = None,
        pinned: bool = False,
        backend: str | None = None,
    ) -> Planner:
        """Plan requests on a GPU more than once, as with CUDA graphs, or straight into pinned memory for an engine.

        Args:
            requests: as `plan_batch` takes them. Each run reads the lists on the GPU again. Other lists are
                copied there once.
            device: by default where the lists are.
            pinned: whether the table is pinned host memory, which the kernels write themselves.
            backend: as for `plan`.

        Raises:
            PlanError: lengths or positions do not fit; no list is on a GPU, and no device is given; or a request has a
                null_page.
            ValueError: `backend` is not the one in use.
        """
        requests = list(requests)
        try:
            lists = PageLists(self).add_all(requests)
            where = lists.device if device is None else _here(device)
            if where is None:
                raise PlanError("no list is on a GPU: say on which device to plan")
            if backend is not None:
                backends.check_in_use(backend, where.type)
            return planner(lists, where, pinned)
        except PlanError as error:
            keep_case(error, self, requests)
            raise

    def plan_batch(self, requests: Iterable[Request], *, backend: str | None = None) -> Plan:
        """One plan for many requests (or chunks) to this peer, in one op call.

        Args:
            requests: `kvplan.Request`s, whose fields are the arguments of `plan`. No two may write one page.
            backend: as for `plan`.

        Returns:
            Plan: by segment, then request, then entry, then position; `Plan.offsets` says where each request lies, and
            `Plan.request(k)` gives the k-th as a plan of its own.

        Raises:
            PlanError: as `plan`, with the number of the request.
        """
        requests = list(requests)
        try:
            return make(PageLists(self).add_all(requests), backend)
        except PlanError as error:
            keep_case(error, self, requests)
            raise


def _here(device: torch.device | str) -> torch.device:
    """A device that torch can use, with its index."""
    try:
        return torch.empty(0, device=device).device
    except (AssertionError, RuntimeError) as error:
        raise PlanError(f"cannot plan on {device}: {str(error).splitlines()[0]}") from None
