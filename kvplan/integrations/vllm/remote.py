"""A prefill engine, as a worker of the decode side sees it: its ranks, and the pairings with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from kvplan import Cluster, Layout, Pairing, Plan, Request
from kvplan.engines import Peer

from ...errors import shown
from .channel import ChannelError, ask
from .lists import Tables, request
from .words import Described, space_of

VERSION = 1  # of the payload


def payload(described: Described, kind: str, session: str) -> dict[str, Any]:
    """What a worker tells decode engines: JSON-able.

    Args:
        described: its caches.
        kind: of its transfer engine, "nixl" or "mooncake".
        session: `Engine.session`, read after the caches were registered.
    """
    return {
        "version": VERSION, "engine": kind, "session": session,
        "layout": described.layout.to_dict(), "ratios": described.ratios,
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Rank:
    """One worker of the prefill side that sends to this one."""

    peer: Peer
    pairing: Pairing
    ratios: dict[str, int]


@dataclasses.dataclass(frozen=True)
class Remote:
    """A prefill engine that this worker reads from.

    Attributes:
        instance: what it drew at its start.
        host, port: of its side channel.
        ranks: its workers that hold something of what this worker holds.
        sessions: of all its workers.
    """

    instance: str
    host: str
    port: int
    ranks: tuple[Rank, ...]
    sessions: tuple[str, ...]

    def plans(
        self, mine: Described, remote_blocks: list[list[int]], blocks: list[list[int]], start: int, stop: int
    ) -> list[tuple[Rank, Plan]]:
        """One plan for each rank that has something to send; see `lists.request`.

        Raises:
            PlanError: the tables do not cover the tokens, or hold ids that cannot be.
        """
        here = Tables(_by_space(blocks), mine.ratios)
        found = []
        for rank in self.ranks:
            wanted: Request = request(rank.pairing, Tables(_by_space(remote_blocks), rank.ratios), here, start, stop)
            plan = rank.pairing.plan(
                wanted.src_pages, wanted.dst_pages, src_start=wanted.src_start, dst_start=wanted.dst_start,
                num_tokens=wanted.num_tokens,
            )  # fmt: skip
            if len(plan):
                found.append((rank, plan))
        return found


def _by_space(blocks: list[list[int]]) -> dict[str, list[int]]:
    return {space_of(number): group for number, group in enumerate(blocks)}


def shake_hands(mine: Described, kind: str, engine: str, host: str, port: int, timeout: float) -> Remote:
    """Ask a prefill engine for its layouts, pair them with this worker's, and prove that nothing is left out.

    Raises:
        ChannelError: it did not answer within `timeout` seconds, or refused.
        ValueError: what it sent is malformed, or it uses another kind of transfer engine. A LayoutError or
            PairingError, which are ValueErrors too, names the layer that does not fit.
    """
    answer = ask(host, port, "handshake", timeout, engine=engine)
    instance, ranks = answer.get("instance"), answer.get("ranks")
    if not isinstance(instance, str) or not isinstance(ranks, list) or not ranks:
        raise ChannelError(f"{host}:{port} sent no handshake, but {sorted(answer)}")
    payloads = [_checked(each, kind) for each in ranks]
    layouts = [Layout.from_dict(each["layout"]) for each in payloads]
    every = {key for layout in layouts for key in layout.by_key}
    # What this worker does not hold is another rank's; whatever it holds must come, each byte once.
    cluster = Cluster(prefill=layouts, decode=[mine.layout], allow_unsent=every)
    cluster.check()
    found = []
    for number, (each, layout) in enumerate(zip(payloads, layouts, strict=True)):
        pairing = cluster.pairing(number, 0)
        if len(pairing.entries):
            found.append(Rank(Peer(each["session"], layout), pairing, each["ratios"]))
    return Remote(instance, host, port, tuple(found), tuple(each["session"] for each in payloads))


def _checked(each: Any, kind: str) -> dict[str, Any]:
    if not isinstance(each, Mapping):
        raise ValueError(f"a rank of the prefill side sent {shown(each)}, not a mapping")
    if each.get("version") != VERSION:
        raise ValueError(f"the prefill side speaks version {shown(each.get('version'))}, this side {VERSION}")
    if each.get("engine") != kind:
        raise ValueError(f"the prefill side uses the engine {shown(each.get('engine'))}, this side {kind!r}")
    ratios = each.get("ratios")
    if not isinstance(ratios, dict) or not all(type(ratio) is int and 0 < ratio < 1 << 20 for ratio in ratios.values()):
        raise ValueError(f"ratios of the prefill side are {shown(ratios)}")
    if not isinstance(each.get("session"), str):
        raise ValueError(f"session of the prefill side is {shown(each.get('session'))}")
    return dict(each)
