"""SGLang's own KV manager, sender, receiver and bootstrap server, in a prefill and a decode process, over TCP.

No model and no GPU: the pools are NumPy arrays (pools.py), and every byte of the decode side is compared.

    python tests/sglang/two_processes.py v4 [--backend NIXL | ASCEND] [--off prefill] [--off decode] [--bad ROOM]
        [--malformed] [--restart] [--by-layer]

Prints one JSON object: what each side ended with. --off: that side runs without the plugin. The back end is Mooncake,
NIXL over UCX (nixl_stand_in.py), or Ascend's with a stand-in of its engine (memfabric_stand_in.py).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import pools
import sglang_pools
from pools import ids

warnings.filterwarnings("ignore")
CASES = pools.CASES | pools.ASCEND_CASES
ROOMS = 4
SEED = 7
OWN: list[Any] = []  # SGLang's own pools, kept as long as peers may write
SECONDS = 60.0  # for one room; generous, since machines are loaded


def manager(
    role: str, case: pools.Case, port: int, backend: str, tp_rank: int = 0
) -> tuple[Any, list[Any], list[Any], list[list[Any]]]:
    """The manager that `get_kv_class` chooses, over pools of its own.

    Returns:
        manager, KV buffers, auxiliary buffers, and the buffers of each state component.
    """
    os.environ.update(MC_FORCE_TCP="1", MOONCAKE_PROTOCOL="tcp", SGLANG_HOST_IP="127.0.0.1", MC_LOG_LEVEL="ERROR")
    if backend == "NIXL":
        import nixl_stand_in

        nixl_stand_in.install()
    if backend == "ASCEND":
        import memfabric_stand_in

        memfabric_stand_in.install()
    from sglang.srt.runtime_context import get_context, get_parallel

    server_args = get_context().override_server_args(
        disaggregation_mode=role, disaggregation_bootstrap_port=port, host="127.0.0.1", device="cpu"
    ).install()  # fmt: skip
    size, rank = case.dcp if role == "decode" else (1, 0)
    tp_size = case.ranks if role == "decode" else 1
    get_parallel().override_permanently(
        tp_size=tp_size, moe_tp_size=tp_size, attn_tp_size=tp_size, tp_rank=tp_rank, moe_tp_rank=tp_rank,
        attn_tp_rank=tp_rank, pp_rank=0, attn_dp_rank=0, attn_cp_rank=0, attn_dcp_size=size, attn_dcp_rank=rank,
        pp_group=object(),
    )  # fmt: skip
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.disaggregation.base.conn import KVArgs, StateType
    from sglang.srt.disaggregation.utils import DisaggregationMode, KVClassType, TransferBackend, get_kv_class

    if backend == "MOONCAKE":
        from sglang.srt.distributed.device_communicators import mooncake_transfer_engine

        mooncake_transfer_engine.init_mooncake_transfer_engine("127.0.0.1", 0, None)
    prefill = role == "prefill"
    kv_pages = case.prefill if prefill else case.decode
    kv, aux, window = (pools.filled(pages, SEED + k) if prefill else pools.empty(pages)
                       for k, pages in enumerate((kv_pages, [64], case.window)))  # fmt: skip
    states = [window] if window else []
    if case.own:
        OWN.append(sglang_pools.Prefill() if prefill else sglang_pools.Decode())
        kv, states = OWN[0].views, OWN[0].states
    if case.groups > 1:
        OWN.append(sglang_pools.LatentNpu(pools.POOL, case.page_size, len(kv) // case.groups))
        for view, known in zip(OWN[0].views, kv, strict=True):
            view[:] = known
        kv = OWN[0].views
    assert [view.shape for view in kv] == [(len(view), each) for view, each in zip(kv, kv_pages, strict=True)]

    def columns(buffers: list[Any]) -> tuple[list[int], list[int], list[int]]:
        return [b.ctypes.data for b in buffers], [b.nbytes for b in buffers], [b.shape[1] for b in buffers]

    args = KVArgs()
    args.engine_rank = tp_rank
    args.pp_rank = args.system_dp_rank = args.gpu_id = 0
    args.rust_http_port = args.ib_device = None
    args.kv_cache_dtype_str = "fp8"
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = columns(kv)
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = columns(aux)
    args.kv_layer_ids = []
    if backend == "NIXL":
        args.kv_data_mem_kinds = ["DRAM" if not prefill and number < case.host else "VRAM" for number in range(len(kv))]
    layers = len(case.prefill) - case.draft[0]
    layers = len(case.ratios) if case.ratios else layers // (2 if case.heads else case.groups)
    if case.groups > 1:
        from sglang.srt.disaggregation.utils import setup_state_kv_args

        setup_state_kv_args(args, OWN[0].pool, None, layers)
        assert args.kv_buf_groups == case.groups and not args.state_types
    elif case.own:
        OWN[0].describe_states(args)
        assert args.mla_compression_ratios == case.ratios and len(args.state_types) == len(states) == 2
    else:
        args.state_types = [StateType.SWA] * len(states)
        found = [columns(buffers) for buffers in states]
        args.state_data_ptrs, args.state_data_lens, args.state_item_lens = ([f[k] for f in found] for k in range(3))
        args.state_layer_ids = args.state_dim_per_tensor = args.state_slice_outer_counts = [[] for _ in states]
        args.state_conv_shard_groups = [[] for _ in states]
    args.kv_head_num, args.total_kv_head_num = max(1, case.heads // tp_size), max(1, case.heads)
    args.page_size = case.page_size if prefill else case.decode_page_size
    args.prefill_start_layer, args.prefill_end_layer = 0, layers
    args.mla_compression_ratios, args.num_draft_entries = case.ratios, case.draft[0 if prefill else 1]
    if prefill:
        import requests

        get_kv_class(TransferBackend[backend], KVClassType.BOOTSTRAP_SERVER)("127.0.0.1", port)
        for _ in range(600):
            try:
                if requests.get(f"http://127.0.0.1:{port}/health", timeout=1).status_code == 200:
                    break
            except requests.RequestException:
                time.sleep(0.1)
    chosen = get_kv_class(TransferBackend[backend], KVClassType.MANAGER)
    mode = DisaggregationMode.PREFILL if prefill else DisaggregationMode.DECODE
    more = {}
    if backend == "ASCEND" and prefill:  # as SGLang's prefill server asks of its pool
        more["dcp_remote_decode_layout"] = OWN[0].pool.get_dcp_remote_decode_layout() if case.groups > 1 else []
    return chosen(args, mode, server_args, not case.heads, **more), kv, aux, states


def wait(thing: Any, states: tuple[int, ...], seconds: float = SECONDS) -> int:
    """Poll a sender or receiver until it is in one of these states."""
    end = time.time() + seconds
    while thing.poll() not in states and time.time() < end:
        time.sleep(0.005)
    return int(thing.poll())


def tell(what: str, **fields: Any) -> None:
    """A line for the parent process."""
    print(what + " " + json.dumps(fields), flush=True)


def prefill(case: pools.Case, port: int, options: argparse.Namespace) -> None:
    """Send all rooms, one after another."""
    made, *_ = manager("prefill", case, port, options.backend)
    calls = _counted(made)
    if options.by_layer:  # as with a custom memory pool, which itself needs CUDA
        made.enable_custom_mem_pool, made.custom_mem_pool_type = True, "NVLINK"
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    sender_class = get_kv_class(TransferBackend[options.backend], KVClassType.SENDER)
    tell("READY")
    polls, pairings = [], []
    for room in range(ROOMS * (2 if options.restart else 1)):
        sender = sender_class(made, f"127.0.0.1:{port}", room)
        sender.init(case.pages, 3)
        wait(sender, (KVPoll.WaitingForInput, KVPoll.Failed), 3 * SECONDS)
        src = ids("prefill", room, case.pages)
        for start in range(0, case.pages, case.chunk):
            stop = min(start + case.chunk, case.pages)
            state = _state_ids(case, room) if stop == case.pages else None
            tokens = min(stop * case.page_size, case.tokens) - start * case.page_size
            sender.send(src[start:stop], state, num_kv_tokens=tokens)
        polls.append(wait(sender, (KVPoll.Success, KVPoll.Failed)))
        sender.clear()
        pairings.append(len(made.peers) if hasattr(made, "peers") else None)
    notes = getattr(made, "notes", None)
    tell("PREFILL", manager=type(made).__name__, polls=polls, planned=dict(notes.planned) if notes else None,
         left=[list(key) for key in notes.left] if notes else None, pairings=pairings, calls=calls)  # fmt: skip
    sys.stdin.readline()  # until the decode side is done
    os._exit(0)


def _counted(made: Any) -> list[int]:
    """How many descriptors each table has that kvplan hands Mooncake from now on; empty without it."""
    counts: list[int] = []
    hand_over = getattr(made, "_hand_over", None)
    if hand_over is not None:

        def counted(session: str, table: Any) -> int:
            counts.append(table.shape[1])
            return int(hand_over(session, table))

        made._hand_over = counted
    return counts


def _state_ids(case: pools.Case, room: int) -> list[list[int]] | None:
    """Item ids of the prefill side in each state component."""
    if case.own:
        return [found.tolist() for found in OWN[0].state_ids(room, case.tokens)]
    return [ids("window", room, 4).tolist()] if case.window else None


def decode(case: pools.Case, port: int, options: argparse.Namespace) -> None:
    """Receive all rooms, and compare every byte after each."""
    made, kv, aux, states = manager("decode", case, port, options.backend, options.rank)
    from sglang.srt.disaggregation.base.conn import KVPoll
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend, get_kv_class

    receiver_class = get_kv_class(TransferBackend[options.backend], KVClassType.RECEIVER)
    address = f"127.0.0.1:{port}"
    end = time.time() + 3 * SECONDS
    while not made.try_ensure_parallel_info(address) and time.time() < end:
        time.sleep(0.2)
    peer = sglang_pools.Prefill() if case.own else None
    source = peer.views if peer else pools.filled(case.prefill, SEED)
    source_aux = pools.filled([64], SEED + 1)[0]
    source_states = peer.states if peer else [pools.filled(case.window, SEED + 2)]
    everything = [*kv, *aux, *(array for buffers in states for array in buffers)]
    one_list = options.one_list or case.heads > 0 or case.groups == 3 or case.other_page_size is not None
    results: list[Any] = []
    for room in range(options.first, options.first + ROOMS):
        for array in everything:
            array[:] = 0
        receiver = receiver_class(made, address, room)
        asked = _noted(receiver, states, one_list)
        receiver.init(0)
        if options.malformed and room == options.first:
            (_send_malformed_nixl if options.backend == "NIXL" else _send_malformed)(receiver, made, room)
        if case.own:
            OWN[0].preallocate(made, receiver, room, case.tokens)
        else:
            host, device = (ids(space, room, case.decode_pages) for space in ("host", "device"))
            if room == options.bad:
                host[7] = 1_000_000
            window = [ids("window to", room, 4).tolist()] if case.window else []
            receiver.send_metadata(host, 5, window, decode_prefix_len=0, device_kv_indices=device)
        if wait(receiver, (KVPoll.Success, KVPoll.Failed)) != KVPoll.Success:
            results.append(str(made.failure_records.get(room)))
            touched = any(array.any() for array in everything)
            results[-1] += " (memory was written)" if touched else ""
            receiver.clear()
            continue
        wrong = pools.first_wrong(case, kv, source, room, asked, options.rank)
        mine = (peer.state_ids(room, case.tokens) if peer else [ids("window", room, 4)])[: len(states)]
        for component, (src, dst) in enumerate(zip(mine, asked["states"], strict=True)):
            for number, array in enumerate(states[component]):
                want = asked["before"][component][number]
                want[dst] = source_states[component][number][src]
                wrong = wrong or (None if (want == array).all() else f"state {component}, buffer {number}")
        wrong = wrong or (None if (aux[0][asked["aux"]] == source_aux[3]).all() else "auxiliary data")
        results.append(wrong or True)
        receiver.clear()
    tell("DECODE", manager=type(made).__name__, rooms=results)
    os._exit(0)


def _noted(receiver: Any, states: list[list[Any]], one_list: bool) -> dict[str, Any]:
    """What a receiver will ask for: "host" and "device" page ids, "states", "aux", and the states "before".

    With `one_list` it numbers all pages alike.
    """
    asked: dict[str, Any] = {}
    send = receiver.send_metadata

    def noted(host: Any, aux: int, state_ids: Any, *, device_kv_indices: Any, **more: Any) -> None:
        device = host if one_list else device_kv_indices
        before = [[array.copy() for array in buffers] for buffers in states]
        asked.update(host=host, device=device, states=state_ids or [], aux=aux, before=before)
        send(host, aux, state_ids, device_kv_indices=None if one_list else device, **more)

    receiver.send_metadata = noted
    return asked


def _send_malformed(receiver: Any, made: Any, room: int) -> None:
    """Messages that would end SGLang's thread, ahead of the right ones."""
    for info in receiver.bootstrap_infos:
        good = made.build_receiver_registration_message()
        for place, frame in ((4, good[4][:-3]), (8, b"x"), (10, b"\xff\xff\xff\xff"), (3, b"nowhere"), (16, b"7")):
            bad = [*good[:place], frame, *good[place + 1 :]]
            if place != 3:
                bad[3] = b"127.0.0.1:1"
            receiver._send_bootstrap_message(bootstrap_info=info, message=bad, operation="malformed")
        for bad in ([b"None"], [], [b"\xff\xfe", *good[1:]], [b"77", *good[1:4], b"\1", b"2", b"", b"1"]):
            if bad:
                receiver._send_bootstrap_message(bootstrap_info=info, message=bad, operation="malformed")


def _send_malformed_nixl(receiver: Any, made: Any, room: int) -> None:
    """The same for NIXL: wrong frames, by their places in the right message."""
    lists = {"bootstrap_room": 1000, "required_dst_info_num": 1, "kv_indices": ids("host", 0, 4), "aux_index": 5,
             "state_indices": [], "decode_prefix_len": 0, "is_dummy": False,
             "device_kv_indices": ids("device", 0, 4)}  # fmt: skip
    registration, ids_of = made.build_receiver_registration_message(), made.build_receiver_metadata_message(**lists)
    registration[4] = b"another agent"
    wrong = [(registration, 6, registration[6][:-3]), (registration, 10, b"0"), (registration, 13, b"\xff\xff\xff\xff"),
             (registration, 18, b"VRAM,CPU"), (registration, 19, registration[19][8:]), (registration, 22, b"0"),
             (registration, 5, b"no metadata"), (registration, 25, b"no layout"), (registration, 0, b"None"),
             (ids_of, 1, b"-7"), (ids_of, 5, b"123"), (ids_of, 6, b"None"), (ids_of, 11, ids_of[11][:-2]),
             (ids_of, 11, b"kvplan ids 1\n" + b"\xff" * 8), (ids_of, 5, b"\1\0\0\0")]  # fmt: skip
    for info in receiver.bootstrap_infos:
        for good, place, frame in wrong:
            bad = [*good[:place], frame, *good[place + 1 :]]
            receiver._send_bootstrap_message(bootstrap_info=info, message=bad, operation="malformed")


def run(name: str, arguments: list[str], off: list[str], restart: bool) -> dict[str, Any]:
    """Both processes; what each told, as {"PREFILL": ..., "DECODE": [...]}, and their logs."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder = Path(tempfile.mkdtemp(prefix="kvplan-sglang-"))

    def start(role: str, *more: str) -> subprocess.Popen[str]:
        environment = os.environ | {"KVPLAN_SGLANG": "0" if role in off else "1"}
        if role in off:  # SGLang hands Mooncake all descriptors at once; its TCP queue ends at about 2,048
            environment.setdefault("SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES", "8")
        return subprocess.Popen(
            [sys.executable, __file__, name, *arguments, "--role", role, "--port", str(port), *more], text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(folder / f"{role}{'-'.join(more)}.log").open("w"),
            env=environment,
        )  # fmt: skip

    children: list[subprocess.Popen[str]] = []
    found: dict[str, Any] = {"DECODE": []}

    def lines(child: subprocess.Popen[str], until: str) -> None:
        for line in child.stdout or ():
            word, _, rest = line.partition(" ")
            if word == until:
                if word == "DECODE":
                    found[word].append(json.loads(rest))
                elif word == "PREFILL":
                    found[word] = json.loads(rest)
                return
        raise RuntimeError(f"a process ended before it said {until}: see {folder}")

    try:
        children.append(start("prefill"))
        lines(children[0], "READY")
        for life in range(2 if restart else 1):
            ranks = range(CASES[name].ranks)
            children += [start("decode", "--first", str(life * ROOMS), "--rank", str(rank)) for rank in ranks]
            for child in children[-len(ranks) :]:
                lines(child, "DECODE")
        lines(children[0], "PREFILL")
    finally:
        for child in children:
            child.kill()
            child.wait()
    found["log"] = {path.name: path.read_text() for path in folder.iterdir()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--backend", choices=["MOONCAKE", "NIXL", "ASCEND"], default="MOONCAKE")
    parser.add_argument("--off", action="append", default=[], choices=["prefill", "decode"])
    parser.add_argument("--bad", type=int, default=-1, help="a room that names a host page that does not exist")
    parser.add_argument("--malformed", action="store_true", help="the decode side first sends malformed messages")
    parser.add_argument("--one-list", action="store_true", help="decode numbers all its pages alike")
    parser.add_argument("--restart", action="store_true", help="the decode process ends, and another takes its place")
    parser.add_argument("--by-layer", action="store_true", help="a call a layer, as with a custom memory pool")
    parser.add_argument("--role", choices=["prefill", "decode"])
    parser.add_argument("--port", type=int)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    if options.role:
        {"prefill": prefill, "decode": decode}[options.role](CASES[options.case], options.port, options)
        return
    arguments = ["--bad", str(options.bad), "--backend", options.backend]
    arguments += [f"--{flag}" for flag in ("malformed", "restart") if getattr(options, flag)]
    arguments += ["--one-list"] * options.one_list + ["--by-layer"] * options.by_layer
    found = run(options.case, arguments, options.off, options.restart)
    logs = found.pop("log")
    print(json.dumps(found))
    for name, log in logs.items():
        print(f"== {name}\n" + "\n".join(line for line in log.splitlines() if "kvplan" in line or "Error" in line))


if __name__ == "__main__":
    main()
