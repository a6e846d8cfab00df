"""A queue for each peer, and worker threads that are started as calls need them.

A peer has at most two calls of the engine at once, each in a thread of its own. There is no limit over all peers: a
peer that hangs holds its own two threads, and no other peer waits for them. Threads are daemons; an idle one is used
again, and ends when nobody has needed it for a while.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from .pieces import Chunk
    from .transfer import Transfer

_log = logging.getLogger("kvplan.engines")

CALLS_PER_PEER = 2
_IDLE_S = 10.0  # after which a thread that nobody needs ends
_EXIT_S = 5.0  # at the end of the process: how long calls at work are waited for

Job: TypeAlias = "tuple[Transfer, Chunk]"
Lock: TypeAlias = "threading.RLock"


class Lane:
    """What is queued for and under way to one peer."""

    def __init__(self, key: str, lock: Lock) -> None:
        self.key = key
        self.queue: collections.deque[Transfer] = collections.deque()
        self.calls = 0  # at work
        self.in_flight = 0  # descriptors
        # (time, n): n more descriptors count as in flight until then.
        self.held: collections.deque[tuple[float, int]] = collections.deque()
        self.workers = 0
        self.changed = threading.Condition(lock)

    @property
    def empty(self) -> bool:
        return not (self.queue or self.calls or self.in_flight or self.workers)


class _Worker:
    """One thread, and what it is to do next."""

    def __init__(self) -> None:
        self.inbox: queue.SimpleQueue[tuple[Lane, Job | None] | None] = queue.SimpleQueue()


class Lanes:
    """The lanes of one engine.

    Args:
        lock: the engine's; methods are called with it held.
        carry: does one call, without the lock; returns for how many more seconds its descriptors count as in flight.
        limit: the most descriptors in flight for one peer, or None.
        name: of the threads.
    """

    def __init__(
        self,
        lock: Lock,
        carry: Callable[[Transfer, Chunk], float],
        limit: Callable[[], int | None],
        name: str,
    ) -> None:
        self._lock, self._carry, self._limit, self._name = lock, carry, limit, name
        self._idle: list[_Worker] = []
        self._changed = threading.Condition(lock)  # calls have ended
        self.calls = 0  # at work, for all peers
        self._many = 16  # lanes at which those that are empty by now are dropped
        self.halted = False  # starts nothing any more
        self._process = os.getpid()
        self.by_key: dict[str, Lane] = {}
        _live.add(self)

    def check_process(self) -> None:
        """RuntimeError in a child after fork: the engine, and its threads, are the parent's."""
        if os.getpid() != self._process:
            raise RuntimeError("this engine was made in another process; make one after fork")

    def put(self, key: str, transfer: Transfer, first: bool = False) -> None:
        """Queue a transfer, and start it where there is room.

        Raises:
            RuntimeError: no thread can be started for it; it is not queued.
        """
        lane = self.by_key.get(key)
        if lane is None:
            self._sweep()
            lane = self.by_key[key] = Lane(key, self._lock)
        (lane.queue.appendleft if first else lane.queue.append)(transfer)
        try:
            self._staff(lane)
        except BaseException as error:  # an interrupt too: what raises has no effect
            no_thread = isinstance(error, RuntimeError)
            if lane.workers and no_thread:
                return  # the thread that serves this peer will come to it
            with contextlib.suppress(ValueError):
                lane.queue.remove(transfer)
            self._drop(lane)
            if no_thread:
                raise RuntimeError(f"no thread can be started, so nothing is submitted: {error}") from error
            raise

    def resume(self, key: str, transfer: Transfer) -> None:
        """Queue a transfer again that had to wait for something else. RuntimeError as `put`."""
        lane = self.by_key.get(key)
        if not self.halted and (lane is None or transfer not in lane.queue):
            self.put(key, transfer)

    def remove(self, key: str, transfer: Transfer) -> None:
        """Take a transfer out of its queue, if it is there."""
        lane = self.by_key.get(key)
        if lane is not None and transfer in lane.queue:
            lane.queue.remove(transfer)
            lane.changed.notify_all()
            self._drop(lane)
        self._changed.notify_all()

    def wait(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until something is so that depends on calls and queues, for at most so many seconds: whether it is."""
        return self._changed.wait_for(condition, timeout)

    def stop(self) -> None:
        """End the threads that are idle, and the others as they become so."""
        self.halted = True
        for worker in self._idle:
            worker.inbox.put(None)
        self._idle.clear()
        for lane in self.by_key.values():
            lane.changed.notify_all()

    # ---- threads

    def _staff(self, lane: Lane) -> None:
        """Have the lane served by as many threads as can do something for it."""
        while lane.queue and lane.workers < CALLS_PER_PEER and (not lane.workers or self._startable(lane)):
            worker = self._hire()
            lane.workers += 1
            worker.inbox.put((lane, self._take(lane)))

    def _hire(self) -> _Worker:
        if self._idle:
            return self._idle.pop()
        worker = _Worker()
        threading.Thread(target=self._work, args=(worker,), name=self._name, daemon=True).start()
        return worker

    def _work(self, worker: _Worker) -> None:
        while True:
            try:
                given = worker.inbox.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if worker in self._idle:
                        self._idle.remove(worker)
                        return
                continue  # it has just been hired
            if given is None:
                return
            self._serve(*given)
            del given
            with self._lock:
                if self.halted:
                    return
                self._idle.append(worker)

    def _serve(self, lane: Lane, job: Job | None) -> None:
        """Carry chunks of one lane until there is none left for this thread."""
        while True:
            hold = 0.0
            try:
                if job is not None:
                    hold = self._carry(*job)
            except BaseException:  # whatever it is: the account of this lane must be kept
                _log.exception("a call for %s ended with an error of kvplan's own", lane.key)
            with self._lock:
                if job is not None:
                    self._ended(lane, *job, hold)
                job = self._next(lane)
                if job is None:
                    lane.workers -= 1
                    self._drop(lane)
                    return

    def _ended(self, lane: Lane, transfer: Transfer, chunk: Chunk, hold: float) -> None:
        lane.calls -= 1
        self.calls -= 1
        if hold:
            lane.held.append((time.monotonic() + hold, len(chunk)))
        else:
            lane.in_flight -= len(chunk)
        self._requeue(lane, transfer)
        self._changed.notify_all()

    def _requeue(self, lane: Lane, transfer: Transfer) -> None:
        """Queue it in turn with the others to this peer, where it has something that may be carried now."""
        if transfer._may_take() and transfer not in lane.queue:
            lane.queue.append(transfer)

    def _next(self, lane: Lane) -> Job | None:
        """What this thread does next for the lane; waits where that depends on time alone."""
        while lane.queue and not self.halted:
            job = self._take(lane)
            if job is not None:
                with contextlib.suppress(RuntimeError):
                    self._staff(lane)
                return job
            if lane.workers > 1 or not lane.held:
                return None  # another thread is at work for this peer, and goes on
            lane.changed.wait(max(0.0, lane.held[0][0] - time.monotonic()))
        return None

    # ---- turns

    def _startable(self, lane: Lane) -> bool:
        while lane.held and lane.held[0][0] <= time.monotonic():
            lane.in_flight -= lane.held.popleft()[1]
        if self.halted or not lane.queue or lane.calls >= CALLS_PER_PEER:
            return False
        coming, limit = lane.queue[0]._next, self._limit()
        return coming is None or limit is None or lane.in_flight + len(coming) <= limit

    def _take(self, lane: Lane) -> Job | None:
        """The next chunk to be carried, now counted as under way."""
        while self._startable(lane):
            transfer = lane.queue.popleft()
            chunk = transfer._take()
            if chunk is not None:
                lane.calls += 1
                self.calls += 1
                lane.in_flight += len(chunk)
                self._requeue(lane, transfer)  # of two pieces, one is copied here while the engine moves the other
                return transfer, chunk
        return None

    def _drop(self, lane: Lane) -> None:
        if lane.empty and self.by_key.get(lane.key) is lane:
            del self.by_key[lane.key]

    def _sweep(self) -> None:
        """Forget lanes that only waited for time to pass."""
        if len(self.by_key) >= self._many:
            for lane in list(self.by_key.values()):
                self._startable(lane)
                self._drop(lane)
            self._many = max(16, 2 * len(self.by_key))

    def halt(self, seconds: float) -> None:
        """The process ends: start nothing any more, and let calls at work end, for at most so many seconds."""
        if os.getpid() != self._process:
            return  # a child after fork: no thread of these is here, and the lock may have been held
        with self._lock:
            self.stop()
            self.wait(lambda: not self.calls, seconds)


_live: weakref.WeakSet[Lanes] = weakref.WeakSet()


@atexit.register
def _leave() -> None:
    ends = time.monotonic() + _EXIT_S
    for lanes in list(_live):
        lanes.halt(max(0.0, ends - time.monotonic()))
