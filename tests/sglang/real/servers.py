"""SGLang's real servers on a CPU: one alone, and a prefill and a decode server with KV moved between them by Mooncake.

The same prompts go to both. Tokens must be equal, and every KV row of every request must be the same bytes on the
decode side as on the prefill side, by position.

    python tests/sglang/real/servers.py MODEL [--tp 1 2] [--pp 2 1] [--chunk 64] [--scatter] [--fault swap]

Three engines are forked from one process that has imported SGLang. KVPLAN_SGLANG=0 runs SGLang's own planner.
Prints one JSON object; the exit status is 0 where all was equal.
"""

import argparse
import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import sys
import tempfile
import warnings
from pathlib import Path

SECONDS = 300.0  # generous: machines are loaded
ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1", "MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1", "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}  # fmt: skip


def serve(mode, fields, log, pipe):
    """A child: one engine, asked over a pipe."""
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    ranks = fields.get("tp_size", 1) * fields.get("pp_size", 1)
    if ranks > 1:  # more ranks than NUMA nodes: SGLang must be told which CPU each takes
        cpus = "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(ranks))
        os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = cpus
    multiprocessing.set_start_method = lambda *_args, **_kwargs: None  # "spawn" would import everything again
    from sglang.srt.entrypoints.engine import Engine

    if mode != "null":
        fields["disaggregation_mode"] = mode
    if mode == "decode":  # the default, a host pool, needs CUDA
        fields["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    engine = Engine(**fields)
    pipe.send("ready")
    while True:
        question = pipe.recv()
        try:
            pipe.send(engine.generate(**question))
        except Exception as error:
            pipe.send(RuntimeError(repr(error)))


class Server:
    """An engine in a process of its own."""

    def __init__(self, mode, fields, log):
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.log = log
        self.process = context.Process(target=serve, args=(mode, fields, log, theirs))
        self.process.start()
        theirs.close()

    def receive(self):
        if not self.pipe.poll(SECONDS):
            raise TimeoutError(f"no answer in {SECONDS} s: see {self.log}")
        answer = self.pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def ask(self, prompts, **more):
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        self.pipe.send({"input_ids": prompts, "sampling_params": sampling, **more})

    def stop(self):
        try:
            os.killpg(self.process.pid, signal.SIGKILL)  # its group: setsid is the first thing that it does
        except ProcessLookupError:
            self.process.kill()
        self.process.join()


def records(folder):
    for path in sorted(Path(folder).iterdir()):
        with path.open("rb") as file:
            while True:
                try:
                    yield pickle.load(file)
                except EOFError:
                    break


def compare(folder):
    """(requests, bytes compared, rows that differ)."""
    sides = {"had": {}, "got": {}}
    for record in records(folder):
        sides[record["kind"]].setdefault(record["room"], {})[record["rank"]] = record

    def rows(ranks, buffer, position):
        """One row a rank that holds this layer, in the order of heads."""
        return [ranks[rank]["rows"][buffer][position] for rank in sorted(ranks) if buffer in ranks[rank]["rows"]]

    compared, wrong = 0, []
    for room, got in sides["got"].items():
        buffers = sorted({buffer for rank in got.values() for buffer in rank["rows"]})
        had = sides["had"][room]
        replicated = all(part == 0 for part, _ in buffers)  # latent attention: each rank holds whole rows
        for buffer in buffers:
            for position in range(next(iter(got.values()))["tokens"]):
                arrived, sent = rows(got, buffer, position), rows(had, buffer, position)
                compared += sum(map(len, arrived))
                right = {*arrived} == {*sent} if replicated else b"".join(arrived) == b"".join(sent)
                if not arrived or not right:
                    wrong.append((room, buffer, position))
    return len(sides["got"]), compared, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--tp", type=int, nargs=2, default=(1, 1))
    parser.add_argument("--pp", type=int, nargs=2, default=(1, 1))
    parser.add_argument("--chunk", type=int, help="tokens of a prefill chunk")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--decode-page-size", type=int, help="default: that of the others")
    parser.add_argument("--scatter", action="store_true")
    parser.add_argument("--fault", choices=["swap"])
    options = parser.parse_args()
    logs = Path(tempfile.mkdtemp(prefix="kvplan-sglang-real-"))
    (logs / "tap").mkdir()
    os.environ.update(ENVIRONMENT, REAL_SERVERS_TAP=str(logs / "tap"), REAL_SERVERS_FAULT=options.fault or "",
                      REAL_SERVERS_SCATTER="1" if options.scatter else "")  # fmt: skip
    warnings.simplefilter("ignore")
    import sglang.srt.disaggregation.mooncake.conn
    import sglang.srt.entrypoints.engine  # noqa: F401

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    fields = {
        "model_path": options.model, "skip_tokenizer_init": True, "load_format": "safetensors", "device": "cpu",
        "attention_backend": "torch_native", "dtype": "float32", "page_size": options.page_size,
        "max_total_tokens": 4096, "max_running_requests": 8, "disable_overlap_schedule": True,
        "disable_radix_cache": True, "grammar_backend": "none", "random_seed": 1,
        "disaggregation_transfer_backend": "mooncake", "disaggregation_bootstrap_port": port, "log_level": "info",
    }  # fmt: skip
    chunked = {"chunked_prefill_size": options.chunk} if options.chunk else {}
    modes = {
        "null": {},
        "prefill": {"tp_size": options.tp[0], "pp_size": options.pp[0]} | chunked,
        "decode": {
            "tp_size": options.tp[1],
            "pp_size": options.pp[1],
            "page_size": options.decode_page_size or options.page_size,
        },
    }
    servers = {}
    try:
        for mode, more in modes.items():
            servers[mode] = Server(mode, fields | more, logs / f"{mode}.log")
        for server in servers.values():
            assert server.receive() == "ready"
        rng = random.Random(7)
        tokens_equal, room = True, 1000
        for lengths in ((7,), (16,), (150,), (1, 15, 17, 31, 32, 33, 100, 199)):
            prompts = [[rng.randrange(3, 1000) for _ in range(length)] for length in lengths]
            where = {"bootstrap_host": ["127.0.0.1"] * len(prompts),
                     "bootstrap_room": list(range(room, room + len(prompts)))}  # fmt: skip
            room += len(prompts)
            servers["null"].ask(prompts)
            servers["prefill"].ask(prompts, **where)
            servers["decode"].ask(prompts, **where)
            answers = {mode: [one["output_ids"] for one in server.receive()] for mode, server in servers.items()}
            tokens_equal &= answers["null"] == answers["decode"]
        requests, compared, wrong = compare(logs / "tap")
    finally:
        for server in servers.values():
            server.stop()
    said = [
        line[line.index("kvplan") :] for line in (logs / "prefill.log").read_text().splitlines() if "kvplan" in line
    ]
    print(json.dumps({
        "tokens equal": tokens_equal, "requests": requests, "bytes compared": compared, "rows that differ": len(wrong),
        "first": wrong[:1], "said": sorted(set(said))[:8], "logs": str(logs),
    }))  # fmt: skip
    sys.exit(0 if tokens_equal and requests == 11 and compared and not wrong else 1)


if __name__ == "__main__":
    main()
