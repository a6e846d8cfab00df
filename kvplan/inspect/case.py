"""Cases: two layouts and a request in one JSON file, for `python -m kvplan explain` and for tests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from ..errors import LayoutError
from ..layout import Layout

_WINDOW = ("src_start", "dst_start", "num_tokens")


@dataclasses.dataclass(frozen=True)
class Case:
    """What one file holds.

    Attributes:
        src, dst: the layouts.
        src_pages, dst_pages, window: arguments of `Pairing.plan`.
        allow_unsent: names for `pair`.
        data: the whole file, with what else it says (`why`, `expected`, `error`, ...).
    """

    src: Layout
    dst: Layout
    src_pages: Any
    dst_pages: Any
    window: dict[str, Any]
    allow_unsent: tuple[str, ...]
    data: dict[str, Any]


def load(path: Path | str) -> Case:
    """Read a case.

    The file is an object with `page_size` (tokens a page), `src` and `dst` (lists of regions in the form of
    `Layout.to_dict`), `src_pages`, `dst_pages`, and where they are not the default `src_start`, `dst_start`,
    `num_tokens`, `allow_unsent`, `src_replica`.

    Raises:
        LayoutError: the file is no such object. What it asks for is only checked by `pair` and `plan`.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise LayoutError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise LayoutError(f"{path} holds no JSON object")
    missing = {"page_size", "src", "dst", "src_pages", "dst_pages"} - data.keys()
    if missing:
        raise LayoutError(f"{path} lacks {sorted(missing)}")
    src = {"page_size": data["page_size"], "regions": data["src"], "replica": data.get("src_replica", [0, 1])}
    return Case(
        src=Layout.from_dict(src),
        dst=Layout.from_dict({"page_size": data["page_size"], "regions": data["dst"]}),
        src_pages=data["src_pages"],
        dst_pages=data["dst_pages"],
        window={key: data[key] for key in _WINDOW if data.get(key) is not None},
        allow_unsent=tuple(data.get("allow_unsent", ())),
        data=data,
    )
