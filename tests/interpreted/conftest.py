"""Tests of Triton kernels in Triton's interpreter. They are collected only where TRITON_INTERPRET=1, which
tests/test_triton.py sets for each release.

The folder is not called `triton`: tests/ is on Python's path, so it would be imported in place of the package.
"""

import os

import pytest
from hypothesis import settings

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]

# The interpreter takes a tenth of a second for a plan. Every run draws the same examples.
settings.register_profile("interpreted", max_examples=20, deadline=None, derandomize=True)
settings.load_profile("interpreted")


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch):
    """Fills new tensors with rubbish, so that no test passes by luck where a kernel leaves out a word."""
    import torch

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
