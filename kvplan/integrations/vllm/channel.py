"""The side channel: decode engines ask the prefill engine's scheduler process where its caches are, and tell it when
they have read. JSON over ZMQ, one message and at most one answer.

| message | answer |
|---|---|
| `{"kvplan": 1, "what": "handshake", "engine": id}` | `{"instance": ..., "ranks": [payload, ...]}` |
| `{"kvplan": 1, "what": "held", "instance": ..., "request": id}` | `{"held": true or false}` |
| `{"kvplan": 1, "what": "renew", "engine": id, "requests": [id, ...]}` | none |
| `{"kvplan": 1, "what": "done", "engine": id, "requests": [id, ...]}` | none |

A message that is none of these is answered with `{"error": why}`. `instance` is drawn anew at every start, so that a
decode engine notices when the prefill engine is not the one that it shook hands with.
"""

from __future__ import annotations

import json
import logging
import secrets
import socket
import threading
from collections.abc import Collection, Sequence
from typing import Any

import zmq

from ...errors import shown
from .leases import Leases

logger = logging.getLogger("vllm.kvplan")

VERSION = 1
_MOST_BYTES = 1 << 28  # of a message; a handshake of 65,536 regions is less
_LOOK_MS = 200  # between two looks whether to stop


class ChannelError(RuntimeError):
    """The other side did not answer, or refused."""


def address(host: str, port: int) -> str:
    """ZMQ's name for a TCP port."""
    return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


class Server:
    """Answers decode engines, in a thread of the prefill engine's scheduler process.

    Args:
        host, port: where to listen.
        engine: vLLM's engine id.
        ranks: what each worker tells: see `handshake`.
        leases: of the requests that are held.

    Raises:
        RuntimeError: the port is taken.
    """

    def __init__(self, host: str, port: int, engine: str, ranks: Sequence[dict[str, Any]], leases: Leases) -> None:
        self.instance = secrets.token_hex(8)
        self._engine, self._ranks, self._leases = engine, list(ranks), leases
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
        if ":" in host:
            self._socket.setsockopt(zmq.IPV6, 1)
        try:
            self._socket.bind(address(host, port))
        except zmq.ZMQError as error:
            self._context.destroy(0)
            raise RuntimeError(
                f"KvplanConnector cannot listen on {address(host, port)}: {error}. Set side_channel_port in "
                f"kv_connector_extra_config, or VLLM_NIXL_SIDE_CHANNEL_PORT, to a free port"
            ) from error
        self._thread = threading.Thread(target=self._serve, name="kvplan-side-channel", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        self._thread.join(5)

    def _serve(self) -> None:
        while not self._stop.is_set():
            if self._socket.poll(_LOOK_MS):
                frames = self._socket.recv_multipart()
                reply = self._answer(frames[-1])
                if reply is not None and len(frames) == 3:
                    self._socket.send_multipart([*frames[:2], json.dumps(reply).encode()])
        self._context.destroy(0)

    def _answer(self, data: bytes) -> dict[str, Any] | None:
        try:
            message = _message(data)
            what = message.get("what")
            if message.get("kvplan") != VERSION:
                raise ValueError(f"version {shown(message.get('kvplan'))} is not {VERSION}: install the same kvplan")
            if what == "held":
                mine = message.get("instance") == self.instance
                return {"held": mine and self._leases.held(_text(message, "request"))}
            if message.get("engine") != self._engine:
                raise ValueError(f"this is engine {self._engine}, not {shown(message.get('engine'))}")
            if what == "handshake":
                return {"instance": self.instance, "ranks": self._ranks}
            if what == "renew":
                self._leases.renew(_texts(message, "requests"))
            elif what == "done":
                self._leases.done(_texts(message, "requests"))
            else:
                raise ValueError(f"what is {shown(what)}")
            return None
        except ValueError as error:
            logger.warning("KvplanConnector: a message to the side channel is refused: %s", error)
            return {"error": str(error)}


class Teller:
    """Sends messages that need no answer, without waiting. For one thread: the scheduler's."""

    def __init__(self) -> None:
        self._context: zmq.Context[Any] | None = None
        self._sockets: dict[str, Any] = {}

    def tell(self, host: str, port: int, what: str, engine: str, requests: Collection[str]) -> None:
        """Queue `what` ("renew" or "done") for a prefill engine. If it cannot be reached, nothing is raised: then the
        leases there end by themselves."""
        if self._context is None:
            self._context = zmq.Context()
        where = address(host, port)
        if where not in self._sockets:
            self._sockets[where] = _connect(self._context, zmq.DEALER, host, where)
        message = {"kvplan": VERSION, "what": what, "engine": engine, "requests": sorted(requests)}
        try:
            while self._sockets[where].poll(0, zmq.POLLIN):
                self._sockets[where].recv_multipart()  # only refusals are answered
            self._sockets[where].send_multipart([b"", json.dumps(message).encode()], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            logger.warning("KvplanConnector: %s did not take %r: %s", where, what, error)

    def close(self) -> None:
        """Send what is queued, for a second at most."""
        if self._context is not None:
            self._context.destroy(1000)
            self._context = None


def ask(host: str, port: int, what: str, timeout: float, **fields: Any) -> dict[str, Any]:
    """Send a message and wait for its answer.

    Raises:
        ChannelError: no answer within `timeout` seconds; or the other side refused, with its reason.
    """
    where = address(host, port)
    with zmq.Context() as context:
        sock = _connect(context, zmq.REQ, host, where)
        try:
            sock.send(json.dumps({"kvplan": VERSION, "what": what} | fields).encode())
            if not sock.poll(round(timeout * 1000)):
                raise ChannelError(f"{where} did not answer within {timeout:g} s")
            reply = _message(sock.recv())
        except (zmq.ZMQError, ValueError) as error:
            raise ChannelError(f"{where}: {error}") from error
        finally:
            sock.close(0)
    if "error" in reply:
        raise ChannelError(f"{where} refused: {shown(reply['error'])}")
    return reply


def refuses(host: str, port: int) -> bool:
    """Whether nobody listens at that port: its machine answers, and the process that listened has ended."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False  # the machine may only be out of reach
    return False


def _connect(context: zmq.Context[Any], kind: int, host: str, where: str) -> Any:
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.MAXMSGSIZE, _MOST_BYTES)
    if ":" in host:
        sock.setsockopt(zmq.IPV6, 1)
    sock.connect(where)
    return sock


def _message(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError("not JSON") from None
    if not isinstance(message, dict):
        raise ValueError(f"not a mapping, but {shown(message)}")
    return message


def _text(message: dict[str, Any], field: str) -> str:
    value = message.get(field)
    if not isinstance(value, str):
        raise ValueError(f"{field} must be a string, not {shown(value)}")
    return value


def _texts(message: dict[str, Any], field: str) -> list[str]:
    values = message.get(field)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise ValueError(f"{field} must be a list of strings, not {shown(values)}")
    return values
