"""A short run of `python -m tests.soak`; and that it finds a `settle` that lies."""

from __future__ import annotations

import pytest
from engine_peer import APART, need
from soak.soak import Soak, Wrong


@pytest.mark.slow
@pytest.mark.parametrize("kind", APART)
def test_no_byte_changes_once_it_is_called_settled(kind, tmp_path):
    need(kind)
    soak = Soak(kind, tmp_path, seed=11)
    try:
        for _ in range(20):
            soak.round()
    except BaseException:
        soak.stop()
        raise
    soak.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", APART)
def test_a_settle_that_lies_is_found_out(kind, tmp_path):
    need(kind)
    soak = Soak(kind, tmp_path, seed=4, lie=True)
    with pytest.raises(Wrong, match="have changed after they were called settled"):
        try:
            for _ in range(25):
                soak.once("refuse" if kind == "mooncake" else "stop", 500)
        finally:
            soak.stop()
