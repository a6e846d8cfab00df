"""What vLLM's own configuration objects say, in the words of the pure function; and what is not served, by name."""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvplan.integrations.vllm import config, load
from kvplan.integrations.vllm.words import Group, Layer

FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.bfloat16, sliding_window=64)
LATENT = MLAAttentionSpec(block_size=64, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)
MAMBA = MambaSpec(block_size=16, shapes=((2, 3),), dtypes=(torch.float32,))


def configs(*specs: Any, backend: str = "FLASH_ATTN", **parallel: int) -> tuple[Any, KVCacheConfig]:
    """A vLLM configuration of one layer a group, and its caches."""
    names = [f"model.layers.{number}.self_attn.attn" for number in range(len(specs))]
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: backend))
    whole = SimpleNamespace(
        parallel_config=SimpleNamespace(**parallel),
        speculative_config=None,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 8),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(static_forward_context=dict.fromkeys(names, layer)),
    )
    groups = [KVCacheGroupSpec([name], spec) for name, spec in zip(names, specs, strict=True)]
    return whole, KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=groups)


def layers(*specs: Any, **given: Any) -> list[Group]:
    whole, caches = configs(*specs, **given)
    return config.groups(whole, caches, [name for group in caches.kv_cache_groups for name in group.layer_names])


def test_words() -> None:
    name = "model.layers.{}.self_attn.attn".format
    assert layers(FULL, WINDOW, LATENT) == [
        Group(16, (Layer(name(0), 2, 8, "bfloat16 K of 64, V of 64", True, "FLASH_ATTN"),)),
        Group(16, (Layer(name(1), 2, 8, "bfloat16 K of 64, V of 64", True, "FLASH_ATTN"),)),
        Group(64, (Layer(name(2), 1, 1, "bfloat16 latent of 576", True, "FLASH_ATTN"),)),
    ]


def test_a_back_end_that_is_not_known_and_quantized_blocks_move_whole_heads() -> None:
    assert [group.layers[0].rows for group in layers(FULL, backend="CPU_ATTN")] == [False]
    for mode in KVQuantMode:
        spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.uint8, kv_quant_mode=mode)
        (layer,) = layers(spec)[0].layers
        assert layer.rows == (mode.name in ("NONE", "FP8_PER_TENSOR"))
        assert (mode.name.lower() in layer.format) == (mode.name != "NONE")


def test_caches_of_another_stage_are_left_out() -> None:
    whole, caches = configs(FULL, FULL)
    found = config.groups(whole, caches, ["model.layers.1.self_attn.attn"])
    assert [[layer.name for layer in group.layers] for group in found] == [[], ["model.layers.1.self_attn.attn"]]


@pytest.mark.parametrize(
    "specs, parallel, why",
    [
        ([FULL, MAMBA], {}, r"layer model\.layers\.1\.self_attn\.attn yet: its cache is a MambaSpec"),
        ([FULL], {"decode_context_parallel_size": 2}, "decode context parallelism yet .*size is 2"),
        ([FULL], {"prefill_context_parallel_size": 4}, "prefill context parallelism yet .*size is 4"),
    ],
)
def test_what_is_not_served_is_refused_by_name(specs: list[Any], parallel: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        config.check(*configs(*specs, **parallel))


def test_speculative_decoding_is_refused() -> None:
    whole, caches = configs(FULL)
    whole.speculative_config = object()
    with pytest.raises(ValueError, match="speculative decoding"):
        config.check(whole, caches)


def test_the_plugin_makes_the_name_known() -> None:
    (entry,) = [
        entry for entry in importlib.metadata.entry_points(group="vllm.general_plugins") if entry.name == "kvplan"
    ]
    assert entry.load() is load
    load()
    load()  # vLLM may call it more than once
    assert KVConnectorFactory.get_connector_class_by_name("KvplanConnector").__name__ == "KvplanConnector"
