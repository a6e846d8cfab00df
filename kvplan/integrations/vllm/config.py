"""What vLLM's configuration says of its caches, in the words of `words.py`; and what is not served, refused by name."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from .words import Group, Layer

logger = logging.getLogger("vllm.kvplan")

#: Back ends that keep the bytes of a token and head side by side, as vLLM's view of the cache says.
ROWS = frozenset({
    "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION",
    "TRITON_MLA", "FLASHMLA", "FLASH_ATTN_MLA", "CUTLASS_MLA", "FLASHINFER_MLA",
})  # fmt: skip


def check(vllm_config: Any, kv_cache_config: Any) -> None:
    """Refuse what is not served.

    Raises:
        ValueError: says what, and the value.
    """
    parallel = vllm_config.parallel_config
    for field, what in (
        ("decode_context_parallel_size", "decode context parallelism"),
        ("prefill_context_parallel_size", "prefill context parallelism"),
    ):
        size = getattr(parallel, field, 1)
        if size > 1:
            raise ValueError(f"KvplanConnector does not serve {what} yet ({field} is {size})")
    if getattr(vllm_config, "speculative_config", None) is not None:
        raise ValueError("KvplanConnector does not serve speculative decoding yet (speculative_config is set)")
    for group in kv_cache_config.kv_cache_groups:
        for name, spec in _specs(group):
            _check_spec(name, spec)
        if not getattr(group, "enable_kv_transfer", True) or getattr(group, "host_resident", False):
            raise ValueError(f"KvplanConnector does not serve HiSparse groups yet (layer {group.layer_names[0]})")


def _check_spec(name: str, spec: Any) -> None:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec

    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        raise ValueError(f"KvplanConnector does not serve layer {name} yet: its cache is a {type(spec).__name__}")
    if spec.tokens_per_state != 1:
        raise ValueError(f"KvplanConnector does not serve layer {name} yet: {spec.tokens_per_state} tokens share a row")
    if spec.num_head_slots not in (None, spec.num_kv_heads):
        raise ValueError(
            f"KvplanConnector does not serve layer {name} yet: {spec.num_kv_heads} heads in {spec.num_head_slots} slots"
        )


def has_windows(kv_cache_config: Any) -> bool:
    """Whether blocks of some layers are freed when they are out of a sliding window."""
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    specs = (spec for group in kv_cache_config.kv_cache_groups for _, spec in _specs(group))
    return any(isinstance(spec, SlidingWindowSpec) for spec in specs)


def groups(vllm_config: Any, kv_cache_config: Any, caches: Collection[str]) -> list[Group]:
    """The KV cache groups, as `words.describe` takes them.

    Args:
        vllm_config, kv_cache_config: vLLM's.
        caches: names of the layers that have a cache on this rank.

    Raises:
        ValueError: as `check`.
    """
    check(vllm_config, kv_cache_config)
    found = []
    for group in kv_cache_config.kv_cache_groups:
        layers = tuple(_layer(vllm_config, name, spec) for name, spec in _specs(group) if name in caches)
        found.append(Group(group.kv_cache_spec.block_size, layers))
    return found


def _specs(group: Any) -> list[tuple[str, Any]]:
    """(layer, spec) of each layer of a group."""
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", None)
    return [(name, specs[name] if specs is not None else group.kv_cache_spec) for name in group.layer_names]


def _layer(vllm_config: Any, name: str, spec: Any) -> Layer:
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    mla = isinstance(spec, MLAAttentionSpec)
    total = 1 if mla else vllm_config.model_config.get_total_num_kv_heads()
    backend = _backend(vllm_config, name)
    quantized = spec.kv_quant_mode.name
    # The names of types mean what the view says; of fp8 the view may be of plain bytes.
    words = [str(spec.dtype).removeprefix("torch.")]
    if quantized != "NONE" or str(vllm_config.cache_config.cache_dtype).startswith("fp8"):
        words += [quantized.lower(), str(vllm_config.cache_config.cache_dtype)]
    words.append(f"latent of {spec.head_size}" if mla else f"K of {spec.head_size}, V of {spec.head_size_v}")
    rows = backend in ROWS and quantized in ("NONE", "FP8_PER_TENSOR")
    return Layer(name, spec.num_kv_heads, total, " ".join(words), rows, backend)


def _backend(vllm_config: Any, name: str) -> str:
    """Name of the attention back end of a layer."""
    layer = vllm_config.compilation_config.static_forward_context.get(name)
    try:
        return str(layer.get_attn_backend().get_name())
    except AttributeError:
        raise ValueError(f"layer {name} does not say which attention back end it uses") from None
