"""Regions and layouts: defaults, refusals, round trips, and the geometry of known models."""

import json

import numpy as np
import pytest
import torch

from kvplan import Heads, Interleave, Layout, LayoutError, Memory, Region
from kvplan.layout.models import DEEPSEEK_V4_FLASH_RATIOS


def region(**fields):
    return Region(**({"name": "kv", "layer": 0, "base": 4096, "page_bytes": 64, "num_pages": 8} | fields))


def test_defaults_follow_the_layout():
    r = Layout([region()], page_size=16).regions[0]
    assert (r.page_stride, r.tokens, r.rows, r.row_bytes, r.compression) == (64, 16, 16, 0, 1)  # rows are not guessed
    r = Layout([region(tokens=32, interleave=Interleave(2, 1))], page_size=16).regions[0]
    assert (r.tokens, r.rows, r.compression) == (32, 16, 1)
    r = Layout([region(rows=4, row_bytes=16)], page_size=256).regions[0]
    assert (r.compression, r.row_bytes, r.row_pitch, r.head_pitch) == (64, 16, 16, 16)
    r = Layout([region(row_bytes=4, heads=Heads(0, 2, 8), order="HND")], page_size=16).regions[0]
    assert (r.row_pitch, r.head_pitch, r.scattered) == (2, 32, False)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"base": -1}, "base is -1"),
        ({"base": 1 << 64}, "base is 18446744073709551616"),
        ({"base": 1.0}, "base must be an integer"),
        ({"base": True}, "base must be an integer"),
        ({"base": (1 << 64) - 64, "num_pages": 2}, "end of 64-bit"),
        ({"page_bytes": 0}, "page_bytes is 0"),
        ({"num_pages": 0}, "num_pages is 0"),
        ({"page_stride": 63}, "page_stride 63 is less than page_bytes 64"),
        ({"name": ""}, "name must be a non-empty string"),
        ({"space": None}, "space must be a non-empty string"),
        ({"memory": "VRAM"}, "memory must be a Memory"),
        ({"memory": None}, "memory must be a Memory"),
        ({"heads": (0, 1, 2)}, "heads must be a Heads"),
        ({"tokens": 0}, "tokens is 0"),
        ({"rows": -4}, "rows is -4"),
        ({"row_bytes": -1}, "row_bytes is -1"),
    ],
)
def test_a_bad_region_is_refused_by_name(fields, text):
    with pytest.raises(LayoutError, match=text):
        region(**fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"rows": 5}, "16 tokens a page are no multiple of 5 rows"),
        ({"tokens": 8, "interleave": Interleave(16, 0)}, "no multiple"),
        ({"row_bytes": 5}, "16 rows of 5 bytes exceed page_bytes 64"),
        ({"heads": Heads(0, 3, 8), "row_bytes": 4}, "no multiple of the heads"),
    ],
)
def test_a_region_that_contradicts_its_layout_is_refused(fields, text):
    with pytest.raises(LayoutError, match=text):
        Layout([region(**fields)], page_size=16)


def test_the_last_address_may_be_used():
    assert region(base=(1 << 64) - 64, num_pages=1).span_bytes == 64


@pytest.mark.parametrize("bad", [(1, 1), (-1, 2), (0, 0), (0,), 5, (0, 1.5)])
def test_a_bad_replica_is_refused(bad):
    with pytest.raises(LayoutError, match="replica"):
        Layout([region()], page_size=16, replica=bad)


@pytest.mark.parametrize("make", [lambda: Heads(2, 2, 4), lambda: Heads(0, 5, 4), lambda: Interleave(4, 4)])
def test_bad_shares_are_refused(make):
    with pytest.raises(LayoutError):
        make()


def test_layout_refuses_twins_and_two_page_tables_in_one_space():
    with pytest.raises(LayoutError, match="region kv layer 0 is there twice"):
        Layout([region(), region(base=8192)], page_size=16)
    with pytest.raises(LayoutError, match="space 'device'.*covers 16 tokens.*8"):
        Layout([region(), region(layer=1, tokens=8)], page_size=16)


def test_round_trip():
    layout = Layout(
        [
            region(memory=Memory.VRAM(3), heads=Heads(1, 2, 4), space="host", page_stride=100),
            region(layer=1, interleave=Interleave(4, 2), base=(1 << 63) + 5),
            region(name="state", tokens=1, rows=1, row_bytes=0, space="state"),
        ],
        page_size=16,
        replica=(1, 4),
    )
    import json

    again = Layout.from_dict(json.loads(json.dumps(layout.to_dict())))
    assert again == layout
    assert again.regions[0].memory == Memory.VRAM(3) and again.replica == (1, 4)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: None,
        lambda d: [d],
        lambda d: d | {"page_size": "16"},
        lambda d: d | {"page_size": None},
        lambda d: d | {"surprise": 1, "requires": ["surprise"]},
        lambda d: d | {"requires": "order"},
        lambda d: d | {"requires": [["order"]]},
        lambda d: d | {"version": 0},
        lambda d: d | {"version": "2"},
        lambda d: {"regions": d["regions"]},
        lambda d: d | {"regions": {"a": 1}},
        lambda d: d | {"regions": [1]},
        lambda d: d | {"regions": [d["regions"][0] | {"base": "0"}]},
        lambda d: d | {"regions": [d["regions"][0] | {"num_pages": 1 << 70}]},
        lambda d: d | {"regions": [d["regions"][0] | {"memory": ["DRAM"]}]},
        lambda d: d | {"regions": [d["regions"][0] | {"memory": [1, 0]}]},
        lambda d: d | {"regions": [d["regions"][0] | {"memory": "DRAM"}]},
        lambda d: d | {"regions": [d["regions"][0] | {"heads": [0, 1]}]},
        lambda d: d | {"regions": [d["regions"][0] | {"interleave": [0, 0]}]},
        lambda d: d | {"regions": [d["regions"][0] | {"interleave": [2, "1"]}]},
        lambda d: d | {"regions": [d["regions"][0] | {"name": ["kv"]}]},
        lambda d: d | {"regions": [d["regions"][0] | {"page_stride": 1}]},
        lambda d: d | {"regions": [{"name": "kv"}]},
        lambda d: d | {"regions": d["regions"] * 2},
        lambda d: d | {"replica": [2, 2]},
        lambda d: d | {"replica": "01"},
        lambda d: d | {"replica": None},
        lambda d: d | {"regions": [d["regions"][0] | {"memory": None}]},
        lambda d: d | {"regions": [d["regions"][0] | {"memory": ["DRAM", True]}]},
        lambda d: d | {"regions": [d["regions"][0] | {"space": None}]},
        lambda d: d | {"regions": [d["regions"][0] | {"layer": True}]},
        lambda d: d | {"regions": [d["regions"][0] | {"layer": float("nan")}]},
    ],
)
def test_what_a_peer_sends_is_checked(spoil):
    data = Layout([region()], page_size=16).to_dict()
    with pytest.raises(LayoutError):
        Layout.from_dict(spoil(data))


def nested(levels):
    value = []
    for _ in range(levels):
        value = [value]
    return value


FIELDS = [*Layout([region()], page_size=16).to_dict()["regions"][0]]


@pytest.mark.parametrize("place", ["page_size", "replica", "regions", "version", "requires", *FIELDS])
@pytest.mark.parametrize(
    "bad",
    [
        10**5000,  # more digits than Python prints
        -(1 << 100_000),
        nested(5000),  # deeper than Python recurses
        {"a": nested(5000)},
        [nested(5000), "x" * 1_000_000],
        float("inf"),
        "x" * 1_000_000,
        "\ud800",  # cannot be printed
        "kv\x1b[2J\n",
        "",
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_what_cannot_be_shown_is_refused_in_a_short_message(place, bad):
    data = Layout([region()], page_size=16).to_dict()
    (data if place in (*data, "version", "requires") else data["regions"][0])[place] = bad
    with pytest.raises(LayoutError) as caught:
        Layout.from_dict(data)
    assert len(str(caught.value)) < 600 and str(caught.value).isprintable()


def test_refusals_name_region_and_field():
    data = Layout([region(), region(layer=1)], page_size=16).to_dict()
    for field, bad, told in (
        ("heads", [0, "x", 2], "layout region number 1: heads stop must be an integer, not 'x'"),
        ("memory", None, "layout region number 1: memory must be a list of 2, not None"),
        ("base", 1.0, "layout region number 1: region kv layer 1: base must be an integer, not 1.0"),
        ("order", "NDH", "layout region number 1: region kv layer 1: order must be 'NHD' or 'HND', not 'NDH'"),
        ("replica", [1, 1], "layout region number 1: region kv layer 1: replica index is 1, outside 0 to 0"),
    ):
        spoiled = {**data, "regions": [data["regions"][0], data["regions"][1] | {field: bad}]}
        with pytest.raises(LayoutError, match=told):
            Layout.from_dict(spoiled)
    with pytest.raises(LayoutError, match=r"layout requires ('\d+', ){4}'\d+' and 9995 more, which this version"):
        Layout.from_dict({**data, "requires": [str(n) for n in range(10_000)]})


def test_from_tensor_reads_everything_off():
    pool = torch.zeros(10, 3, 16, 8, dtype=torch.float16)
    r = Region.from_tensor(pool[:, 1], "kv", 4, space="host")
    assert r.base == pool.data_ptr() + 256 and r.page_bytes == 256 and r.page_stride == 768 and r.num_pages == 10
    assert (r.name, r.layer, r.space, r.memory) == ("kv", 4, "host", Memory.DRAM)
    with pytest.raises(LayoutError, match="not contiguous"):
        Region.from_tensor(pool[:, :, 0], "kv", 0)
    with pytest.raises(LayoutError, match="holds no page"):
        Region.from_tensor(torch.zeros(0, 4), "kv", 0)


def test_memory_spans_join_only_what_overlaps():
    pool = 1 << 20
    interleaved = [region(layer=k, base=pool + 64 * k, page_stride=192) for k in range(3)]
    beside = region(layer=3, base=pool + 7 * 192 + 192)
    other = region(layer=4, base=pool, memory=Memory.VRAM(0))
    spans = Layout([*interleaved, beside, other], page_size=16).memory_spans()
    assert spans == [
        (Memory.DRAM, pool, 8 * 192),
        (Memory.DRAM, pool + 8 * 192, 512),
        (Memory.VRAM(0), pool, 512),
    ]


def test_deepseek_v4_flash_geometry():
    """The figures of the model card: 62 regions, 998,208 bytes a page of 256 tokens."""
    layout = Layout.deepseek_v4(1 << 40, num_pages=4)
    sizes = {name: {r.page_bytes for r in layout.regions if r.name == name} for name, _ in layout.by_key}
    assert sizes == {"c4_kv": {37440}, "c4_indexer": {8448}, "c128_kv": {1728}}
    assert [sum(r.name == n for r in layout.regions) for n in sizes] == [21, 21, 20]
    assert sum(r.page_bytes for r in layout.regions) == 998_208
    assert len(DEEPSEEK_V4_FLASH_RATIOS) == 43
    assert {r.layer for r in layout.regions if r.name == "c128_kv"} == set(range(3, 42, 2))
    assert layout.spaces == ("device",)
    decode = Layout.deepseek_v4(1 << 40, num_pages=4, num_host_pages=9, memory=Memory.VRAM(1))
    assert {(r.name, r.space, r.num_pages, str(r.memory)) for r in decode.regions} == {
        ("c4_kv", "host", 9, "DRAM"),
        ("c4_indexer", "device", 4, "VRAM:1"),
        ("c128_kv", "device", 4, "VRAM:1"),
    }
    assert len(Layout.deepseek_v4(1 << 40, num_pages=4, layers=range(2, 6)).regions) == 6
    with pytest.raises(LayoutError, match="layer 43"):
        Layout.deepseek_v4(1 << 40, num_pages=4, layers=[43])


def test_bases_as_address_mapping_and_allocator():
    buffers = {}

    def allocate(name, layer, nbytes):
        buffers[name, layer] = np.empty(nbytes, np.uint8)
        return buffers[name, layer].ctypes.data

    layout = Layout.mha(allocate, layers=2, num_pages=3, heads=Heads(0, 2, 8), page_size=4, head_bytes=16)
    assert {r.key: r.base for r in layout.regions} == {k: b.ctypes.data for k, b in buffers.items()}
    assert {(r.name, r.page_bytes, r.row_bytes) for r in layout.regions} == {("k", 128, 32), ("v", 128, 32)}
    mapped = Layout.mla({("mla_kv", 5): 1 << 30}, layers=[5], num_pages=3)
    assert mapped.regions[0].base == 1 << 30 and mapped.regions[0].page_bytes == 73728
    with pytest.raises(LayoutError, match="mla_kv layer 6: no address"):
        Layout.mla({("mla_kv", 5): 1 << 30}, layers=[6], num_pages=3)


def test_pages_that_are_not_told_are_bounded_by_the_next_region() -> None:
    def pages(*rows: tuple[int, int, int | None], **fields: object) -> list[int]:
        bases, sizes, counts = (list(column) for column in zip(*rows, strict=True))
        names = [f"r{k}" for k in range(len(rows))]
        made = Layout.from_columns(names, [0] * len(rows), bases, sizes, counts, page_size=1, rows=1, **fields)
        assert made.unsized == {(f"r{k}", 0) for k, count in enumerate(counts) if count is None}
        assert Layout.from_dict(json.loads(json.dumps(made.to_dict()))) == made
        return [region.num_pages for region in made.regions]

    assert pages((1000, 100, None), (2050, 100, None), (4000, 100, 7)) == [10, 19, 7]
    assert pages((4000, 100, None), (1000, 100, None)) == [1 << 31, 30]  # none follows: page ids end at 2^31
    assert pages(((1 << 64) - 250, 100, None)) == [2]  # addresses end sooner
    assert pages((1000, 10, None), (1050, 10, None), (2000, 10, 1), page_stride=100) == [10, 10, 1]  # they interleave
    assert pages((1000, 10, None), (1050, 10, None), memory=[Memory.DRAM, Memory.VRAM(0)]) == [1 << 31] * 2


def test_a_layout_of_unknown_size_is_no_memory_to_register() -> None:
    made = Layout([Region("kv", 3, 4096, 64, None)], page_size=1)
    with pytest.raises(LayoutError, match=r"region kv layer 3: num_pages is not given"):
        made.memory_spans()


def test_columns_must_be_of_one_length() -> None:
    with pytest.raises(LayoutError, match="base has 1 items, and there are 2 names"):
        Layout.from_columns(["a", "b"], [0, 0], [64], [8, 8], 3, page_size=1)
    columns = Layout.from_columns(["a", "b"], [0, 1], [0, 64], [8, 16], 4, page_size=2, space=["x", "y"], row_bytes=4)
    regions = [Region("a", 0, 0, 8, 4, space="x", row_bytes=4), Region("b", 1, 64, 16, 4, space="y", row_bytes=4)]
    assert columns == Layout(regions, page_size=2)
