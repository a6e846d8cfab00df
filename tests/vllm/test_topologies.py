"""Real vLLM engines of several ranks, and a model of several KV cache groups."""

from __future__ import annotations

from pathlib import Path

from engines import Engine
from test_real_engines import check


def test_two_ranks_to_one_and_one_to_two(models: Path, tmp_path: Path) -> None:
    one = Engine("one", models / "llama", tmp_path, "kv_both", separate=True)
    two = Engine("two", models / "llama", tmp_path, "kv_both", tensor_parallel_size=2)
    with one, two:
        one.ready(), two.ready()
        check(two, one, 21, 5, 40, 100, 300)
        check(one, two, 22, 5, 40, 100, 300)


def test_layers_of_full_attention_and_of_sliding_windows(models: Path, tmp_path: Path) -> None:
    """Two groups with block tables of their own over one buffer. The window is 64 tokens, a block 32.

    Behind 95 and 127 tokens the window of the next token begins with a block, so that of the last one does not. Were
    the block before it missing, the chances of the first token would differ by 0.03 and more, and few tokens.
    """
    with (
        Engine("p", models / "windows", tmp_path, "kv_producer") as p,
        Engine("d", models / "windows", tmp_path, "kv_consumer") as d,
    ):
        p.ready(), d.ready()
        check(p, d, 23, 5, 40, 95, 96, 100, 127, 128, 300)


def test_fp8(models: Path, tmp_path: Path) -> None:
    with (
        Engine("p", models / "llama", tmp_path, "kv_producer", kv_cache_dtype="fp8") as p,
        Engine("d", models / "llama", tmp_path, "kv_consumer", kv_cache_dtype="fp8") as d,
    ):
        p.ready(), d.ready()
        check(p, d, 24, 5, 40, 100, 300)


def test_unequal_blocks_are_refused_in_words_on_a_cpu(models: Path, tmp_path: Path) -> None:
    """The CPU's back end stores K of a block transposed. NixlConnector gives wrong tokens here, without an error."""
    with (
        Engine("p", models / "llama", tmp_path, "kv_producer", block_size=32) as p,
        Engine(
            "d", models / "llama", tmp_path, "kv_consumer", block_size=64,
            transfer={"kv_load_failure_policy": "recompute"},
        ) as d,
    ):  # fmt: skip
        from test_real_engines import TOKENS, prefill, prompts_of, tokens

        p.ready(), d.ready()
        prompts = prompts_of(25, 100)
        expected = tokens(p.generate(prompts, TOKENS))
        assert tokens(d.generate(prompts, TOKENS, prefill(p, prompts))) == expected  # computed on the decode side
        assert d.said("source's format is 'blocks of 32 tokens as CPU_ATTN stores them") == 1
        assert d.said("destination's 'blocks of 64 tokens as CPU_ATTN stores them") == 1
