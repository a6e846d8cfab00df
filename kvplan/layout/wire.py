"""The wire form of layouts: JSON-able mappings, and the checks of what a peer has sent."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import LayoutError, shown
from .region import Heads, Interleave, Memory, Region

#: `Layout.from_dict` reads at most this many regions. The largest known layout has a few thousand. This many take 25 MB
#: and one to two seconds. A longer list is refused before any region is built.
MAX_REGIONS = 1 << 16

_REQUIRED = {"name", "layer", "base", "page_bytes", "num_pages"}
_OPTIONAL = {f.name for f in dataclasses.fields(Region)} - _REQUIRED


def write(
    regions: Iterable[Region], page_size: int, replica: tuple[int, int], unsized: Collection[tuple[str, int]]
) -> dict[str, Any]:
    """The mapping that `Layout.to_dict` returns."""
    rows = [_region_to_dict(region) | ({"num_pages": None} if region.key in unsized else {}) for region in regions]
    return {"page_size": page_size, "replica": list(replica), "regions": rows}


def read(data: Any) -> tuple[list[Region], Any, Any]:
    """(regions, page_size, replica) of a mapping that `write` made. `Layout` checks the last two.

    Raises:
        LayoutError: a field is missing, unknown, or of the wrong type or value.
    """
    fields = _fields(data, "layout", required={"page_size", "regions"}, optional={"replica"})
    regions = fields["regions"]
    if not isinstance(regions, list):
        raise LayoutError(f"layout regions must be a list, not {type(regions).__name__}")
    if len(regions) > MAX_REGIONS:
        raise LayoutError(f"layout has {len(regions)} regions; at most {MAX_REGIONS} are read from a peer")
    found = [_region_from_dict(region, number) for number, region in enumerate(regions)]
    return found, fields["page_size"], fields.get("replica", (0, 1))


def _fields(data: Any, what: str, required: set[str], optional: set[str]) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise LayoutError(f"{what} must be a mapping, not {type(data).__name__}")
    missing, unknown = required - data.keys(), data.keys() - required - optional
    if missing or unknown:
        named = ", ".join(sorted(map(shown, itertools.islice(unknown, 5)))) + (", ..." if len(unknown) > 5 else "")
        raise LayoutError(f"{what}: missing fields {sorted(missing)}, unknown fields [{named}]")
    return dict(data)


def _region_to_dict(region: Region) -> dict[str, Any]:
    # Not dataclasses.asdict: it copies deeply, 20 times slower on 10,000 regions.
    data = {field: getattr(region, field) for field in (*sorted(_REQUIRED), *sorted(_OPTIONAL))}
    data["memory"] = [region.memory.kind, region.memory.device]
    data["heads"] = [region.heads.start, region.heads.stop, region.heads.total] if region.heads else None
    data["interleave"] = [region.interleave.size, region.interleave.rank] if region.interleave else None
    return data


def _region_from_dict(data: Any, number: int) -> Region:
    what = f"layout region number {number}"
    fields = _fields(data, what, _REQUIRED, _OPTIONAL)
    for field, kind, length in (("memory", Memory, 2), ("heads", Heads, 3), ("interleave", Interleave, 2)):
        value = fields.get(field)
        if value is None and (field not in fields or field != "memory"):
            continue
        if not isinstance(value, (list, tuple)) or len(value) != length:
            raise LayoutError(f"{what}: {field} must be a list of {length}, not {shown(value)}")
        try:
            fields[field] = kind(*value)
        except LayoutError as error:
            raise LayoutError(f"{what}: {error}") from None
    try:
        return Region(**fields)
    except LayoutError as error:
        raise LayoutError(f"{what}: {error}") from None
