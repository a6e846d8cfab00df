"""The half of the connector in vLLM's worker processes: registers the caches, and reads those of prefill engines."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from kvplan import Plan
from kvplan.engines import Engine, Peer, TransferGroup

from . import config
from .channel import ChannelError, ask, refuses
from .metadata import Handshake, Load, Metadata
from .remote import Remote, payload, shake_hands
from .settings import Settings
from .words import Described, Ranks, describe

logger = logging.getLogger("vllm.kvplan")

_LOOK_S = 1.0  # between two looks whether a prefill engine whose transfer failed is still there
_MOST_REMOTES = 1024  # prefill engines that are kept in mind; an engine started again is another one
_LOOKS = 3  # after so many refusals in a row its process has ended


class Reading:
    """One request that is being read.

    Attributes:
        load: which.
        transfers: what is under way for it.
        remote: the prefill engine, once hands were shaken.
        arrived: all of it is here, and was held on the prefill side until it was.
        failure: why it failed, if so.
    """

    def __init__(self, load: Load) -> None:
        self.load = load
        self.transfers = TransferGroup(label=load.request)
        self.remote: Remote | None = None
        self.arrived = False
        self.failure: str | None = None
        self.begun = time.monotonic()
        self._lock = threading.Lock()
        self._refusals = 0
        self._next_look = 0.0

    def fail(self, reason: str, level: int = logging.ERROR) -> None:
        """It has failed, or is not wanted any more. Nothing more is submitted. The first reason stays."""
        with self._lock:
            if self.failure is None and not self.arrived:
                self.failure = reason
                logger.log(
                    level, "KvplanConnector: request %s was not read from %s:%d: %s",
                    self.load.request, self.load.host, self.load.port, reason,
                )  # fmt: skip
        self.transfers.cancel()

    def submit(self, engine: Engine, plan: Plan, peer: Peer) -> bool:
        """Begin to move a plan. False where the request has failed: then its blocks may be another's already."""
        with self._lock:
            if self.failure is not None:
                return False
            self.transfers.add(engine.submit(plan, peer, op="read", label=self.load.request))
            return True

    def arrive(self) -> None:
        """All of it has arrived, unless it has failed."""
        with self._lock:
            self.arrived = self.failure is None

    def look(self, now: float) -> bool:
        """Whether it is time to look for the prefill engine again."""
        if now < self._next_look:
            return False
        self._next_look = now + _LOOK_S
        return True

    def peer_has_gone(self) -> bool:
        """Look for the prefill engine. Whether its process has ended."""
        self._refusals = self._refusals + 1 if refuses(self.load.host, self.load.port) else 0
        return self._refusals >= _LOOKS


class Worker:
    """The worker half. vLLM calls it from one thread; what takes long is done in threads of its own."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, settings: Settings) -> None:
        self._vllm_config, self._kv_cache_config, self._settings = vllm_config, kv_cache_config, settings
        self._engine: Engine | None = None
        self._mine: Described | None = None
        self._readings: dict[str, Reading] = {}
        self._release: set[str] = set()
        self._remotes: dict[tuple[str, str, int], concurrent.futures.Future[Remote]] = {}
        self._lock = threading.Lock()  # guards _remotes
        self._threads = concurrent.futures.ThreadPoolExecutor(16, thread_name_prefix="kvplan-vllm")

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """Describe the caches of this rank, and register them with a transfer engine."""
        from vllm.distributed.parallel_state import get_tp_group

        groups = config.groups(self._vllm_config, self._kv_cache_config, caches)
        tp = get_tp_group()
        ranks = Ranks(tp.rank_in_group, tp.world_size)
        self._mine = describe(groups, caches, self._kv_cache_config.num_blocks, ranks)
        self._engine = self._settings.make_engine()
        self._engine.register(self._mine.layout)
        logger.info(
            "KvplanConnector: %d caches of TP rank %d of %d are registered with %s",
            len(self._mine.layout.regions), tp.rank_in_group, tp.world_size, self._settings.engine,
        )  # fmt: skip

    def handshake(self) -> Handshake | None:
        """What decode engines are told of this rank."""
        if self._engine is None or self._mine is None:
            return None
        return Handshake(payload(self._mine, self._settings.engine, self._engine.session))

    def start(self, metadata: Metadata) -> None:
        """Begin to read what the scheduler half wants. Returns at once."""
        self._release |= metadata.release
        for load in metadata.loads:
            reading = self._readings[load.request] = Reading(load)
            self._threads.submit(self._begin, reading)

    def results(self, finished: set[str]) -> tuple[set[str], set[str], set[str]]:
        """What has ended since the last call.

        Args:
            finished: requests that vLLM has ended; those still being read are stopped.

        Returns:
            (requests whose blocks need not be held any longer, requests that were read or have failed, those of them
            that have failed). A failed request is in neither before nothing can be written to its blocks any more.
        """
        released, self._release = self._release, set()
        for request in finished & self._readings.keys():
            self._readings[request].fail("vLLM has ended the request", logging.INFO)
        read, failed = set(), set()
        now = time.monotonic()
        for request, reading in list(self._readings.items()):
            if reading.failure is not None:
                if not reading.transfers.settle(0):
                    if reading.look(now):
                        self._threads.submit(self._look, reading)
                    continue
                failed.add(request)
            elif not reading.arrived:
                continue
            read.add(request)
            del self._readings[request]
        return released, read, failed

    def close(self) -> None:
        """Stop reading, and let the engine go."""
        for reading in self._readings.values():
            reading.fail("vLLM shuts down", logging.INFO)
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._engine is not None:
            try:
                self._engine.close(5)
            except Exception as error:
                logger.warning("KvplanConnector: the engine was not closed: %s", error)
            self._engine = None

    # ---- in threads of its own

    def _begin(self, reading: Reading) -> None:
        load, engine, mine = reading.load, self._engine, self._mine
        try:
            assert engine is not None and mine is not None, "a request came before the caches"
            reading.remote = self._remote(load)
            plans = reading.remote.plans(mine, load.remote_blocks, load.blocks, load.start, load.stop)
            if not all([reading.submit(engine, plan, rank.peer) for rank, plan in plans]):
                return
            reading.transfers.add_done_callback(lambda _: self._threads.submit(self._end, reading))
        except Exception as error:
            self._forget(load)
            reading.fail(f"{type(error).__name__}: {error}")

    def _end(self, reading: Reading) -> None:
        """All transfers of a request have ended."""
        load, remote = reading.load, reading.remote
        assert remote is not None
        try:
            reading.transfers.wait(0)
            # What was read is this request's only if its blocks were held until now.
            reply = ask(
                load.host, load.port, "held", self._settings.timeout,
                instance=remote.instance, request=load.remote_request,
            )  # fmt: skip
            if reply.get("held") is not True:
                raise ChannelError("the prefill side has freed its blocks before they were read (kv_lease_duration)")
            reading.arrive()
        except Exception as error:
            self._forget(load)
            reading.fail(f"{type(error).__name__}: {error}")

    def _look(self, reading: Reading) -> None:
        """A transfer has failed, and is not settled. Nothing more comes from a prefill process that has ended."""
        engine, remote = self._engine, reading.remote
        if engine is not None and remote is not None and reading.peer_has_gone():
            for session in remote.sessions:
                engine.peer_ended(session)

    def _remote(self, load: Load) -> Remote:
        """The prefill engine of a request. Hands are shaken once, by the first that asks; the others wait for it."""
        key = (load.engine, load.host, load.port)
        with self._lock:
            future = self._remotes.get(key)
            first = future is None
            if future is None:
                future = self._remotes[key] = concurrent.futures.Future()
                while len(self._remotes) > _MOST_REMOTES:
                    del self._remotes[next(iter(self._remotes))]
        if first:
            assert self._mine is not None
            try:
                timeout = self._settings.timeout
                future.set_result(shake_hands(self._mine, self._settings.engine, *key, timeout))
                logger.info("KvplanConnector: shook hands with engine %s at %s:%d", *key)
            except Exception as error:
                future.set_exception(error)
        return future.result()

    def _forget(self, load: Load) -> None:
        """Shake hands anew with the next request: the prefill engine may be another one by then."""
        with self._lock:
            future = self._remotes.get((load.engine, load.host, load.port))
            if future is not None and future.done():
                del self._remotes[load.engine, load.host, load.port]
