"""Where kvplan meets vLLM: the plugin that names the connector, and the releases that it was tried with."""

from __future__ import annotations

#: Releases of vLLM that real engines were run with.
TRIED = ("0.32",)


def load() -> None:
    """Make the name "KvplanConnector" known to vLLM, which calls this in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvplanConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvplanConnector", "kvplan.vllm", "KvplanConnector")


def check_version(version: str) -> None:
    """Refuse a release of vLLM that was not tried: ValueError, with its `version`."""
    if ".".join(version.split("+")[0].split(".")[:2]) not in TRIED:
        raise ValueError(f"KvplanConnector was tried with vLLM {', '.join(TRIED)}, and this is vLLM {version}")
