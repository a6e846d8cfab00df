"""The wire form of layouts: JSON-able mappings, and the checks of what a peer has sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import LayoutError, listed, shown
from .region import INT64_END, Heads, Interleave, Memory, Region, integer

#: `Layout.from_dict` reads at most this many regions. The largest known layout has a few thousand. This many take 25 MB
#: and one to two seconds. A longer list is refused before any region is built.
MAX_REGIONS = 1 << 16

#: Version of the form. Version 1, of kvplan 0.1, had no field `version`, and refused fields that it did not know.
VERSION = 2

_REQUIRED = {"name", "layer", "base", "page_bytes", "num_pages"}
_FIRST = {"page_stride", "tokens", "rows", "row_bytes", "space", "memory", "heads", "interleave"}  # in version 1
_SECOND = {"order": "NHD", "row_stride": None, "head_stride": None, "format": None, "replica": None}  # and defaults
_KNOWN = _REQUIRED | _FIRST | _SECOND.keys()
_LISTS: dict[str, tuple[type, tuple[int, ...]]] = {
    "memory": (Memory, (2,)),
    "heads": (Heads, (3,)),
    "interleave": (Interleave, (2, 3)),
}


def write(
    regions: Iterable[Region], page_size: int, replica: tuple[int, int], unsized: Collection[tuple[str, int]]
) -> dict[str, Any]:
    """The mapping that `Layout.to_dict` returns: version 1 where nothing newer is said, which kvplan 0.1 reads."""
    rows = [_region_to_dict(region) | ({"num_pages": None} if region.key in unsized else {}) for region in regions]
    data = {"page_size": page_size, "replica": list(replica), "regions": rows}
    used = {field for row in rows for field in row.keys() & _SECOND.keys()}
    if any(row["interleave"] and len(row["interleave"]) > 2 for row in rows):
        used.add("run")
    return data | ({"version": VERSION, "requires": sorted(used)} if used else {})


def read(data: Any) -> tuple[list[Region], Any, Any]:
    """(regions, page_size, replica) of a mapping that `write` made. `Layout` checks the last two.

    Fields that are not known are left out, unless the sender lists them under `requires`.

    Raises:
        LayoutError: a field is missing, or of the wrong type or value; or what is required is not known here.
    """
    fields = _fields(data, "layout", {"page_size", "regions"})
    integer(fields.get("version", 1), "layout version", 1, INT64_END)
    required = fields.get("requires", [])
    if not isinstance(required, list):
        raise LayoutError(f"layout requires must be a list of names, not {shown(required)}")
    unknown = [name for name in required if not isinstance(name, str) or name not in _KNOWN | {"run"}]
    if unknown:
        raise LayoutError(f"layout requires {listed(map(shown, unknown))}, which this version of kvplan does not know")
    regions = fields["regions"]
    if not isinstance(regions, list):
        raise LayoutError(f"layout regions must be a list, not {type(regions).__name__}")
    if len(regions) > MAX_REGIONS:
        raise LayoutError(f"layout has {len(regions)} regions; at most {MAX_REGIONS} are read from a peer")
    page_size = integer(fields["page_size"], "page_size", 1, INT64_END)
    found = [_region_from_dict(region, number, page_size) for number, region in enumerate(regions)]
    return found, page_size, fields.get("replica", (0, 1))


def _fields(data: Any, what: str, required: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, Mapping):
        raise LayoutError(f"{what} must be a mapping, not {type(data).__name__}")
    missing = required - data.keys()
    if missing:
        raise LayoutError(f"{what}: missing fields {sorted(missing)}")
    return data


def _region_to_dict(region: Region) -> dict[str, Any]:
    # Not dataclasses.asdict: it copies deeply, 20 times slower on 10,000 regions.
    data = {field: getattr(region, field) for field in (*sorted(_REQUIRED), *sorted(_FIRST))}
    data["memory"] = [region.memory.kind, region.memory.device]
    data["heads"] = [region.heads.start, region.heads.stop, region.heads.total] if region.heads else None
    if region.interleave:
        share = region.interleave
        data["interleave"] = [share.size, share.rank, *([share.run] if share.run > 1 else [])]
    for field, default in _SECOND.items():
        value = getattr(region, field)
        if value != default:
            data[field] = list(value) if field == "replica" else value
    return data


def _region_from_dict(data: Any, number: int, page_size: int) -> Region:
    what = f"layout region number {number}"
    _fields(data, what, _REQUIRED)
    fields = {field: value for field, value in data.items() if field in _KNOWN}
    for field, (kind, lengths) in _LISTS.items():
        value = fields.get(field)
        if value is None and (field not in fields or field != "memory"):
            continue
        if not isinstance(value, (list, tuple)) or len(value) not in lengths:
            raise LayoutError(f"{what}: {field} must be a list of {' or '.join(map(str, lengths))}, not {shown(value)}")
        try:
            fields[field] = kind(*value)
        except LayoutError as error:
            raise LayoutError(f"{what}: {error}") from None
    try:
        region = Region(**fields)
        return region if region.row_bytes is not None else _without_padding(region, page_size)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from None


def _without_padding(region: Region, page_size: int) -> Region:
    """A region that does not say `row_bytes`, as in case files: its page is rows and no padding, where that divides."""
    rows: int = region.resolved(page_size).rows  # type: ignore[assignment]
    return dataclasses.replace(region, row_bytes=region.page_bytes // rows if region.page_bytes % rows == 0 else 0)
