"""Hypothesis strategies: whole clusters of prefill and decode ranks, with one request between them.

A cluster is drawn as a deployment is configured: components (what is stored per layer), how each side splits them
over its ranks, how each side lays them out in memory, then the page lists. Addresses are made up: nothing is read.

Every size is a power of two times a compression, so that what is drawn is valid; `tests/test_properties.py` makes the
invalid ones by changing one thing.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

import kvplan


def profile(examples: int) -> settings:
    """Settings for a property: so many examples, or KVPLAN_EXAMPLES."""
    return settings(
        max_examples=int(os.environ.get("KVPLAN_EXAMPLES", examples)),
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


PROFILE = profile(300)

BASES = (1 << 12, (1 << 31) - 640, 1 << 40, (1 << 63) - 4096, (1 << 64) - (1 << 22))


@dataclass(frozen=True)
class Component:
    """One kind of buffer, the same in every layer that has it. Bytes are those of one row and one head."""

    name: str
    layers: tuple[int, ...]
    compression: int = 1
    head_bytes: int = 1
    heads: int = 0  # in all; 0: not told apart
    space: str = "device"  # on the destination
    own_rows: int = 0  # rows a page, one token each, in page lists of its own; 0: pages of the side
    opaque: bool = False  # rows cannot be told apart
    pads: tuple[int, int] = (0, 0)  # bytes behind the rows of a page: source, destination
    whole_rows: bool = False  # the destination does not interleave it
    sides: tuple[bool, bool] = (True, True)  # is it there at all: source, destination


@dataclass(frozen=True)
class Side:
    """How one side splits and lays out the components. `pages`: tokens a page, before interleaving, per space."""

    stages: int
    tensor: int
    interleave: int
    pages: dict[str, int]
    num_pages: dict[str, int]
    packed: bool  # regions of a space interleaved page by page in one buffer
    gap: int  # bytes behind each page, or behind each row of pages of a packed buffer
    apart: int  # bytes between buffers
    base: int
    memories: dict[str, str]
    spell_out: bool  # give Region its fields also where they are the defaults
    reverse: bool  # regions in descending order
    order: str = "NHD"  # of tokens and heads in a page, where heads are told apart
    pitch: int = 0  # bytes behind each row (of a head, in order HND), where a page has no padding
    run: int = 1  # consecutive tokens that a rank that interleaves holds
    shifts: dict[str, int] | None = None  # spaces share one buffer: their page 0 is this page of it

    def tokens(self, space: str) -> int:
        """Tokens that one page of a list for this space covers, over all ranks that interleave."""
        return self.pages.get(space, self.pages.get("device", 0)) * self.interleave


@dataclass(frozen=True)
class Start:
    """The positions of one space, as `positions` of a cluster spell them. `dst`, `sent`: None where not given."""

    src: int = 0
    dst: int | None = None
    sent: int | None = None


@dataclass
class Cluster:
    """Layouts of all ranks, and one request. `heads`: KV heads in all, by component."""

    src: list[kvplan.Layout]
    dst: list[kvplan.Layout]
    src_pages: dict[str | None, list[int]]
    dst_pages: dict[str, list[int]]
    positions: dict[str, Any]
    heads: dict[str, int]
    allow_unsent: tuple[str, ...] = ()
    starts: dict[str, Start] = dataclasses.field(default_factory=dict)

    def pairs(self) -> Iterator[tuple[kvplan.Layout, kvplan.Layout]]:
        for src in self.src:
            for dst in self.dst:
                yield src, dst

    def unsent(self, src: kvplan.Layout) -> tuple[str, ...]:
        """Of `allow_unsent`, what this rank (one stage of several) holds."""
        return tuple(name for name in self.allow_unsent if name in {region.name for region in src.regions})

    def source_list(self, space: str) -> list[int]:
        return self.src_pages[space] if space in self.src_pages else self.src_pages[None]

    def null(self, space: str) -> int | None:
        return self.positions.get("null_page", {}).get(space)

    def window(self, space: str) -> tuple[int, int, int]:
        """(start of the source list, start of the destination list, token behind the last one sent) for a space."""
        keys = {(r.name, r.layer) for r in self.dst[0].regions if r.space == space}
        tokens = next(r.tokens for layout in self.src for r in layout.regions if (r.name, r.layer) in keys)
        start = self.starts.get(space, Start())
        sent = len(self.source_list(space)) * tokens if start.sent is None else start.sent
        return start.src, start.src if start.dst is None else start.dst, start.src + sent


# ------------------------------------------------------------------------------------------------------- components

LAYERS = st.lists(st.integers(0, 6), min_size=1, max_size=3, unique=True).map(lambda layers: tuple(sorted(layers)))
COUNTS = st.sampled_from([1, 2, 3, 4, 5, 0])
PADS = st.sampled_from([(0, 0), (0, 0), (3, 3), (0, 5), (4, 0), (2, 6)])


@st.composite
def latent_components(draw: st.DrawFn, spaces: list[str], plain: bool) -> list[Component]:
    """MLA and compressed attention: one latent row for all heads. No two of them need have the same layers."""
    names = draw(st.lists(st.sampled_from(["mla_kv", "c4_kv", "c4_indexer", "c128_kv"]), min_size=1, unique=True))
    ratio = {"mla_kv": 1, "c4_kv": 2, "c4_indexer": 2, "c128_kv": 4}
    return [
        Component(
            name,
            draw(LAYERS),
            compression=ratio[name],
            head_bytes=draw(st.integers(1, 6)),
            space=draw(st.sampled_from(spaces)),
            pads=(0, 0) if plain else draw(PADS),
            whole_rows=not plain and draw(st.integers(0, 3)) == 0,
        )
        for name in names
    ]


@st.composite
def head_components(draw: st.DrawFn, spaces: list[str], plain: bool) -> list[Component]:
    """K and V of grouped-query attention, in the same layers."""
    layers, heads = draw(LAYERS), 0 if plain else draw(st.sampled_from([1, 2, 4]))
    head_bytes, pads = draw(st.integers(1, 3)), (0, 0) if plain else draw(PADS)
    space, whole_rows = draw(st.sampled_from(spaces)), not plain and draw(st.integers(0, 5)) == 0
    return [
        Component(
            name, layers, head_bytes=head_bytes, heads=heads, space=space, pads=pads, whole_rows=whole_rows
        )
        for name in ("k", "v")
    ]  # fmt: skip


# ------------------------------------------------------------------------------------------------------------ ranks


def layouts(components: list[Component], side: Side, is_dst: bool) -> list[kvplan.Layout]:
    """One layout a rank: stages, then tensor-parallel ranks, then ranks that interleave rows."""
    present = [c for c in components if c.sides[is_dst]]
    heads = max((c.heads for c in present), default=0)
    copies = side.tensor // min(side.tensor, heads) if heads else side.tensor
    ranks = []
    for stage in range(side.stages):
        for tensor in range(side.tensor):
            for dcp in range(side.interleave):
                unplaced = [
                    _fields(component, layer, side, is_dst, tensor, dcp)
                    for component in present
                    for k, layer in enumerate(component.layers)
                    if k * side.stages // len(component.layers) == stage
                ]
                regions = _placed(unplaced, side, number=len(ranks))
                replica = (0, 1) if is_dst else (tensor % copies, copies)
                page_size = min(side.pages.values()) * side.interleave
                if side.spell_out:  # said of each region, not of the layout
                    regions = [dataclasses.replace(region, replica=replica) for region in regions]
                    replica = (0, 1)
                ranks.append(kvplan.Layout(regions, page_size=page_size, replica=replica))
    return ranks


def _fields(component: Component, layer: int, side: Side, is_dst: bool, tensor: int, dcp: int) -> dict[str, Any]:
    """The fields of one region but for its base and stride."""
    space = component.space if is_dst or component.own_rows or component.space in side.pages else "device"
    interleaved = side.interleave > 1 and not component.own_rows and not (is_dst and component.whole_rows)
    tokens = component.own_rows or side.tokens(space)
    rows = tokens // component.compression // (side.interleave if interleaved else 1)
    held = None
    if component.heads:
        each = max(component.heads // side.tensor, 1)
        first = tensor * component.heads // side.tensor
        if each < component.heads or side.spell_out:
            held = kvplan.Heads(first, first + each, component.heads)
    row_bytes = component.head_bytes * (held.stop - held.start if held else max(component.heads, 1))
    fields: dict[str, Any] = {
        "name": component.name,
        "layer": layer,
        "page_bytes": rows * row_bytes + component.pads[is_dst],
        "num_pages": side.num_pages[space] + layer % 2,
        "space": space,
        "memory": kvplan.Memory.DRAM if side.memories[space] == "DRAM" else kvplan.Memory.VRAM(tensor),
        "heads": held,
        "interleave": None,
    }
    if interleaved:
        fits = side.run % component.compression == 0 and rows % max(side.run // component.compression, 1) == 0
        fields["interleave"] = kvplan.Interleave(side.interleave, dcp, *([side.run] if fits and side.run > 1 else []))
    head_major = side.order == "HND" and held is not None and not component.opaque
    if head_major:
        fields["order"] = "HND"
    if side.pitch and not component.pads[is_dst] and not component.opaque:
        fields["row_stride"] = (component.head_bytes if head_major else row_bytes) + side.pitch
    if side.spell_out or tokens != min(side.pages.values()) * side.interleave:
        fields["tokens"] = tokens
    if side.spell_out or interleaved != (side.interleave > 1) or component.compression > 1 or component.own_rows:
        fields["rows"] = rows
    if not component.opaque:
        fields["row_bytes"] = row_bytes
    elif side.spell_out:
        fields["row_bytes"] = 0
    return fields


def extent(fields: dict[str, Any]) -> int:
    """Bytes of a page of a region with these fields, gaps between its rows included."""
    if "row_stride" not in fields:
        return fields["page_bytes"]
    heads = fields["heads"]
    rows = fields["page_bytes"] // fields["row_bytes"]
    blocks = heads.stop - heads.start if "order" in fields else 1
    return blocks * rows * fields["row_stride"]


def _placed(unplaced: list[dict[str, Any]], side: Side, number: int) -> list[kvplan.Region]:
    """Addresses for the regions of one rank, none of which overlap."""
    cursor = side.base + number * (1 << 16)
    if side.shifts is not None:
        pools = {space: [fields for fields in unplaced if fields["space"] == space] for space in side.shifts}
        stride = max(sum(extent(fields) for fields in pool) for pool in pools.values()) + side.gap
        for space, pool in pools.items():
            offset = side.shifts[space] * stride
            for fields in pool:
                fields.update(base=cursor + offset, page_stride=stride)
                offset += extent(fields)
    elif side.packed:
        pools = {}
        for fields in unplaced:
            pools.setdefault(fields["space"], []).append(fields)
        for pool in pools.values():
            stride = sum(extent(fields) for fields in pool) + side.gap
            offset = 0
            for fields in pool:
                fields.update(base=cursor + offset, page_stride=stride)
                offset += extent(fields)
            cursor += stride * max(fields["num_pages"] for fields in pool) + side.apart
    else:
        for fields in unplaced:
            stride = extent(fields) + side.gap
            fields["base"] = cursor
            if side.gap or side.spell_out or "row_stride" in fields:
                fields["page_stride"] = stride
            cursor += stride * fields["num_pages"] + side.apart
    regions = [kvplan.Region(**fields) for fields in unplaced]
    return regions[::-1] if side.reverse else regions


# ---------------------------------------------------------------------------------------------------------- request


@st.composite
def page_ids(draw: st.DrawFn, count: int, num_pages: int, unique: bool = True) -> list[int]:
    """Ids as an allocator gives them: ascending from somewhere, in pieces, or anyhow."""
    how = draw(st.sampled_from(["one run", "pieces", "anyhow"]))
    if how == "one run":
        first = draw(st.integers(0, num_pages - count))
        return list(range(first, first + count))
    if how == "pieces":
        size = draw(st.integers(1, 3))
        blocks = [list(range(i, min(i + size, num_pages))) for i in range(0, num_pages, size)]
        return [page for block in draw(st.permutations(blocks)) for page in block][:count]
    ids = st.integers(0, num_pages - 1)
    return draw(st.lists(ids, min_size=count, max_size=count, unique=unique))


def _alike(a: kvplan.Region, b: kvplan.Region) -> bool:
    return (a.tokens, a.rows, a.interleave) == (b.tokens, b.rows, b.interleave)


def _unit(a: kvplan.Region, b: kvplan.Region) -> int:
    """A multiple of the tokens that move as one between two regions."""
    return math.lcm(a.compression, *(r.interleave.run for r in (a, b) if r.interleave))


@st.composite
def starts(draw: st.DrawFn, src: list[kvplan.Layout], dst: list[kvplan.Layout], spaces: list[str]) -> dict[str, Start]:
    """Starts that suit every pair of regions of these spaces, which one source list serves. Nothing is counted yet."""
    ours, theirs = ([region for layout in side for region in layout.regions] for side in (src, dst))
    pairs = [(a, b) for a in ours for b in theirs if (a.name, a.layer) == (b.name, b.layer) and b.space in spaces]
    if not pairs:
        return dict.fromkeys(spaces, Start())
    # Interleaved lists start at a page, whole pages move from page to page, and rows are not cut.
    src_step, dst_step = (math.lcm(*(r.tokens for r in side if r.interleave)) for side in zip(*pairs, strict=True))
    both = math.lcm(src_step, dst_step)
    how = draw(st.sampled_from(["together", "dst_start before", "dst_start behind", "each its own"]))
    if how == "together":
        return dict.fromkeys(spaces, Start(draw(st.integers(0, 5)) * both))
    apart = math.lcm(both, *(a.tokens if _alike(a, b) else _unit(a, b) for a, b in pairs))
    if how == "dst_start before":
        dst_start = draw(st.integers(0, 3)) * both
        return dict.fromkeys(spaces, Start(dst_start + draw(st.integers(0, 5)) * apart, dst_start))
    if how == "dst_start behind":
        src_start = draw(st.integers(0, 3)) * both
        return dict.fromkeys(spaces, Start(src_start, src_start + draw(st.integers(1, 3)) * apart))
    start = draw(st.integers(0, 3)) * apart
    return {space: Start(start, draw(st.sampled_from([None, *range(0, start + 3 * apart, apart)]))) for space in spaces}


def _put_nulls(draw: st.DrawFn, src: list[int], dst: list[int], start: Start, tokens: tuple[int, int]) -> int:
    """Put null pages into both lists of a space, where they stand for the same tokens. The id of the null page.

    `tokens`: those that a page covers, on either side.
    """
    sizes = tuple(zip((src, dst), (start.src, start.src if start.dst is None else start.dst), tokens, strict=True))
    first = max(begin for _, begin, _ in sizes)
    end = start.src + (len(src) * tokens[0] if start.sent is None else start.sent)
    cuts = [t for t in range(first, end) if all((t - begin) % size == 0 for _, begin, size in sizes)]
    cuts = sorted({first, *cuts, end})
    used = {*src, *dst}
    null = draw(st.sampled_from([-1, (1 << 31) - 1, *(page for page in range(4) if page not in used)]))
    drawn = st.booleans()
    gone = [draw(drawn) for _ in cuts[1:]] if first < end else []
    for pages, begin, size in sizes:
        for place in range(len(pages)):
            low, high = max(begin + place * size, first), min(begin + (place + 1) * size, end)
            if low >= high:
                if draw(drawn):
                    pages[place] = null  # what is not sent may be null on one side alone
            elif any(g and cuts[k] <= low < cuts[k + 1] for k, g in enumerate(gone)):
                pages[place] = null
    return null


def _spelled(draw: st.DrawFn, found: dict[str, Start], named: list[str]) -> dict[str, Any]:
    """The arguments of `plan` that say these starts: ints where ints can, and sometimes where not needed, dicts."""
    arguments: dict[str, Any] = {}
    for field, name, usual in (("src", "src_start", 0), ("dst", "dst_start", None), ("sent", "num_tokens", None)):
        values = {space: getattr(start, field) for space, start in found.items()}
        others = {value for space, value in values.items() if space not in named}
        by_name = {space: value for space, value in values.items() if space in named and value != usual}
        if len(others) <= 1 and not by_name and draw(st.integers(0, 3)):
            (value,) = others or {usual}
            if value != usual or draw(st.integers(0, 4)) == 0:
                arguments[name] = value
        elif by_name or others:
            if len(others) == 1 and draw(st.booleans()):
                by_name[None] = others.pop()
            else:
                by_name |= {space: value for space, value in values.items() if space not in named}
            arguments[name] = by_name
    return arguments


# ---------------------------------------------------------------------------------------------------------- cluster


def splits(is_dst: bool, plain: bool) -> list[tuple[int, int, int]]:
    """(pipeline stages, tensor-parallel ranks, ranks that interleave) of a side."""
    stages = [(1, 1, 1)] if is_dst else [(1, 1, 1), (2, 1, 1), (3, 1, 1)]
    if plain:
        return stages
    ranks = [(1, 2, 1), (1, 1, 2), (1, 4, 1), (1, 1, 4), (1, 2, 2)]
    return stages + ranks + ([(1, 1, 8)] if is_dst else [(2, 2, 1), (2, 1, 2)])


@st.composite
def sides(draw: st.DrawFn, is_dst: bool, spaces: list[str], largest: int, plain: bool) -> Side:
    stages, tensor, interleave = draw(st.sampled_from(splits(is_dst, plain)))
    return Side(
        stages=stages,
        tensor=tensor,
        interleave=interleave,
        pages={space: largest * draw(st.sampled_from([1, 2, 4])) for space in spaces},
        num_pages={},
        packed=draw(st.booleans()),
        gap=draw(st.sampled_from([0, 0, 1, 8])),
        apart=draw(st.sampled_from([0, 1, 64])),
        base=draw(st.sampled_from(BASES)),
        memories={space: draw(st.sampled_from(["VRAM", "DRAM"])) for space in ("device", "host", "state")},
        spell_out=draw(st.booleans()),
        reverse=draw(st.booleans()),
        order="NHD" if plain else draw(st.sampled_from(["NHD", "NHD", "HND"])),
        pitch=0 if plain else draw(st.sampled_from([0, 0, 0, 1, 8])),
        run=draw(st.sampled_from([1, 1, 2, 4])),
    )


@st.composite
def clusters(draw: st.DrawFn, plain: bool = False, nulls: bool = True) -> Cluster:
    """A cluster. `plain`: no heads, no interleave, equal pages, no padding within a page; stages, spaces, positions,
    strides, packed pools, drafts and memories as ever. `nulls`: there may be null pages, which no GPU looks for."""
    spaces = draw(st.sampled_from([["device"], ["device", "host"]]))
    by_heads = draw(st.booleans())
    components = draw((head_components if by_heads else latent_components)(spaces, plain))
    if not {c.space for c in components} >= set(spaces):
        spaces = sorted({c.space for c in components})
    largest = max(c.compression for c in components)
    src = draw(sides(False, ["device"], largest, plain))
    dst = draw(sides(True, spaces, largest, plain))
    if plain:
        dst.pages.update(dict.fromkeys(spaces, src.pages["device"]))

    if len(spaces) > 1 and draw(st.integers(0, 3)) == 0:
        shifts = {space: draw(st.integers(0, 2)) for space in [*spaces, "state"]}
        memories = dict.fromkeys(dst.memories, dst.memories["device"])
        dst = dataclasses.replace(dst, shifts=shifts, memories=memories)

    by_name = [space for space in spaces if draw(st.integers(0, 5)) == 0]  # with source lists of their own
    for space in by_name:
        own = src.pages["device"] if plain or space == "device" else largest * draw(st.sampled_from([1, 2, 4]))
        src.pages[space] = own

    heads = max(c.heads for c in components)
    full_copies = src.tensor == 1 or heads <= 1  # every source rank of a stage holds all of a region without heads
    if full_copies and src.interleave == 1:
        if draw(st.integers(0, 2)) == 0:
            rows = draw(st.sampled_from([1, 1, 3]))
            components.append(
                Component("state", draw(LAYERS), head_bytes=draw(st.integers(1, 9)), space="state", own_rows=rows)
            )
        alike = [space for space in spaces if dst.interleave == 1 and dst.pages[space] == src.tokens(space) > 1]
        if alike and draw(st.integers(0, 3)) == 0:
            pad = draw(st.sampled_from([0, 1, 5]))
            components.append(
                Component("opaque", draw(LAYERS), space=draw(st.sampled_from(alike)), opaque=True, pads=(pad, pad))
            )
    drafts = draw(st.sampled_from([(), ("source",), ("destination",), ("source", "destination")]))
    for which in drafts:
        there = (which == "source", which == "destination")
        components.append(Component(f"draft_{which}", draw(LAYERS), space=draw(st.sampled_from(spaces)), sides=there))
    return draw(_requests(components, src, dst, spaces, by_name, nulls))


@st.composite
def _requests(
    draw: st.DrawFn,
    components: list[Component],
    src: Side,
    dst: Side,
    spaces: list[str],
    by_name: list[str],
    with_nulls: bool,
) -> Cluster:
    """Page lists long enough, and pools large enough, for a cluster of these components."""
    stateful = any(c.name == "state" for c in components)

    # Sizes of pools are not known before the lists are, and layouts are needed for positions: build them twice.
    sizes = dict.fromkeys([*src.pages, *dst.pages, "state"], 1)
    src.num_pages.update(sizes)
    dst.num_pages.update(sizes)
    src_layouts, dst_layouts = layouts(components, src, False), layouts(components, dst, True)
    src_counts: dict[str | None, int] = {}
    dst_counts: dict[str, int] = {}
    found: dict[str, Start] = {}
    others = [space for space in spaces if space not in by_name]
    for list_of, served in [(None, others), *((space, [space]) for space in by_name)]:
        if not served:
            continue
        src_counts[list_of] = draw(COUNTS)
        sent = src_counts[list_of] * src.tokens(list_of or "device")
        where = dict.fromkeys(served, Start())
        if list_of is None or draw(st.booleans()):
            where = draw(starts(src_layouts, dst_layouts, served))
            if sent and draw(st.booleans()):
                sent = draw(st.integers(sent - src.tokens(list_of or "device") + 1, sent))
                where = {space: dataclasses.replace(start, sent=sent) for space, start in where.items()}
        found |= where
        for space, start in where.items():
            covered = start.src + sent - (start.src if start.dst is None else start.dst)
            dst_counts[space] = -(-max(covered, 0) // dst.tokens(space))
            if start.dst is not None:
                dst_counts[space] += draw(st.integers(0, 2))
    if stateful:
        src_counts["state"] = dst_counts["state"] = draw(COUNTS)

    repeats = draw(st.integers(0, 9)) == 0  # a source page sent to several places is allowed
    src_pages, dst_pages = {}, {}
    for space, count in src_counts.items():
        pool = "device" if space is None else space
        src.num_pages[pool] = max(src.num_pages[pool], count + draw(st.integers(1, 4)))
    shared = draw(page_ids(sum(dst_counts.values()), sum(dst_counts.values()) + draw(st.integers(1, 4))))
    for space, count in dst_counts.items():
        if dst.shifts is not None:  # no page of the buffer twice
            most = max(dst.shifts.values())
            dst.num_pages[space] = sum(dst_counts.values()) + 4 + most
            dst_pages[space] = [shared.pop() + most - dst.shifts[space] for _ in range(count)]
            continue
        dst.num_pages[space] = count + draw(st.integers(1, 4))
        dst_pages[space] = draw(page_ids(count, dst.num_pages[space]))
    for space, count in src_counts.items():
        pool = "device" if space is None else space
        src_pages[space] = draw(page_ids(count, src.num_pages[pool], unique=not repeats))
    arguments = _spelled(draw, found, by_name)
    if with_nulls and draw(st.booleans()):
        nulls: dict[str, int] = {}
        for space in by_name if len(others) != 1 else spaces:
            tokens = (src.tokens(space if space in by_name else "device"), dst.tokens(space))
            pages = src_pages[space if space in by_name else None], dst_pages[space]
            nulls[space] = _put_nulls(draw, *pages, found[space], tokens)
        if nulls:
            arguments["null_page"] = nulls
    return Cluster(
        layouts(components, src, False),
        layouts(components, dst, True),
        src_pages,
        dst_pages,
        arguments,
        {c.name: c.heads for c in components},
        tuple(c.name for c in components if c.sides == (True, False)),
        found,
    )
