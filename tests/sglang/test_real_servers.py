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
MODELS = ("llama", "mla")
TOPOLOGIES = ["--tp 1 2", "--tp 2 1", "--pp 2 1", "--chunk 64", "--page-size 1", "--tp 2 1 --chunk 64"]
PAGE_SIZES = [
    "--decode-page-size 64",
    "--page-size 64 --decode-page-size 16 --tp 1 2",
    "--decode-page-size 64 --chunk 80 --pp 2 1",
]
SCATTER = "--scatter"  # the pages of a request lie apart, in no order


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


def check(found: dict[str, Any], function: str) -> None:
    assert found["tokens equal"] and found["rows that differ"] == 0, found
    assert found["requests"] == 11 and found["bytes compared"] > 300_000
    assert f"kvplan has planned its first {function}" in found["said"]
    assert not [line for line in found["said"] if "leaves" in line or "refuses" in line]


@pytest.mark.parametrize("model", MODELS)
def test_a_transfer_of_each_model(models: Path, model: str) -> None:
    code, found = serve(models, model, [SCATTER])
    check(found, "send_kvcache")
    assert code == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("arguments", TOPOLOGIES)
def test_topologies(models: Path, model: str, arguments: str) -> None:
    sliced = model == "llama" and "--tp" in arguments
    code, found = serve(models, model, [*arguments.split(), SCATTER])
    check(found, "send_kvcache_slice" if sliced else "send_kvcache")
    assert code == 0


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("arguments", PAGE_SIZES)
def test_page_sizes_that_differ(models: Path, model: str, arguments: str) -> None:
    sliced = model == "llama" and "--tp" in arguments
    code, found = serve(models, model, [*arguments.split(), SCATTER])
    check(found, "send_kvcache_slice" if sliced else "send_kvcache")
    assert code == 0


def test_stages_of_unequal_size(models: Path) -> None:
    code, found = serve(models, "llama_of_3_layers", ["--pp", "2", "1", SCATTER])
    check(found, "send_kvcache")
    assert code == 0
    code, found = serve(models, "llama_of_3_layers", ["--pp", "2", "1", SCATTER], KVPLAN_SGLANG="0")
    assert code == 1 and found["rows that differ"] > 0, "SGLang has become right"


@pytest.mark.parametrize("model, arguments", [("llama", ""), ("mla", ""), ("llama", "--tp 1 2")])
def test_two_pages_that_change_places_are_noticed(models: Path, model: str, arguments: str) -> None:
    code, found = serve(models, model, [*arguments.split(), SCATTER, "--fault", "swap"])
    assert code == 1 and found["rows that differ"] > 0


def test_switched_off(models: Path) -> None:
    code, found = serve(models, "llama", [SCATTER], KVPLAN_SGLANG="0")
    assert code == 0 and found["rows that differ"] == 0
    assert not [line for line in found["said"] if "planned" in line or "plans" in line]
