"""KvplanConnector: vLLM's interface, on the two halves in `scheduler.py` and `worker.py`."""

from __future__ import annotations

from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)

from . import config
from .metadata import Handshake, Metadata
from .scheduler import Scheduler
from .seam import check_version
from .settings import Settings
from .worker import Worker


class KvplanConnector(KVConnectorBase_V1, SupportsHMA):
    """Moves KV caches from prefill to decode engines; kvplan plans, and NIXL or Mooncake carry it out.

    The decode side reads ("pull"). See docs/vllm.md.

    Raises:
        ValueError: the configuration, or this release of vLLM, is not served; or a setting is wrong.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        check_version(vllm.__version__)
        config.check(vllm_config, kv_cache_config)
        settings = Settings.of(vllm_config)
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._scheduler: Scheduler | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = Scheduler(vllm_config, settings, config.has_windows(kv_cache_config))
        else:
            self._worker = Worker(vllm_config, kv_cache_config, settings)

    # ---- in the scheduler's process

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        workers = {rank: each for rank, each in metadata.items() if isinstance(each, Handshake)}
        self._half().set_handshake(workers)

    def on_new_request(self, request: Any) -> None:
        self._half().on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._half().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._half().allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return self._half().step()

    def update_connector_output(self, connector_output: Any) -> None:
        self._half().workers_finished(connector_output.finished_recving or ())

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._half().request_finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._half().request_finished(request, block_ids)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    def _half(self) -> Scheduler:
        assert self._scheduler is not None, "this is the worker half"
        return self._scheduler

    # ---- in the workers' processes

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._other_half().register(kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._other_half().handshake()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        self._other_half().start(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, read, failed = self._other_half().results(finished_req_ids)
        return KVConnectorTransferResults(finished_sending=sent, finished_recving=read, failed_recving=failed)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when all of it is here."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: the decode side reads from the blocks themselves."""

    def wait_for_save(self) -> None:
        """Nothing: blocks are held until they have been read."""

    def _other_half(self) -> Worker:
        assert self._worker is not None, "this is the scheduler half"
        return self._worker

    # ---- in both

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()
