"""Starts both processes of the demo, shows how far they are, and prints what they found."""

from __future__ import annotations

import argparse
import contextlib
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import IO, Any

from .. import Heads
from .allocator import DEFAULT_TOKENS, DEFAULT_TRACE_REQUESTS, MAX_TOKENS, OutOfPages, workload
from .channel import REPORTED, Channel
from .pools import TP_HEADS, heads_layout, pool_layout

RIGHT, WRONG, FAILED = 0, 1, 2  # exit codes


class DemoError(RuntimeError):
    """The demo cannot run to its end. `log` is what a process wrote before that."""

    def __init__(self, text: str, log: str = "") -> None:
        super().__init__(text)
        self.log = log


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_TOKENS:
        raise argparse.ArgumentTypeError(f"{text} is not between 1 and {MAX_TOKENS}")
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds")
    return value


def _tp(text: str) -> tuple[int, int]:
    sizes = text.split(":")
    if len(sizes) != 2 or not all(size.isdecimal() and size.isascii() for size in sizes):
        raise argparse.ArgumentTypeError(f"{text} is not two numbers of ranks, such as 4:8")
    prefill, decode = map(int, sizes)
    for size in (prefill, decode):
        if size < 1 or TP_HEADS % size:
            raise argparse.ArgumentTypeError(f"{size} ranks cannot share {TP_HEADS} heads evenly")
    return prefill, decode


def _ranks(tp: tuple[int, int]) -> dict[str, tuple[int, int, int]]:
    """`Heads` of the last decode rank, and of the prefill rank that has the first of them."""
    mine, theirs = (TP_HEADS // size for size in tp)
    first = TP_HEADS - theirs
    rank = first // mine
    return {"prefill": (rank * mine, (rank + 1) * mine, TP_HEADS), "decode": (first, TP_HEADS, TP_HEADS)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the demo's options to `parser`."""
    default = " ".join(map(str, DEFAULT_TOKENS))
    parser.add_argument(
        "--trace", metavar="FILE", help="replay a request trace in the Mooncake format instead of made up requests"
    )
    parser.add_argument(
        "--tokens", type=_count, nargs="+", metavar="N", help=f"lengths of the requests to transfer; default {default}"
    )
    parser.add_argument(
        "--requests",
        type=_count,
        metavar="N",
        help=f"how many requests to transfer; default as many as --tokens names, of a trace {DEFAULT_TRACE_REQUESTS}",
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of everything that is made up (default: %(default)s)"
    )
    parser.add_argument(
        "--chunk-tokens",
        type=_count,
        default=8192,
        metavar="N",
        help="send after every N tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--engine",
        choices=("mooncake", "nixl", "local"),
        default="mooncake",
        help="what carries the pages (default: %(default)s); local copies, with both sides in one process",
    )
    parser.add_argument(
        "--route",
        choices=("direct", "packed", "auto"),
        default="auto",
        help="send descriptors as they are, all by way of staging, or what is faster so (default: %(default)s)",
    )
    parser.add_argument(
        "--tp",
        type=_tp,
        metavar="P:D",
        help=f"one prefill rank of P sends to one decode rank of D: some of {TP_HEADS} heads, row by row, such as 4:8",
    )
    parser.add_argument(
        "--draft", action="store_true", help="let the decode side also hold a region of a draft model, never sent to"
    )
    parser.add_argument(
        "--one-space",
        action="store_true",
        help="plan with host page ids for device pages too, as if there were one index space: must be found out",
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="seconds until it is given up (default: %(default)s)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the demo. 0: every byte is right; 1: some are wrong; 2: it could not run to its end."""
    start = time.monotonic()
    try:
        config = configure(args)
        with Progress(sys.stderr) as progress:
            progress.show(f"starting: {config['pool_bytes'] / 1e6:,.0f} MB of pools")
            prefill, decode = run(config, progress)
    except (DemoError, OutOfPages, ValueError, OSError) as error:
        print(f"{getattr(error, 'log', '')}kvplan demo: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("kvplan demo: interrupted", file=sys.stderr)
        return FAILED
    return report(prefill, decode, time.monotonic() - start)


def configure(args: argparse.Namespace) -> dict[str, Any]:
    """What both processes are told. Raises DemoError when there is too little memory, or options do not go together."""
    if args.tp and (args.draft or args.one_space):
        raise DemoError("--tp has one index space and no draft: leave out --draft and --one-space")
    _, moved = workload(args.trace, args.tokens, args.requests, args.seed)
    pages = sum(request.pages for request in moved)
    spare = max(64, pages // 2)  # for the traffic before them
    config = {
        "trace": args.trace,
        "tokens": args.tokens,
        "requests": args.requests,
        "seed": args.seed,
        "chunk_tokens": args.chunk_tokens,
        "engine": args.engine,
        "one_space": args.one_space,
        "draft": args.draft,
        "route": args.route,
        "tp": _ranks(args.tp) if args.tp else None,
        "timeout": args.timeout,
        "prefill_pages": pages + spare,
        "host_pages": pages + spare,
        # More than host pages, so that with --one-space every host page id is also a valid device page id.
        "device_pages": pages + spare + spare // 4,
    }
    if args.tp:
        layouts = [
            heads_layout(4096, config[pages], Heads(*config["tp"][side]))
            for pages, side in (("prefill_pages", "prefill"), ("device_pages", "decode"))
        ]
    else:
        layouts = [
            pool_layout(4096, config["prefill_pages"]),
            pool_layout(4096, config["device_pages"], config["host_pages"], config["draft"]),
        ]
    config["pool_bytes"] = sum(region.page_bytes * region.num_pages for layout in layouts for region in layout.regions)
    available = available_memory()
    if available is not None and config["pool_bytes"] > 0.8 * available:
        raise DemoError(
            f"these requests take {config['pool_bytes'] / 1e9:,.1f} GB of pools, and only {available / 1e9:,.1f} GB of "
            f"memory are free; lower --requests or --tokens"
        )
    return config


def available_memory() -> int | None:
    """Bytes that can be allocated without swapping, where the system says."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


class Progress:
    """One line on a terminal, written anew each time; elsewhere another line, but not more than one a second."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream, self.live = stream, stream.isatty()
        self.last, self.next_time = "", 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self.live:
            self.stream.write("\r\x1b[K")
            self.stream.flush()

    def show(self, text: str) -> None:
        now = time.monotonic()
        if text == self.last or (not self.live and now < self.next_time):
            return
        self.last, self.next_time = text, now + 1
        if self.live:
            text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps cannot be written anew
        self.stream.write(f"\r\x1b[K{text}" if self.live else f"{text}\n")
        self.stream.flush()


class Child:
    """One side, as the parent sees it, in a process of its own (or with the other, if the engine is local)."""

    def __init__(self, name: str, channel: Channel, process: subprocess.Popen[bytes], log: IO[bytes]) -> None:
        self.name, self.channel, self.process = name, channel, process
        self.log = log  # what it wrote, shown when something fails; engines talk a lot
        self.status = "starting"
        self.requests: list[dict[str, Any]] = []  # what became of each request
        self.result: dict[str, Any] = {}  # what it said when it was done
        self.failure: str | None = None
        self.is_cause = True  # of the failure; False when it merely lost its peer

    @property
    def over(self) -> bool:
        return bool(self.result) or self.failure is not None

    def take(self) -> None:
        """Take one message, or notice that there will be none."""
        try:
            message = self.channel.receive(timeout=10)
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(timeout=10)
            self.failure = f"{self.left()} before it was done"
            self.is_cause = self.process.returncode != REPORTED
            return
        if message["kind"] == "progress":
            self.status = message["text"]
        elif message["kind"] == "request":
            self.requests.append(message)
        elif message["kind"] == "done":
            self.status, self.result = "done", message
        else:
            self.failure, self.is_cause = message["text"], not message["consequence"]

    def left(self) -> str:
        """How its process ended."""
        code = self.process.returncode
        if code is None:
            return "did not end"
        return f"was ended by signal {-code}" if code < 0 else f"left with exit code {code}"

    def tail(self) -> str:
        """The end of what it wrote, in lines."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()[-20:]
        return "".join(f"  {self.name}: {line}\n" for line in lines)


def explain(failures: Sequence[Child]) -> DemoError:
    """What failed, with what the process wrote."""
    causes = {child.failure: child for child in failures if child.is_cause}  # told once, even if both found it
    causes = causes or {child.failure: child for child in failures}
    text = "; ".join(f"the {child.name} process failed: {failure}" for failure, child in causes.items())
    return DemoError(text, "".join(child.tail() for child in causes.values()))


@contextlib.contextmanager
def started(config: dict[str, Any]) -> Iterator[tuple[Child, Child]]:
    """Both sides, (prefill, decode), running. However the block is left, their processes end with it."""
    programs: dict[tuple[str, ...], list[str]]
    programs = {("prefill",): ["-m", "kvplan.demo.prefill"], ("decode",): ["-m", "kvplan.demo.decode"]}
    if config["engine"] == "local":
        code = "from kvplan.demo import channel, decode, prefill; channel.run_child(prefill.serve, decode.serve)"
        programs = {("prefill", "decode"): ["-c", code]}
    ends = iter(socket.socketpair())  # between prefill and decode
    children: list[Child] = []
    with contextlib.ExitStack() as stack:
        for names, program in programs.items():
            log = stack.enter_context(tempfile.TemporaryFile())
            roles = [(name, next(ends), *socket.socketpair()) for name in names]
            fds = [sock.fileno() for _, peer, its, _ in roles for sock in (its, peer)]
            process = subprocess.Popen(
                [sys.executable, *program, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C reaches the parent alone, which ends both
            )
            stack.callback(process.wait)
            stack.callback(process.kill)  # callbacks run backwards: kill, then wait
            for name, peer, its, mine in roles:
                # With these closed here, a child's death closes its channels, and whoever waits on them learns of it.
                its.close()
                peer.close()
                children.append(Child(name, Channel(stack.enter_context(mine)), process, log))
        for child in children:
            with contextlib.suppress(OSError):  # it has died; take() will tell
                child.channel.send("config", **config)
        prefill, decode = children
        yield prefill, decode
        for child in children:  # they are done, and about to leave
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.process.wait(timeout=10)
            if child.process.returncode != 0:
                raise DemoError(f"the {child.name} process was done, but {child.left()}", child.tail())


def run(config: dict[str, Any], progress: Progress) -> tuple[Child, Child]:
    """Run both sides to their end: (prefill, decode), with what they found. Raises DemoError when one fails."""
    deadline = time.monotonic() + config["timeout"]
    with started(config) as children:
        while not all(child.over for child in children):
            failed = any(child.failure for child in children)
            if failed:  # the other one will fail in turn; who was the cause is known when both have
                deadline = min(deadline, time.monotonic() + 2)
            running = {child.channel.sock: child for child in children if not child.over}
            ready, _, _ = select.select(list(running), [], [], max(0.0, deadline - time.monotonic()))
            if not ready and failed:
                break
            if not ready:
                state = "; ".join(f"{child.name}: {child.status}" for child in children)
                raise DemoError(f"not done after {config['timeout']:g} s ({state})")
            for sock in ready:
                running[sock].take()
            progress.show(" | ".join(f"{child.name}: {child.status}" for child in children))
        failures = [child for child in children if child.failure]
        if failures:
            raise explain(failures)
        return children


def report(prefill: Child, decode: Child, seconds: float) -> int:
    """Print what was found; the exit code."""
    rows = [
        [
            str(r["id"]),
            f"{r['tokens']:,}",
            f"{r['pages']:,}",
            f"{r['chunks']:,}",
            f"{r['descriptors']:,}",
            f"{r['bytes'] / 1e6:,.1f}",
            f"{r['plan_s'] * 1e3:,.2f}",
            f"{r['transfer_s'] * 1e3:,.0f}",
            f"{r['bytes'] / 1e9 / r['transfer_s']:.2f}",
        ]
        for r in [*prefill.requests, total(prefill.requests)]
    ]
    heads = ["request", "tokens", "pages", "chunks", "descriptors", "MB", "plan ms", "transfer ms", "GB/s"]
    print_table(heads, rows)
    pages = sum(r["pages"] for r in prefill.requests)
    print(f"\nThe {pages:,} pages of these requests lie, as churn left the allocators, in")
    for child in (prefill, decode):
        result = child.result
        for space, counts in result["stretches"].items():
            print(
                f"  {sum(counts):7,} stretches of consecutive {child.name} {space} pages, after {result['churn']:,} "
                f"requests ({result['turned_away']:,} turned away for lack of pages)"
            )
    pair_ms = prefill.result["pair_s"] * 1e3
    print(f"\nPairing the layouts, once per peer: {pair_ms:.2f} ms.", end=" ")
    if forms := prefill.result["forms"]:
        print("All plans again, fastest of 5:\n")
        print_table(
            ["form", "descriptors", "Python ints", "MB", "ms"],
            [
                [
                    form["form"],
                    f"{form['descriptors']:,}",
                    f"{form['ints']:,}",
                    f"{form['bytes'] / 1e6:,.2f}",
                    f"{form['seconds'] * 1e3:,.2f}",
                ]
                for form in forms
            ],
        )
    print(f"\nWhole run: {seconds:.1f} s.", end=" ")
    checked, errors = decode.result["checked_bytes"], decode.result["errors"]
    print(f"Checked every byte of {decode.result['pools']}: {checked:,} in {decode.result['check_s']:.1f} s.")
    if not errors:
        print(f"Every byte is right: {pages:,} pages hold what their source pages held, all else is untouched.")
        return RIGHT
    print(f"\n{len(errors)} of the regions are wrong:\n")
    print_table(
        ["region", "layer", "space", "wrong bytes", "pages not as due", "pages touched that were not due"],
        [
            [e["name"], str(e["layer"]), e["space"]]
            + [f"{e[field]:,}" for field in ("wrong_bytes", "due_pages", "other_pages")]
            for e in errors
        ],
    )
    first = next((e for e in errors if e["due_pages"]), errors[0])
    print(f"\nWRONG: {sum(e['wrong_bytes'] for e in errors):,} bytes. The first: {first['first']}.")
    return WRONG


def total(requests: list[dict[str, Any]]) -> dict[str, Any]:
    """The sum of all requests, as one more."""
    fields = ("tokens", "pages", "chunks", "descriptors", "bytes", "plan_s", "transfer_s")
    return {"id": "total", **{field: sum(request[field] for request in requests) for field in fields}}


def print_table(heads: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as their widest cell; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    for cells in [heads, *rows]:
        print("  ".join([cells[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(cells[1:], widths[1:], strict=True))]))
