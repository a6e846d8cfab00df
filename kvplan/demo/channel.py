"""What both processes of the demo run on: a message channel, and a child that never outlives its parent."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import torch

MAX_MESSAGE = 64 << 20  # bytes; a page table of 4,096 pages is about 25 KB


class Channel:
    """JSON objects over a connected stream socket, each preceded by its length (4 bytes, big endian)."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    def send(self, kind: str, **fields: Any) -> None:
        """Send one message. Raises OSError when the other end is gone, ValueError when the message is too long."""
        body = json.dumps({"kind": kind, **fields}).encode()
        if len(body) > MAX_MESSAGE:
            raise ValueError(f"message {kind!r} has {len(body)} bytes, more than {MAX_MESSAGE}")
        self.sock.sendall(len(body).to_bytes(4, "big") + body)

    def receive(self, timeout: float | None = None) -> dict[str, Any]:
        """Wait for one message. Raises EOFError when the other end is gone, TimeoutError after `timeout` seconds
        without a byte, ValueError when the message is too long or malformed."""
        self.sock.settimeout(timeout)
        length = int.from_bytes(self._exactly(4), "big")
        if length > MAX_MESSAGE:  # before anything is allocated for it
            raise ValueError(f"a message announces {length} bytes, more than {MAX_MESSAGE}")
        message = json.loads(self._exactly(length))
        if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
            raise ValueError("a message is not an object with a kind")
        return message

    def expect(self, kind: str, timeout: float | None = None) -> dict[str, Any]:
        """As `receive`, and ValueError when the message is of another kind."""
        message = self.receive(timeout)
        if message["kind"] != kind:
            raise ValueError(f"expected message {kind!r}, got {message['kind']!r}")
        return message

    def _exactly(self, count: int) -> bytes:
        parts = bytearray()
        while len(parts) < count:
            part = self.sock.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError("the other process closed the channel")
            parts += part
        return bytes(parts)


Serve = Callable[[dict[str, Any], Channel, Channel], None]
REPORTED = 4  # exit code of a child that has told the parent what failed


def run_child(*serves: Serve) -> None:
    """Main of a child process: call each `serve(config, parent, peer)`, with its two channels from argv and the
    configuration from the parent. Several run in threads. An error is sent to the parent and ends the process; nor does
    it outlive the parent."""
    # Both children and the engine's own threads share the cores. Where these are busy, a second thread that must be
    # waited for makes passes over memory ten times slower than one thread is.
    torch.set_num_threads(1)
    fds = iter(map(int, sys.argv[1:]))
    threads = [
        threading.Thread(target=_run, args=(serve, *(Channel(socket.socket(fileno=next(fds))) for _ in range(2))))
        for serve in serves
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _run(serve: Serve, parent: Channel, peer: Channel) -> None:
    try:
        config = parent.expect("config", timeout=60)
        parent.sock.settimeout(None)  # from here on this thread only sends on it, the other only receives
        threading.Thread(target=_leave_with_parent, args=(parent.sock,), daemon=True).start()
        serve(config, parent, peer)
    except Exception as error:  # whatever it is, the parent shall show it
        traceback.print_exc()
        # That the peer is gone is a consequence: the peer's own error is the one worth showing.
        consequence = isinstance(error, (EOFError, ConnectionError))
        with contextlib.suppress(OSError):
            parent.send("error", text=f"{type(error).__name__}: {error}", consequence=consequence)
        sys.stderr.flush()
        os._exit(REPORTED)  # now: a thread that is stuck in an engine would hold up an orderly exit for ever


def _leave_with_parent(lifeline: socket.socket) -> None:
    try:
        lifeline.recv(1)  # the parent sends nothing after the configuration: this returns when it is gone
    finally:
        os._exit(3)


def heads_of(config: dict[str, Any], side: str) -> Any:
    """The heads that the rank of "prefill" or "decode" holds; None without --tp."""
    from .. import Heads

    return None if config["tp"] is None else Heads(*config["tp"][side])


def make_engine(name: str) -> Any:
    """The engine called `name` ("mooncake", "nixl" or "local"); over loopback, where it uses a network."""
    from .. import engines  # here, so that what needs no engine runs without one

    if name == "mooncake":
        return engines.MooncakeEngine("127.0.0.1", protocol="tcp")
    if name == "nixl":
        tls = "tcp,cuda_copy" if torch.cuda.is_available() else "tcp"
        return engines.NixlEngine(ucx={"UCX_TLS": tls, "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"})
    return engines.LocalEngine()
