"""The half of the connector in vLLM's scheduler process: which requests are read, and which blocks are held."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from .channel import Server, Teller
from .leases import Leases
from .metadata import Handshake, Load, Metadata
from .settings import Settings

logger = logging.getLogger("vllm.kvplan")

#: What a request to decode must say of the prefill side, with the types that it must have.
_NEEDED = {"remote_engine_id": str, "remote_request_id": str, "remote_host": str, "remote_port": int}

_Side = tuple[str, int, str]  # host, port, engine


class Scheduler:
    """The scheduler half.

    A request goes by vLLM's `kv_transfer_params`, as with NixlConnector: `do_remote_decode` on the prefill side, whose
    answer carries `do_remote_prefill` and where the blocks are; that answer goes to the decode side.

    Args:
        vllm_config: vLLM's.
        settings: of the connector.
        windows: whether some layers have a sliding window: see `_leave_last_token`.
    """

    def __init__(self, vllm_config: Any, settings: Settings, windows: bool = False) -> None:
        self._settings = settings
        self._windows = windows
        self._parallel = vllm_config.parallel_config
        self._engine: str = vllm_config.kv_transfer_config.engine_id
        # Prefill side.
        self._leases = Leases(settings.lease)
        self._server: Server | None = None
        # Decode side.
        self._local: dict[str, int] = {}  # tokens that are here already, of requests that are about to be read
        self._new: list[Load] = []
        self._wanted: dict[str, tuple[_Side, str]] = {}  # by request, until its blocks have been read
        self._teller = Teller()
        self._renewed = 0.0

    # ---- prefill side

    def set_handshake(self, workers: dict[tuple[int, int], Handshake]) -> None:
        """All workers have registered their caches: decode engines may ask from now on."""
        ranks = [workers[rank].payload for rank in sorted(workers)]
        self._server = Server(self._settings.host, self._settings.port, self._engine, ranks, self._leases)
        logger.info(
            "KvplanConnector listens on %s:%d; blocks are held for %g s",
            self._settings.host, self._settings.port, self._settings.lease,
        )  # fmt: skip

    def request_finished(self, request: Any, blocks: Sequence[list[int]]) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks of a finished request are held, and what its answer tells the decode side."""
        from vllm.v1.request import RequestStatus

        params = request.kv_transfer_params
        self._local.pop(request.request_id, None)
        if not params:
            return False, None
        if params.get("do_remote_prefill"):  # it ended before it was scheduled: nobody reads its blocks
            params["do_remote_prefill"] = False
            self._tell_done([request.request_id])
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        finished = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)
        if request.status not in finished or not any(blocks):
            return False, None
        self._leases.hold(request.request_id)
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(group) for group in blocks],
            "remote_engine_id": self._engine,
            "remote_request_id": request.request_id,
            "remote_host": self._settings.host,
            "remote_port": self._settings.port,
            "remote_num_tokens": request.num_computed_tokens,
            "tp_size": self._parallel.tensor_parallel_size,
        }

    # ---- decode side

    def on_new_request(self, request: Any) -> None:
        """Renew the lease of a request that waits here, until it has been read."""
        params = request.kv_transfer_params
        if params and params.get("do_remote_decode") and self._windows:
            _leave_last_token(request)
        if not params or not params.get("do_remote_prefill"):
            return
        problem = _problem(params)
        if problem is not None:
            logger.error("KvplanConnector: request %s computes its prompt here: %s", request.request_id, problem)
            params["do_remote_prefill"] = False
            return
        side = (params["remote_host"], params["remote_port"], params["remote_engine_id"])
        self._wanted[request.request_id] = side, params["remote_request_id"]

    def matched_tokens(self, request: Any, here: int) -> tuple[int, bool]:
        """How many tokens behind the first `here` the prefill side has, and whether they come in the background."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        there = params.get("remote_num_tokens")
        count = min(request.num_prompt_tokens, request.num_prompt_tokens if there is None else there) - here
        if count <= 0:
            return 0, False
        self._local[request.request_id] = here
        return count, True

    def allocated(self, request: Any, blocks: Any, count: int) -> None:
        """Blocks have been allocated for the `count` tokens that come from the prefill side."""
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False  # one read a request
        start = self._local.pop(request.request_id, 0)
        if count == 0:  # all of it is here already
            self._tell_done([request.request_id])
            return
        theirs, ours = params["remote_block_ids"], blocks.get_block_ids()
        self._new.append(
            Load(
                request=request.request_id,
                remote_request=params["remote_request_id"],
                engine=params["remote_engine_id"],
                host=params["remote_host"],
                port=params["remote_port"],
                remote_blocks=[list(group) for group in theirs],
                blocks=[list(group) for group in ours],
                start=start,
                stop=start + count,
            )
        )

    def workers_finished(self, requests: Iterable[str]) -> None:
        """All workers have read these requests, or will not."""
        self._tell_done(requests)

    # ---- both

    def step(self) -> Metadata:
        """What the workers are to do now."""
        done, expired = self._leases.released()
        for request in sorted(expired):
            logger.warning(
                "KvplanConnector: nobody has asked for the blocks of request %s for %g s; they are freed",
                request, self._settings.lease,
            )  # fmt: skip
        self._renew()
        loads, self._new = self._new, []
        return Metadata(loads, done | expired)

    def close(self) -> None:
        """Stop listening."""
        if self._server is not None:
            self._server.close()
        self._teller.close()

    def _renew(self) -> None:
        now = time.monotonic()
        if not self._wanted or now < self._renewed + self._settings.lease / 6:
            return
        self._renewed = now
        self._tell("renew", self._wanted.values())

    def _tell_done(self, requests: Iterable[str]) -> None:
        self._tell("done", [self._wanted.pop(request) for request in requests if request in self._wanted])

    def _tell(self, what: str, requests: Iterable[tuple[_Side, str]]) -> None:
        by_side: defaultdict[_Side, list[str]] = defaultdict(list)
        for side, request in requests:
            by_side[side].append(request)
        for (host, port, engine), ids in by_side.items():
            self._teller.tell(host, port, what, engine, ids)


def _leave_last_token(request: Any) -> None:
    """Have the prefill side stop before the last token of the prompt. The decode side computes that one anyway.

    The window of the last token begins one token before that of the next. Where a block ends between the two, the
    prefill side would have freed a block that the decode side needs.
    """
    if request.num_prompt_tokens < 2:
        return
    if request.prompt_token_ids is not None:
        del request.prompt_token_ids[-1:]
    else:
        request.prompt_embeds = request.prompt_embeds[:-1]
    del request._all_token_ids[-1:]
    request.num_prompt_tokens -= 1
    request.max_tokens = 1


def _problem(params: dict[str, Any]) -> str | None:
    """What is wrong with the `kv_transfer_params` of a request to decode, if anything."""
    for field, kind in _NEEDED.items():
        value = params.get(field)
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"kv_transfer_params[{field!r}] is {value!r:.80}, not a{'n int' if kind is int else ' str'}"
    there = params.get("remote_num_tokens")
    if there is not None and (not isinstance(there, int) or isinstance(there, bool) or there < 0):
        return f"kv_transfer_params['remote_num_tokens'] is {there!r:.80}, not a number of tokens"
    blocks = params.get("remote_block_ids")
    if not isinstance(blocks, (list, tuple)) or not all(isinstance(group, (list, tuple)) for group in blocks):
        return "kv_transfer_params['remote_block_ids'] is no list of block tables"
    if not blocks or not all(isinstance(block, int) and 0 <= block < 1 << 62 for group in blocks for block in group):
        return "kv_transfer_params['remote_block_ids'] holds something else than block ids"
    return None
