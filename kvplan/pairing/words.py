"""A pairing in words: what an operator reads before trusting it, or after a refusal."""

from __future__ import annotations

from ..layout import Region
from .tables import PairingTables


def describe(pairing: PairingTables) -> str:
    """Which region goes where, under which space and rule, and what was merged."""
    lines = [f"{len(pairing.entries)} entries, {len(pairing.groups)} groups of index pairs"]
    entries = pairing.entries.tolist()
    for memories, start, stop in zip(pairing.segment_memories, pairing.bounds, pairing.bounds[1:], strict=False):
        lines.append(f"segment {memories[0]} -> {memories[1]}:")
        for number in range(int(start), int(stop)):
            lines.append(_entry_line(pairing, number, entries[number]))
    sent = {pair[0].key for regions in pairing.regions for pair in regions}
    lines += _left(pairing, sent)
    return "\n".join(lines)


def _entry_line(pairing: PairingTables, number: int, entry: list[int]) -> str:
    regions = pairing.regions[number]
    _, src_stride, _, dst_stride, nbytes, group = entry
    names = _names([source for source, _ in regions])
    merged = f", {len(regions)} regions side by side in memory moved as one" if len(regions) > 1 else ""
    spaces = f"space {regions[0][0].space!r} -> {regions[0][1].space!r}"
    whole = pairing.whole(number)
    rule = "whole pages" if whole else _row_rule(*regions[0])
    text = f"  entry {number}, group {group}: {names}, {spaces}: {rule}, {nbytes} bytes each, "
    return text + f"strides {src_stride} -> {dst_stride}{merged}"


def _names(regions: list[Region]) -> str:
    layers: dict[str, list[int]] = {}
    for region in regions:
        layers.setdefault(region.name, []).append(region.layer)
    return ", ".join(f"{name} layer {_ranges(sorted(found))}" for name, found in layers.items())


def _ranges(numbers: list[int]) -> str:
    """3, 4, 5, 9 as "3 to 5, 9"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in parts)


def _row_rule(source: Region, destination: Region) -> str:
    """Why rows move one by one: what differs between the sides."""
    reasons = []
    if source.heads != destination.heads:
        sides = [f"{r.heads.start} to {r.heads.stop - 1}" if r.heads else "all" for r in (source, destination)]
        reasons.append(f"heads {sides[0]} -> {sides[1]}")
    if source.interleave != destination.interleave:
        shares = [f"rank {r.interleave.rank} of {r.interleave.size}" if r.interleave else "all rows"
                  for r in (source, destination)]  # fmt: skip
        reasons.append(f"{shares[0]} -> {shares[1]}")
    if source.rows != destination.rows:
        reasons.append(f"{source.rows} -> {destination.rows} rows a page")
    return "rows (" + "; ".join(reasons or ["pages differ"]) + ")"


def _left(pairing: PairingTables, sent: set[tuple[str, int]]) -> list[str]:
    """What is not sent, and what is not written, and why."""
    lines = []
    index, count = pairing.src.replica
    for region in pairing.src.regions:
        if region.key in sent:
            continue
        if region.key not in pairing.dst.by_key:
            why = "allowed to stay unsent"
        elif count > 1 and sorted(pairing.src.by_key).index(region.key) % count != index:
            why = f"sent by another of the {count} replicas"
        else:
            why = "this peer holds none of its heads"
        lines.append(f"not sent: {region}: {why}")
    lines += [f"not written: {region}" for region in pairing.dst.regions if region.key not in pairing.src.by_key]
    return lines
