"""What comes from a peer is either right or refused in words: a bounded run of the fuzzer (see tests/fuzz).

KVPLAN_FUZZ runs that many inputs of each target; `python -m tests.fuzz` runs for as long as wanted.
"""

from __future__ import annotations

import os
import random
import tracemalloc

import pytest
from fuzz import targets, values
from hypothesis import given
from hypothesis import strategies as st
from strategies import clusters, profile

import kvplan
from kvplan import Layout, LayoutError
from kvplan.layout import MAX_REGIONS

INPUTS = int(os.environ.get("KVPLAN_FUZZ", "1000"))

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(values.EDGES),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture
def traced():
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.parametrize("target", [*targets.TARGETS])
def test_inputs_of(target, traced):
    seen = {targets.attempt(target, number) for number in range(INPUTS)}
    assert {
        "layout": {"refused", "planned"},
        "session": {"refused", "taken"},
        "metadata": {"refused", "taken"},
        "pages": {"refused", "planned"},
    }[target] <= seen


@given(JSON)
@profile(300)
def test_any_value_is_no_layout_or_one(data):
    targets.decoded(data)


FIELDS = ["name", "layer", "base", "page_bytes", "num_pages", "page_stride", "tokens", "rows", "row_bytes", "space",
          "memory", "heads", "interleave"]  # fmt: skip


@given(st.data())
@profile(300)
def test_any_value_in_any_place_of_a_layout(data):
    told = values.layout(random.Random(data.draw(st.integers(0, 99))))
    place = data.draw(st.sampled_from(["page_size", "replica", "regions", *FIELDS]))
    if place in told:
        told[place] = data.draw(JSON)
    elif told["regions"]:
        told["regions"][-1][place] = data.draw(JSON | st.lists(st.sampled_from(values.EDGES), min_size=2, max_size=3))
    targets.decoded(told)


@given(clusters())
@profile(100)
def test_layouts_of_clusters_come_back_as_they_were(cluster):
    for src, dst in cluster.pairs():
        for layout in (src, dst):
            assert targets.decoded(layout.to_dict()) == layout


def regions(count):
    return [{"name": "kv", "layer": k, "base": k << 12, "page_bytes": 64, "num_pages": 8} for k in range(count)]


def test_as_many_regions_as_are_read():
    layout = Layout.from_dict({"page_size": 16, "regions": regions(MAX_REGIONS)})
    assert len(kvplan.pair(layout, layout).entries) == MAX_REGIONS == 65_536


def test_more_regions_are_refused_before_any_is_built(traced):
    for told in (regions(MAX_REGIONS + 1), [None] * 10_000_000):
        with targets.bounded(0), pytest.raises(LayoutError, match=f"has {len(told)} regions; at most 65536 are read"):
            Layout.from_dict({"page_size": 16, "regions": told})


@pytest.mark.parametrize("bad", ["x" * 1_000_000, True, None, 1.0, [], {}, 10**5000, values.deep(5000)], ids=range(8))
def test_one_wrong_id_among_many_is_named_and_takes_no_memory(bad, traced):
    """NumPy would make strings of all, as long as the longest: 400 GB for these."""
    layout = Layout([kvplan.Region("kv", 0, 1 << 20, 64, 200_000)], page_size=4)
    pairing = kvplan.pair(layout, layout)
    ids = [*range(100_000)]
    for lists in ((ids, [*ids[:-1], bad]), ([*ids[:-1], bad], ids)):
        with (
            targets.bounded(0),
            pytest.raises(kvplan.PlanError, match="list of page ids|16610 bits at position 99999") as caught,
        ):
            pairing.plan(*lists)
        assert len(str(caught.value)) < 300


def test_strides_that_take_too_long_to_compare_are_refused_as_a_whole():
    """Each pair of regions takes 2**20 steps: all of them would take days."""
    regions = [
        {"name": "kv", "layer": k, "base": k, "page_bytes": 1, "num_pages": 1 << 20,
         "page_stride": (1 << 12) * ((1 << 21) + 1 + 2 * k)}
        for k in range(1000)
    ]  # fmt: skip
    layout = Layout.from_dict({"page_size": 1, "regions": regions})
    with pytest.raises(kvplan.PairingError, match="takes too many comparisons"):
        kvplan.pair(layout, layout)


def test_the_fuzzer_sees_what_it_looks_for(traced):
    """Errors of another kind, messages that cannot be shown, memory, time."""
    refused, fault = targets.refused, targets.Fault

    def nested(value):
        return nested(value)

    def fail(error):
        raise error

    for call, told in (
        (lambda: nested(1), "RecursionError"),
        (lambda: fail(TypeError("x")), "TypeError"),
        (lambda: fail(ValueError("x")), "ValueError"),
        (lambda: fail(MemoryError()), "MemoryError"),
        (lambda: fail(LayoutError("x" * 5000)), "message of 5000"),
        (lambda: fail(LayoutError("\x1b[2J")), "message of 4"),
        (lambda: fail(LayoutError("")), "message of 0"),
    ):
        with pytest.raises(fault, match=told):
            refused(call, LayoutError)
    with pytest.raises(fault, match="took"), targets.bounded(1):
        bytearray(8 << 20)
