"""What vLLM's `kv_connector_module_path` names: KvplanConnector. See docs/vllm.md."""

from .integrations.vllm.connector import KvplanConnector

__all__ = ["KvplanConnector"]
