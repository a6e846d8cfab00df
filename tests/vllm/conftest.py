"""These tests run in vLLM's environment (`make vllm`); elsewhere tests/test_vllm.py runs one of them there."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

try:
    THERE = importlib.util.find_spec("vllm.v1") is not None
except ModuleNotFoundError:
    THERE = False
collect_ignore_glob = [] if THERE else ["*"]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of tiny models with random weights."""
    from models import make

    folder = tmp_path_factory.mktemp("models")
    for kind in ("llama", "windows"):
        make(kind, folder / kind)
    yield folder
