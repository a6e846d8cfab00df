"""Real vLLM engines, prefill and decode, over KvplanConnector: greedy tokens equal those of one engine."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import REMOTE_DECODE, Engine

LEASE = 10  # seconds
TOKENS = 16


def prompts_of(seed: int, *lengths: int) -> list[list[int]]:
    """Prompts that no other seed gives."""
    draw = random.Random(seed)
    return [[draw.randrange(3, 1000) for _ in range(length)] for length in lengths]


def replaced(prompts: list[list[int]], token: int, keep: int = 0) -> list[list[int]]:
    """The prompts with all tokens but the first `keep` and the last replaced: alone they give other tokens."""
    return [[*prompt[:keep], *[token] * (len(prompt) - keep - 1), prompt[-1]] for prompt in prompts]


def prefill(engine: Engine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """What the decode side must be given of each prompt."""
    answers = engine.generate(prompts, 1, [dict(REMOTE_DECODE) for _ in prompts])
    params = [answer[1] for answer in answers]
    assert all(each["do_remote_prefill"] for each in params)
    return params


def tokens(answers: list[Any]) -> list[list[int]]:
    return [answer[0] for answer in answers]


def check(p: Engine, d: Engine, seed: int, *lengths: int) -> None:
    """Tokens are equal, and their chances; and they come from what was sent, for a replaced prompt gives them too, and
    not alone."""
    prompts = prompts_of(seed, *lengths)
    expected = p.generate(prompts, TOKENS)
    fakes = replaced(prompts, 3 + seed)
    alone = p.generate(fakes, TOKENS)
    for given in (prompts, fakes):
        answers = d.generate(given, TOKENS, prefill(p, prompts))
        assert tokens(answers) == tokens(expected)
        for answer, right, other in zip(answers, expected, alone, strict=True):
            assert answer[2] == pytest.approx(right[2], abs=1e-3)
            assert other[0] != right[0]


class Pair:
    """A prefill engine, and a decode engine that may be replaced."""

    def __init__(self, kind: str, model: Path, folder: Path) -> None:
        self.kind, self.model, self.folder, self.started = kind, model, folder, 0
        self.p = self.start("kv_producer")
        self.d = self.decode("recompute")
        self.p.ready(), self.d.ready()

    def decode(self, policy: str) -> Engine:
        """Start a decode engine with this kv_load_failure_policy."""
        self.policy = policy
        return self.start("kv_consumer", kv_load_failure_policy=policy)

    def start(self, role: str, **transfer: Any) -> Engine:
        """Prompts of more than 128 tokens are prefilled in chunks; both sides keep prefixes."""
        self.started += 1
        return Engine(
            f"{self.kind}{self.started}", self.model, self.folder, role, self.kind, {"kv_lease_duration": LEASE},
            transfer, enable_prefix_caching=True, max_num_batched_tokens=128,
        )  # fmt: skip

    def stop(self) -> None:
        self.d.stop(), self.p.stop()


# The tests of this class go in order: the later ones end engines.
@pytest.mark.parametrize("kind", ["nixl", "mooncake"], scope="class")
class TestOnePair:
    @pytest.fixture(scope="class")
    def pair(self, kind: str, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
        found = Pair(kind, models / "llama", tmp_path_factory.mktemp(kind))
        yield found
        found.stop()

    def test_tokens_are_equal(self, pair: Pair) -> None:
        check(pair.p, pair.d, 1, 5, 32, 33, 64, 100, 300)

    def test_a_prefix_that_decode_has(self, pair: Pair) -> None:
        (whole,) = prompts_of(2, 200)
        expected = tokens(pair.p.generate([whole], TOKENS))
        assert tokens(pair.d.generate([whole], TOKENS, prefill(pair.p, [whole]))) == expected
        longer = [[*whole[:130], *prompts_of(3, 120)[0]]]
        expected = tokens(pair.p.generate(longer, TOKENS))
        (params,) = prefill(pair.p, longer)
        blocks = params["remote_block_ids"][0]
        # Four blocks are here already. Where the prefill side has them does not matter any more; elsewhere it does.
        params["remote_block_ids"] = [[*blocks[4:8], *blocks[4:]]]
        assert tokens(pair.d.generate(replaced(longer, 7, keep=130), TOKENS, [params])) == expected
        (params,) = prefill(pair.p, longer)
        blocks = params["remote_block_ids"][0]
        params["remote_block_ids"] = [[*blocks[4:8], *blocks[4:]]]
        assert tokens(pair.d.generate(replaced(longer, 8), TOKENS, [params])) != expected
        whole_again = pair.d.generate([whole], TOKENS, prefill(pair.p, [whole]))
        assert tokens(whole_again) == tokens(pair.p.generate([whole], TOKENS))

    def test_twenty_requests_at_once(self, pair: Pair) -> None:
        draw = random.Random(4)
        prompts = prompts_of(4, *(draw.randrange(10, 350) for _ in range(20)))
        expected = tokens(pair.p.generate(prompts, TOKENS))
        fakes = replaced(prompts, 9)
        assert tokens(pair.d.generate(fakes, TOKENS, prefill(pair.p, prompts))) == expected

    def test_aborted_requests_free_their_blocks_on_both_sides(self, pair: Pair) -> None:
        prompts = prompts_of(5, 100, 150, 200, 250)
        expected = tokens(pair.p.generate(prompts, TOKENS))
        expired = pair.p.said("nobody has asked")
        params = prefill(pair.p, prompts)
        ids = [pair.d.add(prompt, TOKENS, each) for prompt, each in zip(replaced(prompts, 11), params, strict=True)]
        pair.d.abort(ids[0])  # before it was scheduled
        pair.d.idle(0.05)
        pair.d.abort(ids[1])  # while it is read, or after
        ended = pair.d.run()
        assert [ended[request][0] for request in ids[2:]] == expected[2:]
        pair.d.idle(1)
        chunked = pair.p.add(prompts_of(6, 300)[0], 1, dict(REMOTE_DECODE))  # on the prefill side, between chunks
        pair.p.idle(0.02)
        pair.p.abort(chunked)
        pair.p.idle(LEASE + 1)
        assert pair.p.said("nobody has asked") == expired
        check(pair.p, pair.d, 7, 120)

    def test_blocks_that_nobody_asks_for_are_freed_and_never_used(self, pair: Pair) -> None:
        prompts = prompts_of(8, 90, 190)
        params = prefill(pair.p, prompts)
        expired = pair.p.said("nobody has asked")
        pair.p.idle(LEASE + 2)
        assert pair.p.said("nobody has asked") == expired + 2
        fakes = replaced(prompts, 13)
        computed = tokens(pair.p.generate(fakes, TOKENS))
        assert tokens(pair.d.generate(fakes, TOKENS, params)) == computed  # computed on the decode side
        assert pair.d.said("has freed its blocks before they were read") == 2

    def test_a_killed_decode_engine_is_replaced(self, pair: Pair) -> None:
        prompts = prompts_of(9, 300, 310, 320, 330)
        expired = pair.p.said("nobody has asked")
        for prompt, params in zip(prompts, prefill(pair.p, prompts), strict=True):
            pair.d.add(prompt, TOKENS, params)
        pair.d.kill()
        pair.d = pair.decode("fail")
        pair.p.idle(LEASE + 2)
        assert pair.p.said("nobody has asked") == expired + 4
        pair.d.ready()
        check(pair.p, pair.d, 10, 40, 310)

    def test_a_load_that_fails_fails_its_request_alone_where_the_policy_says_so(self, pair: Pair) -> None:
        prompts = prompts_of(11, 90, 190)
        expected = tokens(pair.p.generate(prompts, TOKENS))
        params = prefill(pair.p, prompts)
        params[0]["remote_request_id"] = "no such request"
        ids = [pair.d.add(prompt, TOKENS, each) for prompt, each in zip(replaced(prompts, 15), params, strict=True)]
        ended = pair.d.run()
        assert ended[ids[0]][0] == [] and ended[ids[0]][3] == "error"
        assert ended[ids[1]][0] == expected[1]

    def test_block_ids_that_cannot_be_are_refused_by_name(self, pair: Pair) -> None:
        prompts = prompts_of(12, 90)
        (params,) = prefill(pair.p, prompts)
        params["remote_block_ids"] = [[1, 1 << 40, 2]]
        request = pair.d.add(prompts[0], TOKENS, params)
        assert pair.d.run()[request][3] == "error"
        assert pair.d.said(f"source page id {1 << 40} at position 1 is out of range") == 1

    def test_a_killed_prefill_engine_frees_what_decode_waits_for(self, pair: Pair) -> None:
        first, *prompts = prompts_of(13, 70, 90, 190)
        pair.d.generate([first], TOKENS, prefill(pair.p, [first]))  # hands are shaken
        params = prefill(pair.p, prompts)
        pair.p.kill()
        ids = [pair.d.add(prompt, TOKENS, each) for prompt, each in zip(prompts, params, strict=True)]
        ended = pair.d.run()
        reason = "error" if pair.policy == "fail" else "length"  # computed on the decode side
        assert [ended[request][3] for request in ids] == [reason, reason]
