"""A short run of `python -m tests.soak`; and that it finds a `settle` that lies."""

from __future__ import annotations

import numpy as np
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


@pytest.mark.parametrize("kind", APART)
def test_one_changed_byte_is_found(kind, tmp_path):
    need(kind)
    soak = Soak(kind, tmp_path, seed=3)
    try:
        soak.once("cancel", 10)
        soak.check(np.arange(20))
        soak.gappy[7, -1] ^= 1
        with pytest.raises(Wrong, match="1 pages of gappy have changed after they were called settled; page 7 should"):
            soak.check(np.arange(20))
    finally:
        soak.stop()


@pytest.mark.slow
def test_a_settle_that_lies_is_found_out(tmp_path):
    """Over NIXL. Over Mooncake a run with `--lie` mostly ends by a hang of the engine before it has found anything."""
    need("nixl")
    soak = Soak("nixl", tmp_path, seed=4, lie=True)
    with pytest.raises(Wrong, match="have changed after they were called settled"):
        try:
            for _ in range(25):
                soak.once("stop", 500)
        finally:
            soak.stop()
