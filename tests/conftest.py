"""The order in which files of tests are run."""

from __future__ import annotations

import pytest

LONG = ("test_triton.py", "test_sanitizers.py", "test_properties.py", "test_fuzz.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take minutes come first. `make test` runs two files at a time, and a long one would be left alone."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
