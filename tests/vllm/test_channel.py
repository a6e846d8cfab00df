"""The side channel: what is asked, told and refused; and the releases, settings and caches that are refused."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import zmq
from engines import free_port

from kvplan.integrations.vllm.channel import ChannelError, Server, Teller, address, ask, refuses
from kvplan.integrations.vllm.leases import Leases
from kvplan.integrations.vllm.scheduler import Scheduler
from kvplan.integrations.vllm.seam import check_version
from kvplan.integrations.vllm.settings import Settings

PORT = free_port()
HOST = "127.0.0.1"


@pytest.fixture
def leases() -> Leases:
    return Leases(30)


@pytest.fixture
def server(leases: Leases) -> Iterator[Server]:
    made = Server(HOST, PORT, "engine 1", [{"rank": 0}], leases)
    yield made
    made.close()


def until(happens: Any) -> None:
    end = time.monotonic() + 10
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_handshake(server: Server) -> None:
    reply = ask(HOST, PORT, "handshake", 10, engine="engine 1")
    assert reply == {"instance": server.instance, "ranks": [{"rank": 0}]}
    with pytest.raises(ChannelError, match="this is engine engine 1, not 'engine 2'"):
        ask(HOST, PORT, "handshake", 10, engine="engine 2")


def test_a_lease_is_of_one_instance(server: Server, leases: Leases) -> None:
    leases.hold("a")
    assert ask(HOST, PORT, "held", 10, instance=server.instance, request="a") == {"held": True}
    assert ask(HOST, PORT, "held", 10, instance=server.instance, request="b") == {"held": False}
    assert ask(HOST, PORT, "held", 10, instance="an earlier one", request="a") == {"held": False}


def test_what_is_told(server: Server, leases: Leases) -> None:
    leases.hold("a")
    leases.hold("b")
    teller = Teller()
    teller.tell(HOST, PORT, "done", "another engine", ["a", "b"])
    teller.tell(HOST, PORT, "renew", "engine 1", ["a"])
    teller.tell(HOST, PORT, "done", "engine 1", ["b"])
    until(lambda: len(leases) == 1)
    assert leases.released() == ({"b"}, set())
    teller.close()


@pytest.mark.parametrize(
    "message, why",
    [
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[1]", "not a mapping, but a list"),
        (b"{}", "version None is not 1"),
        (b'{"kvplan": 1}', "this is engine engine 1, not None"),
        (b'{"kvplan": 1, "engine": "engine 1", "what": "sing"}', "what is 'sing'"),
        (b'{"kvplan": 1, "engine": "engine 1", "what": "done", "requests": "a"}', "requests must be a list"),
        (
            b'{"kvplan": 1, "engine": "engine 1", "what": "renew", "requests": [1]}',
            "requests must be a list of strings",
        ),
    ],
)
def test_malformed_messages_are_refused_and_the_server_goes_on(server: Server, message: bytes, why: str) -> None:
    with zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.connect(address(HOST, PORT))
        sock.send(message)
        assert sock.poll(10_000)
        assert why in json.loads(sock.recv())["error"]
    assert ask(HOST, PORT, "handshake", 10, engine="engine 1")["instance"] == server.instance


def test_nobody_there() -> None:
    port = free_port()
    with pytest.raises(ChannelError, match="did not answer within 0.2 s"):
        ask(HOST, port, "handshake", 0.2, engine="x")
    assert refuses(HOST, port)


def test_a_port_that_is_taken(server: Server) -> None:
    assert not refuses(HOST, PORT)
    with pytest.raises(RuntimeError, match=rf"cannot listen on tcp://{HOST}:{PORT}.*side_channel_port"):
        Server(HOST, PORT, "engine 2", [], Leases(1))


def test_releases_that_were_not_tried_are_refused() -> None:
    for version in ("0.32.0", "0.32.1+cpu"):
        check_version(version)
    for version in ("0.29.0", "0.3.2", "0.320.0", "1.0"):
        with pytest.raises(ValueError, match=f"and this is vLLM {version}"):
            check_version(version)


def config(**extra: Any) -> Any:
    transfer = SimpleNamespace(kv_connector_extra_config=extra, engine_id="here")
    return SimpleNamespace(kv_transfer_config=transfer, parallel_config=SimpleNamespace(data_parallel_index=2))


@pytest.mark.parametrize(
    "extra, why",
    [
        ({"engin": "nixl"}, "has 'engin', which KvplanConnector does not know"),
        ({"engine": "ascend"}, "engine is 'ascend'"),
        ({"engine_options": "tcp"}, "engine_options must be a mapping, not 'tcp'"),
        ({"side_channel_port": 0}, "side_channel_port must be an integer from 1 to 65535, not 0"),
        ({"side_channel_port": True}, "side_channel_port must be an integer"),
        ({"side_channel_host": ""}, "side_channel_host must be a name or an address"),
        ({"kv_lease_duration": "30"}, "kv_lease_duration must be a number from 1 to 1e.09, not '30'"),
        ({"side_channel_timeout": 0}, "side_channel_timeout must be a number"),
    ],
)
def test_settings_that_are_refused(extra: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Settings.of(config(**extra))


def test_settings() -> None:
    found = Settings.of(config(side_channel_port=7000))
    assert (found.engine, found.port, found.lease) == ("nixl", 7002, 30)
    with pytest.raises(ValueError, match="engine_options of the nixl engine: .*'colour'"):
        Settings.of(config(engine_options={"colour": 1})).make_engine()


def test_mooncake_is_reached_where_the_side_channel_is() -> None:
    settings = Settings.of(config(engine="mooncake", side_channel_host="127.0.0.1"))
    with settings.make_engine() as engine:
        assert engine.session.startswith("127.0.0.1:")


PARAMS = {
    "do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": HOST,
    "remote_port": 1, "remote_block_ids": [[1]], "remote_num_tokens": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    "field, value",
    [
        ("remote_engine_id", None), ("remote_request_id", 7), ("remote_host", None), ("remote_port", "1"),
        ("remote_port", True), ("remote_num_tokens", -1), ("remote_num_tokens", "5"), ("remote_block_ids", None),
        ("remote_block_ids", []), ("remote_block_ids", [1]), ("remote_block_ids", [["1"]]),
        ("remote_block_ids", [[-1]]), ("remote_block_ids", [[1 << 63]]),
    ],
)  # fmt: skip
def test_requests_with_malformed_parameters_are_computed_here(
    field: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    half = Scheduler(config(), Settings.of(config()))
    request = SimpleNamespace(request_id="7", kv_transfer_params=PARAMS | {field: value}, num_prompt_tokens=9)
    half.on_new_request(request)
    assert half.matched_tokens(request, 0) == (0, False)
    fine = SimpleNamespace(request_id="8", kv_transfer_params=dict(PARAMS), num_prompt_tokens=9)
    half.on_new_request(fine)
    assert half.matched_tokens(fine, 2) == (3, True)
    half.close()


def test_prefill_leaves_the_last_token_to_decode_where_layers_have_windows() -> None:
    for windows, left in ((False, [5, 6, 7]), (True, [5, 6])):
        half = Scheduler(config(), Settings.of(config()), windows)
        request = SimpleNamespace(
            request_id="7", kv_transfer_params={"do_remote_decode": True}, prompt_token_ids=[5, 6, 7],
            _all_token_ids=[5, 6, 7], num_prompt_tokens=3, max_tokens=9,
        )  # fmt: skip
        half.on_new_request(request)
        assert request.prompt_token_ids == request._all_token_ids == left and request.num_prompt_tokens == len(left)
        half.close()
    here = SimpleNamespace(request_id="8", kv_transfer_params=PARAMS | {"remote_num_tokens": 2}, num_prompt_tokens=3)
    half = Scheduler(config(), Settings.of(config()), True)
    half.on_new_request(here)
    assert half.matched_tokens(here, 0) == (2, True)
    half.close()
