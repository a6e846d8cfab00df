"""Two tiny models with random weights, as SGLang loads them from a folder: a Llama, and a DeepSeek-V2 without experts.

python models.py FOLDER        # makes FOLDER/llama, FOLDER/llama_of_3_layers and FOLDER/mla
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

LAYERS, HIDDEN, INNER, VOCAB, HEADS = 2, 128, 256, 1000, 4
COMMON = {
    "torch_dtype": "float32", "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "vocab_size": VOCAB, "max_position_embeddings": 2048, "rope_theta": 10000.0,
    "hidden_act": "silu", "tie_word_embeddings": False, "attention_bias": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


class Weights:
    """Tensors by name."""

    def __init__(self):
        self.made = {"model.norm.weight": torch.ones(HIDDEN)}
        self.generator = torch.Generator().manual_seed(0)
        self.add("model.embed_tokens", VOCAB, HIDDEN, scale=1.0)
        self.add("lm_head", VOCAB, HIDDEN, scale=0.5)

    def add(self, name, *shape, scale=0.25):
        self.made[name + ".weight"] = torch.randn(*shape, generator=self.generator) * scale

    def ones(self, name, size):
        self.made[name + ".weight"] = torch.ones(size)

    def layer(self, number):
        """The parts that both models share; returns the prefix of the attention's names."""
        prefix = f"model.layers.{number}."
        for name, shape in (("gate", (INNER, HIDDEN)), ("up", (INNER, HIDDEN)), ("down", (HIDDEN, INNER))):
            self.add(f"{prefix}mlp.{name}_proj", *shape)
        self.ones(prefix + "input_layernorm", HIDDEN)
        self.ones(prefix + "post_attention_layernorm", HIDDEN)
        return prefix + "self_attn."

    def save(self, folder, **config):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(self.made, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(COMMON | config))


def llama(folder, layers=LAYERS, kv_heads=2, dim=32):
    """Grouped-query attention: two KV heads."""
    weights = Weights()
    for number in range(layers):
        prefix = weights.layer(number)
        for name, rows in (("q", HEADS * dim), ("k", kv_heads * dim), ("v", kv_heads * dim)):
            weights.add(f"{prefix}{name}_proj", rows, HIDDEN)
        weights.add(prefix + "o_proj", HIDDEN, HEADS * dim)
    weights.save(folder, architectures=["LlamaForCausalLM"], model_type="llama", num_hidden_layers=layers,
                 num_key_value_heads=kv_heads, head_dim=dim, rms_norm_eps=1e-5, mlp_bias=False,
                 pad_token_id=0)  # fmt: skip


def mla(folder, plain=32, rope=16, value=32, rank=64):
    """Latent attention: rows of 64 + 16 values."""
    weights = Weights()
    for number in range(LAYERS):
        prefix = weights.layer(number)
        weights.add(prefix + "q_proj", HEADS * (plain + rope), HIDDEN)
        weights.add(prefix + "kv_a_proj_with_mqa", rank + rope, HIDDEN)
        weights.ones(prefix + "kv_a_layernorm", rank)
        weights.add(prefix + "kv_b_proj", HEADS * (plain + value), rank)
        weights.add(prefix + "o_proj", HIDDEN, HEADS * value)
    scaling = {"type": "yarn", "rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
               "mscale_all_dim": 0.707, "original_max_position_embeddings": 1024}  # fmt: skip
    weights.save(
        folder, architectures=["DeepseekV2ForCausalLM"], model_type="deepseek_v2", num_key_value_heads=HEADS,
        q_lora_rank=None, kv_lora_rank=rank, qk_nope_head_dim=plain, qk_rope_head_dim=rope, v_head_dim=value,
        moe_intermediate_size=INNER, rms_norm_eps=1e-6, rope_scaling=scaling, first_k_dense_replace=LAYERS,
        n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2, moe_layer_freq=1, n_group=1, topk_group=1,
        topk_method="greedy", scoring_func="softmax", norm_topk_prob=False, routed_scaling_factor=1.0,
    )  # fmt: skip


if __name__ == "__main__":
    llama(Path(sys.argv[1]) / "llama")
    llama(Path(sys.argv[1]) / "llama_of_3_layers", layers=3)
    mla(Path(sys.argv[1]) / "mla")
