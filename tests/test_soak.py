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
    """A run that ends by a hang of the engine says nothing of the lie, so the next one tries."""
    need(kind)
    for seed in (4, 5, 6):
        (tmp_path / str(seed)).mkdir()
        soak = Soak(kind, tmp_path / str(seed), seed=seed, lie=True)
        try:
            for _ in range(25):
                soak.once("refuse" if kind == "mooncake" else "stop", 500)
        except Wrong as error:
            if "have changed after they were called settled" in str(error):
                return
            assert "neither ends nor settles" in str(error)
        finally:
            soak.stop()
    pytest.fail("no run found the lie")
