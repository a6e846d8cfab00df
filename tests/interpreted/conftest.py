"""Triton kernels in Triton's interpreter: collected only where TRITON_INTERPRET=1, which tests/test_triton.py sets for
each release. The folder is not called `triton`: tests/ is on the path, and it would be taken for the package."""

import os

import pytest
from hypothesis import settings

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]

# The interpreter takes a tenth of a second a plan, and every run should draw the same.
settings.register_profile("interpreted", max_examples=20, deadline=None, derandomize=True)
settings.load_profile("interpreted")


@pytest.fixture(autouse=True)
def no_leftovers(monkeypatch):
    """Memory that kernels do not write holds rubbish, so that a test does not pass by luck."""
    import torch

    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
