"""What must hold whatever a peer sends: each target draws an input, hands it to kvplan, and checks what comes of it.

Input number n is all that `random.Random(n)` draws, so a number is enough to have it again.
"""

from __future__ import annotations

import contextlib
import json
import random
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import kvplan
from kvplan import Layout, LayoutError, PairingError, PlanError, engines
from kvplan.engines import nixl_metadata
from kvplan.engines.check import Spans, check

from . import values

HANG = 30  # seconds; no input here takes a tenth of one
ROOM = 4 << 20  # bytes that may be used beside what a region takes
A_REGION = 8 << 10
LONGEST = 4000  # characters of a message


class Fault(AssertionError):
    """Something that must hold does not."""


@contextlib.contextmanager
def bounded(regions: int) -> Iterator[None]:
    """Time and memory: no hang, and no more bytes than so many regions warrant."""

    def hang(*_: object) -> None:
        raise Fault(f"not done within {HANG} s")

    before = signal.signal(signal.SIGALRM, hang)
    signal.setitimer(signal.ITIMER_REAL, HANG)
    start = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    used = tracemalloc.get_traced_memory()[1] - start
    if used > ROOM + A_REGION * regions:
        raise Fault(f"took {used} bytes for {regions} regions")


def refused(call: Callable[[], Any], *errors: type[ValueError]) -> Any:
    """What `call` returns, or None where it refuses as it should: by one of `errors`, in words that can be shown."""
    try:
        return call()
    except errors as error:
        told = str(error)
        if type(error) not in errors:
            raise Fault(f"{type(error).__name__} instead of {errors}: {told:.300}") from error
        if not 0 < len(told) <= LONGEST or not told.isprintable():
            raise Fault(f"a message of {len(told)} characters: {told[:300]!a}") from error
        return None
    except Fault:
        raise
    except BaseException as error:
        raise Fault(f"{type(error).__name__} escapes: {str(error)[:300]!a}") from error


def decoded(data: Any) -> Layout | None:
    """The layout that a peer's `data` gives, or None where it is refused."""
    regions = data.get("regions") if isinstance(data, dict) else None
    count = len(regions) if isinstance(regions, list) else 0
    with bounded(count if count <= kvplan.layout.MAX_REGIONS else 0):
        made = refused(lambda: Layout.from_dict(data), LayoutError)
    if made is None:
        return None
    again = made.to_dict()
    if Layout.from_dict(again) != made or Layout.from_dict(json.loads(json.dumps(again))) != made:
        raise Fault("to_dict gives another layout")
    return made


def honest(rng: random.Random) -> Layout:
    """A layout of this side."""
    while True:
        data = values.layout(rng)
        with contextlib.suppress(LayoutError):
            made = Layout.from_dict(data)
            if made.regions:
                return made


def layout(rng: random.Random) -> str:
    """Decode, round trip, declare to an engine, pair with itself and with a layout of this side, plan."""
    made = decoded(values.layouts(rng))
    if made is None:
        return "refused"
    with bounded(len(made.regions)):
        Spans([made])
        repr(engines.Peer("127.0.0.1:1", made))
    mine = honest(rng)
    names = {region.name for region in (*made.regions, *mine.regions)}
    results = {
        planned(rng, src, dst, names if rng.randrange(2) else set())
        for src, dst in ((made, made), (mine, made), (made, mine))
    }
    return max(results, key=["decoded", "paired", "planned"].index)


def planned(rng: random.Random, src: Layout, dst: Layout, unsent: set[str]) -> str:
    """Pair and plan. What comes out lies within both layouts."""
    with bounded(len(src.regions) + len(dst.regions)):
        pairing = refused(lambda: kvplan.pair(src, dst, allow_unsent=unsent), PairingError)
        if pairing is None:
            return "decoded"
        count = rng.randrange(4)
        most = min([region.num_pages for region in (*src.regions, *dst.regions)], default=0)
        ids = {space: _sample(rng, most, count) for space in dst.spaces}
        named: Any = {space: _sample(rng, most, count) for space in dst.spaces}
        given: Any = rng.choice([named, _sample(rng, most, count)])
        tokens = None if rng.randrange(2) else rng.choice([0, 1, 16, (1 << 62) - 1])
        start = rng.choice([None, 0, 4, 1 << 61])
        times: Any = {"num_tokens": tokens, "dst_start": start}
        if given is named:
            times = {name: dict.fromkeys(dst.spaces, value) for name, value in times.items()}
        plan = refused(lambda: pairing.plan(given, ids, **times), PlanError)
    if plan is None:
        return "paired"
    check(plan, Spans([src]), Spans([dst]))
    return "planned"


def _sample(rng: random.Random, most: int, count: int) -> list[int]:
    return list({rng.randrange(most) for _ in range(count)}) if most else []


_SRC = Layout([kvplan.Region("kv", k, (k + 1) << 20, 64, 20) for k in range(2)], page_size=4)
_DST = Layout(
    [kvplan.Region("kv", k, (k + 1) << 30, 64, 12 + k, space=("host", "device")[k]) for k in range(2)], page_size=4
)
_PAIRING = kvplan.pair(_SRC, _DST)


def pages(rng: random.Random) -> str:
    """Page lists and positions."""
    there = values.pages(rng, _DST.spaces, 12)
    here: Any = rng.choice([values.pages(rng, _DST.spaces, 20), list(range(len(there.get("host") or ()) if
                            isinstance(there, dict) and isinstance(there.get("host"), list) else 2))])  # fmt: skip
    times = {
        name: values.value(rng, 1) if rng.randrange(4) == 0 else usual
        for name, usual in (("src_start", 0), ("dst_start", None), ("num_tokens", None))
    }
    with bounded((_count(here) + _count(there)) * 64 // A_REGION):  # 64 bytes an id
        plan = refused(lambda: _PAIRING.plan(here, there, **times), PlanError)
    if plan is None:
        return "refused"
    check(plan, Spans([_SRC]), Spans([_DST]))
    return "planned"


def _count(lists: Any) -> int:
    """Ids in a page list, or in all of several."""
    held = lists.values() if isinstance(lists, dict) else [lists]
    return sum(len(ids) for ids in held if isinstance(ids, list))


def session(rng: random.Random) -> str:
    """What an engine is told to reach. None is reached: a session is checked before any engine sees it."""
    given = values.session(rng)
    with bounded(0):
        peer = refused(lambda: engines.Peer(given, _DST), ValueError)
        taken = []
        for kind in engines.KINDS.values() if peer is not None else ():
            engine = object.__new__(kind)
            engine.backend = "UCX"
            taken.append(refused(lambda engine=engine: (engine._check_session(given), True), ValueError))
    return "taken" if any(taken) else "refused"


def metadata(rng: random.Random) -> str:
    """What NIXL is told of a peer, and UCX of its worker. What is taken must come back whole under another name."""
    given = values.metadata(rng)
    with bounded(0):
        made = refused(lambda: nixl_metadata.parse(given, "UCX"), ValueError)
    if made is None:
        return "refused"
    again = nixl_metadata.parse(made.under("kvplan-other"), "UCX")
    if again.places != made.places or again.num_regions != made.num_regions or again.name != "kvplan-other":
        raise Fault("it says something else under another name")
    return "taken"


TARGETS: dict[str, Callable[[random.Random], str]] = {
    "layout": layout,
    "pages": pages,
    "session": session,
    "metadata": metadata,
}


def attempt(target: str, number: int) -> str:
    """Input `number` of a target; what came of it. Raises Fault."""
    try:
        return TARGETS[target](random.Random(number))
    except Fault:
        raise
    except Exception as error:
        raise Fault(f"{type(error).__name__} escapes: {str(error)[:300]!a}") from error
