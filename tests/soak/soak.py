"""One engine, one peer in a process of its own, and a fault for every transfer.

Each round sends a slice of pages, spoils that transfer, and reuses the pages, on both sides, in the moment in which
`settle` first says True to one of the threads that ask. From then on they must hold what they were given, while the
peer is stopped, continued, killed, started and refuses, and other pages go to it. A slice is looked at when its
turn comes again, and at the end.
"""

from __future__ import annotations

import collections
import contextlib
import random
import threading
import time
from pathlib import Path

import numpy as np
from engine_peer import DST_FIELDS, GAP, PAGE, PAGES, Apart, make_engine

from kvplan import PlanError, TransferError, TransferTimeout, engines, pair

HALF = PAGES // 2  # pages below are those of the rounds, those above belong to the other traffic
PACKED = 0.25  # of the transfers go by way of staging, in up to 16 pieces
# How often each fault comes. A Mooncake peer that is stopped costs 5 s.
FAULTS = {
    "mooncake": {"kill": 45, "refuse": 43, "cancel": 10, "stop": 2},
    "nixl": {"kill": 35, "refuse": 25, "cancel": 20, "stop": 20},
}
LONGEST = 30.0  # seconds until a transfer must have settled, the peer being well
# Mooncake 0.3.13 sometimes never returns from its handshake with a peer that has just unregistered. That ends with the
# peer's process, as it does in production. At most one fault in so many may end so, and one more.
FAULTS_PER_HANG = 10


class Wrong(AssertionError):
    """A byte changed after its transfer was called settled, or a transfer does not settle."""


class Soak:
    """The rounds of one engine.

    Args:
        kind: "mooncake" or "nixl".
        folder: for the peer's memory.
        seed: of all choices; when things happen is the machine's own.
        lie: have `settle` say True as soon as a transfer has ended, to see that the check finds it.
    """

    def __init__(self, kind: str, folder: Path, seed: int, lie: bool = False) -> None:
        self.kind, self.lie = kind, lie
        self.rng = random.Random(seed)
        arguments = {"timeout": 0.5} if kind == "nixl" else {}
        self.sides = Apart(kind, folder, engine=make_engine(kind, "Prefill", **arguments))
        self.engine = self.sides.engine
        self.staging = engines.Staging(8 << 12, 1 << 12)
        self.src = self.sides.src.reshape(2, PAGES, PAGE)
        self.kv = self.sides.dst[DST_FIELDS[1]["base"] :][: PAGE * PAGES].reshape(PAGES, PAGE)
        self.gappy = self.sides.dst[: (PAGE + GAP) * PAGES].reshape(PAGES, PAGE + GAP)[:, :PAGE]
        self.held = np.full(HALF, 0xEE, dtype=np.int16)  # what each page must hold
        self.next = 0  # page
        self.counts: collections.Counter[str] = collections.Counter()
        self.door = threading.Lock()  # held while the peer is exchanged: other traffic stays out
        self.ends = threading.Event()
        self.failed: list[BaseException] = []
        self.traffic = threading.Thread(target=self._others, args=(seed,), daemon=True)
        self.traffic.start()

    # ---- other traffic

    def _others(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        while not self.ends.is_set():
            pages = HALF + rng.permutation(PAGES - HALF)[:20]
            with self.door:
                peer = self.sides.peer
            try:
                plan = pair(self.sides.layout, peer.layout).plan(pages, {"host": pages, "device": pages[::-1]})
                self.engine.submit(plan, peer).wait(LONGEST)
                self.counts["others arrived"] += 1
            except TransferError:
                self.counts["others failed"] += 1
            except PlanError as error:
                if "not settled" not in str(error):
                    self.failed.append(error)
                    return
                self.counts["others refused"] += 1
            except Exception as error:
                self.failed.append(error)
                return
            self.ends.wait(0.002)

    # ---- rounds

    def round(self) -> None:
        """One fault, whichever comes."""
        names = FAULTS[self.kind]
        self.once(self.rng.choices([*names], [*names.values()])[0], self.rng.choice([1, 10, 100, 500, 500]))

    def once(self, fault: str, count: int) -> None:
        """One fault, while so many pages of two regions are sent."""
        if self.next + count > HALF:
            self.next = 0
        pages = np.arange(self.next, self.next + count)
        self.next += count
        self.check(pages)
        self.src[:, pages] = value = self.rng.randrange(1, 100)
        order = np.array(self.rng.sample(list(pages), count))
        plan = pair(self.sides.layout, self.sides.peer.layout).plan(
            pages, {"host": order, "device": order[::-1].copy()}
        )
        transfer = self._fault(fault, plan)
        self.counts[fault] += 1
        self._ends(transfer)
        self.counts["arrived" if transfer.exception(0) is None else "not arrived"] += 1
        self._settled(transfer, pages, value)
        if self.failed:
            raise Wrong(f"the other traffic ended: {self.failed[0]!r}")

    def _fault(self, fault: str, plan) -> engines.Transfer:
        sides = self.sides
        if fault == "refuse":
            before = sides.peer.session
            with self.door:
                sides.tell("unregister")
            transfer = self._submit(plan, engines.Peer(before, sides.peer.layout))
            if not self._ends(transfer):
                return transfer
            with self.door:
                self._ask_for(transfer, self.rng.uniform(0, 0.02))
                sides.tell("register")
            if self.kind == "nixl":  # the agent of that session has ended, and all its connections with it
                self.engine.peer_ended(before)
            return transfer
        if fault == "stop":
            sides.stop()
        transfer = self._submit(plan, sides.peer)
        if fault == "cancel":
            time.sleep(self.rng.uniform(0, 0.003))
            transfer.cancel()
        elif fault == "stop":
            if self.rng.random() < 0.5:
                self._ends(transfer)
            else:
                time.sleep(self.rng.uniform(0, 0.3))
                transfer.cancel()
            self._ask_for(transfer, 0.01)
            sides.go_on()
        elif fault == "kill":
            time.sleep(self.rng.uniform(0, 0.003))
            self._exchange()
        return transfer

    def _exchange(self) -> None:
        """End the peer's process, say so, and start another over the same memory."""
        with self.door:
            session = self.sides.peer.session
            self.sides.kill()
            self.engine.peer_ended(session)
            self.sides.connection.close()
            self.sides.start()

    def _hung(self, transfer: engines.Transfer) -> None:
        """A call of the engine does not return: do what an operator does."""
        self.counts["hung"] += 1
        faults = sum(self.counts[fault] for fault in FAULTS[self.kind])
        if self.counts["hung"] > 1 + faults // FAULTS_PER_HANG:
            raise Wrong(f"{transfer!r} neither ends nor settles, as others before it: {transfer.unsettled}")
        self._exchange()

    def _ends(self, transfer: engines.Transfer) -> bool:
        """Wait until it has ended; whether it did without the peer's process being ended."""
        try:
            transfer.exception(LONGEST)
            return True
        except TransferTimeout:
            self._hung(transfer)
            transfer.exception(LONGEST)
            return False

    def _submit(self, plan, peer) -> engines.Transfer:
        staging = self.staging if self.rng.random() < PACKED else None
        self.counts["packed"] += staging is not None
        return self.engine.submit(
            plan,
            peer,
            label=str(sum(self.counts.values())),
            queue_behind=True,
            staging=staging,
            pack="always" if staging else "auto",
        )

    def _ask_for(self, transfer: engines.Transfer, seconds: float) -> None:
        """Ask again and again whether it has settled, as a serving stack may; reuse at once where it has."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not self._settle(transfer, 0):
            time.sleep(0.0005)

    def _settle(self, transfer: engines.Transfer, timeout: float) -> bool:
        if self.lie:
            return transfer.done()
        return transfer.settle(timeout)

    def _settled(self, transfer: engines.Transfer, pages: np.ndarray, sent: int) -> None:
        """Have several threads settle it; reuse the pages when the first of them hears True."""
        told = threading.Event()

        def ask(timeout: float) -> None:
            while not told.is_set():
                if self._settle(transfer, timeout):
                    told.set()

        askers = [threading.Thread(target=ask, args=(limit,), daemon=True) for limit in (0.0005, 0.05, 1.0)]
        for asker in askers:
            asker.start()
        if not told.wait(LONGEST):
            self._hung(transfer)
        if not told.wait(LONGEST):
            told.set()
            raise Wrong(f"{transfer!r} does not settle: {transfer.unsettled}")
        if transfer.exception(0) is None:
            for region, name in ((self.kv, "kv"), (self.gappy, "gappy")):
                if not (region[pages] == sent).all():
                    raise Wrong(f"{transfer!r} has arrived, and {name} does not hold what was sent")
        mark = self.rng.randrange(101, 200)
        self.src[:, pages] = self.rng.randrange(201, 220)  # both sides give them to another request
        self.kv[pages] = self.gappy[pages] = mark
        self.held[pages] = mark
        for asker in askers:
            asker.join()

    def check(self, pages: np.ndarray) -> None:
        """Raises Wrong where a page does not hold what it was given when its transfer had settled."""
        for region, name in ((self.kv, "kv"), (self.gappy, "gappy")):
            wrong = np.flatnonzero((region[pages] != self.held[pages][:, None]).any(axis=1))
            if len(wrong):
                page = int(pages[wrong[0]])
                raise Wrong(
                    f"{len(wrong)} pages of {name} have changed after they were called settled; page {page} should "
                    f"hold {self.held[page]}, and holds {sorted(set(region[page].tolist()))}"
                )

    def close(self) -> None:
        """Look at all pages once more, and end."""
        self.ends.set()
        self.traffic.join(LONGEST)
        try:
            time.sleep(1)
            self.check(np.arange(HALF))
            if self.staging.free != self.staging.slots:
                raise Wrong(f"all transfers have settled, and slots of staging are not free: {self.staging!r}")
        finally:
            self.stop()

    def stop(self) -> None:
        self.ends.set()
        with contextlib.suppress(ProcessLookupError):
            self.sides.go_on()
        self.sides.close()
