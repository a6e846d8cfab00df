"""Tiny models with random weights: config.json and model.safetensors, made without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SMALL = dict(
    vocab_size=1000, hidden_size=128, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)  # fmt: skip


def config(kind: str) -> Any:
    """A Llama; or a model in which layers of full attention and of sliding windows take turns."""
    if kind == "llama":
        from transformers import LlamaConfig

        return LlamaConfig(architectures=["LlamaForCausalLM"], num_hidden_layers=4, **SMALL)
    if kind == "windows":
        from transformers import Olmo3Config

        return Olmo3Config(
            architectures=["Olmo3ForCausalLM"], num_hidden_layers=6, sliding_window=64,
            layer_types=["sliding_attention", "full_attention"] * 3, **SMALL,
        )  # fmt: skip
    raise ValueError(kind)


def make(kind: str, folder: Path) -> None:
    """Write a model into `folder`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    made = config(kind)
    made.initializer_range = 0.15  # large enough that greedy tokens vary
    AutoModelForCausalLM.from_config(made, dtype=torch.float32).save_pretrained(folder)
