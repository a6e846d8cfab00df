"""What the examples share: a decode process, and a pipe to it for what a serving stack says by its own channel."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

# Over loopback, whatever devices there are. A real deployment leaves these out.
os.environ.update(UCX_TLS="tcp", UCX_NET_DEVICES="lo", UCX_MODULES="^ib")
os.environ.setdefault("MC_TRANSFER_TIMEOUT", "5")  # seconds until Mooncake gives up a peer that hangs


@contextlib.contextmanager
def started(decode: Callable[..., None], *arguments: object) -> Iterator[Connection]:
    """Run `decode(pipe, *arguments)` in a process of its own; it must end well. Yields this side's end of the pipe."""
    context = multiprocessing.get_context("spawn")
    mine, its = context.Pipe()
    process = context.Process(target=decode, args=(its, *arguments), daemon=True)
    process.start()
    its.close()
    try:
        yield mine
        process.join(60)
        if process.exitcode != 0:
            raise SystemExit(f"the decode process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()
        mine.close()
