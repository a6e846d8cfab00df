"""A pairing in words: what an operator reads before trusting it, or after a refusal."""

from __future__ import annotations

from ..errors import clipped, quoted
from ..layout import Region
from .shares import shares
from .tables import PairingTables


def describe(pairing: PairingTables) -> str:
    """Which region goes where, under which space and rule, and what was merged. Equal layers share a line."""
    lines = [f"{len(pairing.entries)} entries, {len(pairing.groups)} groups of index pairs"]
    entries = pairing.entries.tolist()
    for memories, start, stop in zip(pairing.segment_memories, pairing.bounds, pairing.bounds[1:], strict=False):
        lines.append(f"segment {memories[0]} -> {memories[1]}:")
        alike: dict[tuple[str, ...], list[int]] = {}
        for number in range(int(start), int(stop)):
            alike.setdefault(_rule(pairing, number, entries[number]), []).append(number)
        lines += [_entries_line(pairing, rule, numbers) for rule, numbers in alike.items()]
    domains: dict[str, list[str]] = {}
    for space in pairing.space_names:
        if space in pairing.domains:
            first, shift = pairing.domains[space]
            domains.setdefault(first, []).append(f"{quoted(space)} (page 0 is page {shift} of it)")
    lines += [f"share memory, of which no page may be written twice: {', '.join(names)}" for names in domains.values()]
    sent = {pair[0].key for regions in pairing.regions for pair in regions}
    lines += _left(pairing, sent)
    return "\n".join(lines)


def _rule(pairing: PairingTables, number: int, entry: list[int]) -> tuple[str, ...]:
    """All that is said of an entry but its number and layers: entries with the same words share a line."""
    regions = pairing.regions[number]
    _, src_stride, _, dst_stride, nbytes, group = entry
    merged = f", {len(regions)} regions side by side in memory moved as one" if len(regions) > 1 else ""
    source, destination = regions[0]
    pages = pairing.by_page(number)
    whole = pages and source.heads == destination.heads and nbytes >= (source.rows or 1) * (source.row_bytes or 0)
    rule = "whole pages" if whole else _differences("heads of each page" if pages else "rows", source, destination)
    names = ", ".join(dict.fromkeys(source.name for source, _ in regions))
    unknown = [side for side, region in (("source", source), ("destination", destination)) if region.format is None]
    one = len(unknown) == 1
    merged += f"; the {unknown[0]} does not say its format" if one else ""
    spaces = f"space {quoted(regions[0][0].space)} -> {quoted(regions[0][1].space)}"
    return (
        f"group {group}",
        names,
        f"{spaces}: {rule}, {nbytes} bytes each, strides {src_stride} -> {dst_stride}{merged}",
    )


def _entries_line(pairing: PairingTables, rule: tuple[str, ...], numbers: list[int]) -> str:
    group, _, text = rule
    sources = [source for number in numbers for source, _ in pairing.regions[number]]
    entries = f"entry {numbers[0]}" if len(numbers) == 1 else f"entries {ranges(numbers)}"
    return f"  {entries}, {group}: {_names(sources)}, {text}"


def _names(regions: list[Region]) -> str:
    layers: dict[str, list[int]] = {}
    for region in regions:
        layers.setdefault(region.name, []).append(region.layer)
    return ", ".join(f"{clipped(name)} layer {ranges(sorted(found))}" for name, found in layers.items())


def ranges(numbers: list[int]) -> str:
    """3, 4, 5, 9 as "3 to 5, 9"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in parts)


def _differences(what: str, source: Region, destination: Region) -> str:
    """What moves, and why not whole pages: what differs between the sides."""
    reasons = []
    if source.heads != destination.heads:
        sides = [f"{r.heads.start} to {r.heads.stop - 1}" if r.heads else "all" for r in (source, destination)]
        reasons.append(f"heads {sides[0]} -> {sides[1]}")
    if source.interleave != destination.interleave:
        reasons.append(f"{_share(source)} -> {_share(destination)}")
    if source.rows != destination.rows:
        reasons.append(f"{source.rows} -> {destination.rows} rows a page")
    if source.order != destination.order:
        reasons.append(f"{source.order} -> {destination.order}")
    return f"{what} ({'; '.join(reasons or ['pages differ'])})"


def _share(region: Region) -> str:
    share = region.interleave
    if share is None:
        return "all rows"
    return f"rank {share.rank} of {share.size}" + (f" in runs of {share.run} tokens" if share.run > 1 else "")


def _left(pairing: PairingTables, sent: set[tuple[str, int]]) -> list[str]:
    """What is not sent, and what is not written, and why."""
    mine = shares(pairing.src)
    unsent: dict[tuple[str, str], list[Region]] = {}
    for region in pairing.src.regions:
        if region.key in sent:
            continue
        if pairing.only_layers is not None and region.layer not in pairing.only_layers:
            why = "another layer than this part of the pairing is of"
        elif region.key not in pairing.dst.by_key:
            why = "allowed to stay unsent"
        elif region.key not in mine:
            why = f"sent by another of the {(region.replica or pairing.src.replica)[1]} replicas"
        else:
            why = "this peer holds none of its heads"
        unsent.setdefault((region.name, why), []).append(region)
    unwritten: dict[str, list[Region]] = {}
    for region in pairing.dst.regions:
        if region.key not in pairing.src.by_key:
            unwritten.setdefault(region.name, []).append(region)
    lines = [f"not sent: region {_names(regions)}: {why}" for (_, why), regions in unsent.items()]
    return lines + [f"not written: region {_names(regions)}" for regions in unwritten.values()]
