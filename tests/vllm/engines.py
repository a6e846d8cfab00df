"""Real vLLM engines on a CPU, each in a process or processes of its own, which take orders over a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import socket
import time
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_MODULES": "^ib",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "nixl": {"ucx": {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo", "UCX_MODULES": "^ib"}, "timeout": 5},
    "mooncake": {"hostname": "127.0.0.1"},
}
REMOTE_DECODE = dict(
    do_remote_decode=True, do_remote_prefill=False, remote_engine_id=None, remote_block_ids=None, remote_host=None,
    remote_port=None,
)  # fmt: skip  # what vLLM's proxies send to prefill


def free_port() -> int:
    """A port of loopback that nobody listens at."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _child(pipe: Any, environment: dict[str, str], arguments: dict[str, Any], log: str) -> None:
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(environment)
    try:
        from vllm import LLM, SamplingParams
        from vllm.config import KVTransferConfig

        separate = environment.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0"
        transfer = arguments.pop("transfer")
        llm = LLM(**arguments, kv_transfer_config=KVTransferConfig(**transfer) if transfer else None)
        pipe.send(("ready", None))
        engine, number = llm.llm_engine, 0
        while True:
            what, given = pipe.recv()
            if what == "stop":
                break
            if what == "add":  # a request, not awaited
                prompt, most, params = given
                sampling = SamplingParams(
                    temperature=0, max_tokens=most, ignore_eos=True, detokenize=False, logprobs=1,
                    extra_args={"kv_transfer_params": params} if params else None,
                )  # fmt: skip
                number += 1
                engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
                pipe.send(("ok", str(number)))
            elif what == "abort":
                engine.abort_request([given])
                pipe.send(("ok", None))
            elif what == "run":  # until all have ended, or for so many seconds; or idle for so many seconds
                seconds, idle = given
                ended, until = {}, time.monotonic() + seconds
                while (idle or engine.has_unfinished_requests()) and time.monotonic() < until:
                    if not engine.has_unfinished_requests():
                        time.sleep(0.01)  # an engine in one process moves only when it is stepped
                        if separate:
                            continue
                    for output in engine.step():
                        if output.finished:
                            reason = output.outputs[0].finish_reason
                            tokens = list(output.outputs[0].token_ids)
                            chosen = output.outputs[0].logprobs or []
                            chances = [each[token].logprob for each, token in zip(chosen, tokens, strict=True)]
                            ended[output.request_id] = (
                                tokens, output.kv_transfer_params, chances, reason
                            )  # fmt: skip
                pipe.send(("ok", ended))
    except BaseException as error:
        import traceback

        traceback.print_exc()
        pipe.send(("error", repr(error)))
    else:
        llm.llm_engine.engine_core.shutdown()


class Engine:
    """One engine. Use it in a `with` statement.

    Args:
        name: of its log.
        model: folder of the model.
        folder: for the log.
        role: "kv_producer", "kv_consumer"; None for an engine without a connector.
        kind: "nixl" or "mooncake".
        extra: further words of kv_connector_extra_config.
        transfer: further words of kv_transfer_config.
        separate: vLLM's usual processes, for scheduler and workers; else all of it in one, which starts sooner. With
            several ranks they are always separate.
        arguments: further arguments of `vllm.LLM`.
    """

    def __init__(
        self,
        name: str,
        model: Path,
        folder: Path,
        role: str | None = None,
        kind: str = "nixl",
        extra: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        separate: bool = False,
        **arguments: Any,
    ) -> None:
        self.name, self.log = name, folder / f"{name}.log"
        ranks = arguments.get("tensor_parallel_size", 1)
        cpus = sorted(os.sched_getaffinity(0))
        binding = "|".join(str(cpus[rank % len(cpus)]) for rank in range(ranks))
        given: dict[str, Any] = dict(
            model=str(model), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=512,
            max_num_seqs=8, max_num_batched_tokens=512, block_size=32, kv_cache_memory_bytes=64 << 20,
            enable_prefix_caching=False, disable_log_stats=True, seed=0,
        )  # fmt: skip
        variables = ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": binding}
        if not separate and ranks == 1:
            variables |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
            given["distributed_executor_backend"] = "uni"
        given |= arguments
        given["transfer"] = None
        if role is not None:
            self.port = free_port()
            words = {
                "engine": kind, "engine_options": OPTIONS[kind], "side_channel_host": "127.0.0.1",
                "side_channel_port": self.port,
            }  # fmt: skip
            given["transfer"] = {
                "kv_connector": "KvplanConnector", "kv_role": role, "kv_connector_extra_config": words | (extra or {}),
            } | (transfer or {})  # fmt: skip
        context = multiprocessing.get_context("spawn")
        self._pipe, child = context.Pipe()
        self.process = context.Process(target=_child, args=(child, variables, given, str(self.log)))
        self.process.start()
        child.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def ready(self, timeout: float = 300) -> Engine:
        """Wait until it has started."""
        self._receive(timeout)
        return self

    def add(self, prompt: list[int], tokens: int, params: dict[str, Any] | None = None) -> str:
        """Add a request; its id."""
        self._pipe.send(("add", (prompt, tokens, params)))
        return str(self._receive())

    def abort(self, request: str) -> None:
        """Abort a request."""
        self._pipe.send(("abort", request))
        self._receive()

    def run(self, timeout: float = 90) -> dict[str, Any]:
        """Run until all requests have ended, or `timeout` has passed: those that ended, by id."""
        self._pipe.send(("run", (timeout, False)))
        return dict(self._receive(timeout + 60))

    def idle(self, seconds: float) -> dict[str, Any]:
        """Go on for so many seconds, with or without requests: those that ended, by id."""
        self._pipe.send(("run", (seconds, True)))
        return dict(self._receive(seconds + 60))

    def generate(
        self, prompts: list[list[int]], tokens: int, params: list[dict[str, Any] | None] | None = None
    ) -> list[Any]:
        """What each prompt gives: (tokens, kv_transfer_params, logarithms of their chances, finish reason)."""
        given = params or [None] * len(prompts)
        ids = [self.add(prompt, tokens, each) for prompt, each in zip(prompts, given, strict=True)]
        ended = self.run()
        assert set(ids) <= set(ended), f"{self.name}: {len(ended)} of {len(ids)} requests have ended; see {self.log}"
        return [ended[request] for request in ids]

    def said(self, text: str) -> int:
        """How many lines of its log have `text`."""
        return sum(text in line for line in self.log.read_text(errors="replace").splitlines())

    def kill(self) -> None:
        """Kill all of its processes."""
        import psutil

        mine = psutil.Process(self.process.pid)
        for process in [*mine.children(recursive=True), mine]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.join(10)

    def stop(self) -> None:
        """End it."""
        if self.process.is_alive():
            with contextlib.suppress(OSError):
                self._pipe.send(("stop", None))
                self.process.join(20)
        if self.process.is_alive():
            self.kill()

    def _receive(self, timeout: float = 120) -> Any:
        assert self._pipe.poll(timeout), f"{self.name} gave no answer in {timeout} s; see {self.log}"
        what, value = self._pipe.recv()
        assert what != "error", (
            f"{self.name}: {value}; the end of its log: {self.log.read_text(errors='replace')[-3000:]}"
        )
        return value
