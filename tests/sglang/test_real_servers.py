"""SGLang's real servers: tokens equal and every KV row equal, over the topologies that SGLang serves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent / "real"
ALONE = {
    "llama": ["--scatter"],
    "mla": ["--scatter"],
}
TOPOLOGIES = [
    ("llama", "--tp 1 2 --scatter"), ("llama", "--tp 2 1 --scatter"), ("llama", "--pp 2 1 --scatter"),
    ("llama", "--chunk 64 --scatter"), ("llama", "--page-size 1 --scatter"), ("mla", "--tp 1 2"), ("mla", "--tp 2 1"),
    ("mla", "--pp 2 1 --chunk 64 --scatter"),
]  # fmt: skip


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    subprocess.run([sys.executable, HERE / "models.py", folder], check=True)
    return folder


def serve(models: Path, model: str, arguments: list[str], **environment: str) -> tuple[int, dict[str, Any]]:
    command = [sys.executable, HERE / "servers.py", models / model, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=os.environ | environment)
    assert done.stdout.strip(), done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout.splitlines()[-1])


def check(code: int, found: dict[str, Any], function: str) -> None:
    assert code == 0 and found["tokens equal"] and found["rows that differ"] == 0, found
    assert found["requests"] == 11 and found["bytes compared"] > 300_000
    assert f"kvplan has planned its first {function}" in found["said"]
    assert not [line for line in found["said"] if "leaves" in line or "refuses" in line]


@pytest.mark.parametrize("model", ALONE)
def test_a_transfer_of_each_model(models: Path, model: str) -> None:
    check(*serve(models, model, ALONE[model]), "send_kvcache")


@pytest.mark.parametrize("model, arguments", TOPOLOGIES)
def test_topologies(models: Path, model: str, arguments: str) -> None:
    sliced = model == "llama" and "--tp" in arguments
    check(*serve(models, model, arguments.split()), "send_kvcache_slice" if sliced else "send_kvcache")


@pytest.mark.parametrize("model", ALONE)
def test_two_pages_that_change_places_are_noticed(models: Path, model: str) -> None:
    code, found = serve(models, model, ["--scatter", "--fault", "swap"])
    assert code == 1 and found["rows that differ"] > 0


def test_switched_off(models: Path) -> None:
    code, found = serve(models, "llama", ["--scatter"], KVPLAN_SGLANG="0")
    assert code == 0 and found["rows that differ"] == 0
    assert not [line for line in found["said"] if "planned" in line or "plans" in line]
