"""What the two halves of the connector tell each other, and what vLLM carries from worker to scheduler process."""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorMetadata


@dataclasses.dataclass
class Handshake(KVConnectorHandshakeMetadata):
    """What a worker tells decode engines: a JSON-able mapping, see `Worker.handshake`."""

    payload: dict[str, Any]


@dataclasses.dataclass
class Load:
    """One request whose blocks are to be read.

    Attributes:
        request: vLLM's request id on this side.
        remote_request: its id on the prefill side.
        engine, host, port: the prefill engine, and its side channel.
        remote_blocks, blocks: for each KV cache group the block ids, from the request's first token on.
        start, stop: the tokens to read are start to stop - 1.
    """

    request: str
    remote_request: str
    engine: str
    host: str
    port: int
    remote_blocks: list[list[int]]
    blocks: list[list[int]]
    start: int
    stop: int


@dataclasses.dataclass
class Metadata(KVConnectorMetadata):
    """What the scheduler half tells the workers at a step.

    Attributes:
        loads: requests to read now.
        release: requests of this side whose blocks need not be held any longer.
    """

    loads: list[Load] = dataclasses.field(default_factory=list)
    release: set[str] = dataclasses.field(default_factory=set)
