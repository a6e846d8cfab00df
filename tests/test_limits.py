"""Time limits: what is one, and what is refused."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from kvplan.engines.limits import deadline_of, left, seconds


@pytest.mark.parametrize("value", [None, math.inf, 1e300, np.float64("inf")])
def test_no_limit(value):
    assert seconds(value, "timeout") is None
    assert left(deadline_of(seconds(value, "timeout"))) is None


@pytest.mark.parametrize("value", [0, 0.0, 1, 2.5, np.float32(0.5), np.int64(3), -0.0])
def test_a_limit(value):
    assert seconds(value, "timeout") == value
    begun = time.monotonic()
    assert deadline_of(seconds(value, "timeout")) >= begun + float(value)
    assert 0 <= left(begun + float(value)) <= float(value)


def test_a_deadline_that_has_passed_leaves_nothing():
    assert left(time.monotonic() - 5) == 0


@pytest.mark.parametrize("value", [math.nan, -1, -1e-9, -math.inf, "5", True, [1], 1j, np.float64("nan")])
def test_what_is_no_limit_is_refused_by_name(value):
    with pytest.raises(ValueError, match="^timeout "):
        seconds(value, "timeout")
