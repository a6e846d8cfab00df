"""Cases: a pairing and the requests planned with it, as JSON. So a refused request is kept, and explained later."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import LayoutError, PlanError, shown
from ..layout import Layout
from ..layout.region import INT64_END, integer
from ..pairing import PairingTables, Unsent
from .pages import as_pages
from .plan import Request
from .requests import POSITIONS

_VALUES = (*POSITIONS, "null_page")
_FOR_OTHERS = "_for_others"  # JSON has no key None: what stands under it is under the field's name and this
_OTHERS = "src_pages" + _FOR_OTHERS


@dataclasses.dataclass(frozen=True)
class Case:
    """What one file holds.

    Attributes:
        src, dst: the layouts.
        requests: what is planned; none where the file holds layouts alone.
        allow_unsent: names and (name, layer) pairs for `pair`.
        data: the whole file, with what else it says (`why`, `expected`, `error`, ...).
    """

    src: Layout
    dst: Layout
    requests: tuple[Request, ...]
    allow_unsent: tuple[Unsent, ...]
    data: dict[str, Any]


def keep_case(error: PlanError, pairing: PairingTables, requests: Iterable[Request]) -> None:
    """Have `error.case()` give the case of these requests as they are at this moment."""
    requests = [request for request in requests if isinstance(request, Request)]
    kept = [_copy_request(request) for request in requests]
    error._case = lambda: as_case(pairing, kept)


def _copy_request(request: Request) -> Request:
    given = {name: getattr(request, name) for name in _VALUES}
    positions = {name: dict(value) for name, value in given.items() if isinstance(value, Mapping)}
    return dataclasses.replace(
        request, src_pages=_copy(request.src_pages), dst_pages=_copy(request.dst_pages), **positions
    )


def _copy(pages: Any) -> Any:
    """A copy of page lists. A value that holds no page ids is replaced by a short description, which is refused too."""
    if isinstance(pages, Mapping):
        return {space: _copy_list(ids) for space, ids in pages.items()}
    return _copy_list(pages)


def _copy_list(pages: Any) -> Any:
    try:
        ids = as_pages(pages, "pages", on_device=True)
    except PlanError:
        return shown(pages)
    return ids.copy() if isinstance(ids, np.ndarray) else ids.clone()


def as_case(pairing: PairingTables, requests: Iterable[Request]) -> dict[str, Any]:
    """The case of these requests, as `json.dump` takes it and `load` reads it back."""
    sent = {region.name for region in pairing.src.regions if region.key in pairing.dst.by_key}
    unsent = sorted(region.key for region in pairing.src.regions if region.key not in pairing.dst.by_key)
    # A name alone stands for all its layers.
    allowed = dict.fromkeys((name, layer) if name in sent else name for name, layer in unsent)
    return {
        "src": pairing.src.to_dict(),
        "dst": pairing.dst.to_dict(),
        "allow_unsent": [item if isinstance(item, str) else list(item) for item in allowed],
        "requests": [_request_to_dict(request) for request in requests],
    }


def _request_to_dict(request: Request) -> dict[str, Any]:
    src_pages = request.src_pages
    data: dict[str, Any] = {"dst_pages": _plain(request.dst_pages)}
    if isinstance(src_pages, Mapping) and None in src_pages:
        data[_OTHERS] = _plain(src_pages[None])
        src_pages = {space: ids for space, ids in src_pages.items() if space is not None}
    data["src_pages"] = _plain(src_pages)
    for name in _VALUES:
        value = getattr(request, name)
        if isinstance(value, Mapping):
            if None in value:
                data[name + _FOR_OTHERS] = _number(value[None])
            value = {space: number for space, number in value.items() if space is not None}
            data[name] = {space if isinstance(space, str) else shown(space): _number(n) for space, n in value.items()}
        elif value is not None:
            data[name] = _number(value)
    return data


def _number(value: Any) -> Any:
    return int(value) if hasattr(value, "__index__") and not isinstance(value, bool) else value and shown(value)


def _plain(pages: Any) -> Any:
    if isinstance(pages, Mapping):
        return {space if isinstance(space, str) else shown(space): _plain(ids) for space, ids in pages.items()}
    return pages if isinstance(pages, str) else pages.tolist()


def load(path: Path | str) -> Case:
    """Read a case.

    The file is an object with these names:

    * `src` and `dst`: layouts as `Layout.to_dict` writes them; or their lists of regions, with `page_size` (tokens a
      page) and, if needed, `src_replica` beside them. A region without `row_bytes` has pages without padding.
    * `requests`: a list of objects with `src_pages`, `dst_pages`, and where they are not the default `src_start`,
      `dst_start`, `num_tokens`, `null_page`. What the arguments of `Pairing.plan` hold under the key None stands beside
      each under its name and `_for_others`. One request may also stand in the file itself. Layouts may stand alone.
    * `allow_unsent`: as in `kvplan.pair`, a list of "name" and ["name", layer]; by default none.

    Raises:
        LayoutError: the file is no such object. What it asks for is only checked by `pair` and `plan`.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError:
        raise LayoutError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise LayoutError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise LayoutError(f"{path} holds no JSON object")
    missing = {"src", "dst"} - data.keys()
    if missing:
        raise LayoutError(f"{path} lacks {sorted(missing)}")
    requests = data.get("requests", [data] if "src_pages" in data or "dst_pages" in data else [])
    if not isinstance(requests, list) or not all(isinstance(request, dict) for request in requests):
        raise LayoutError(f"{path}: requests must be a list of objects")
    return Case(
        src=_layout(data, "src", path),
        dst=_layout(data, "dst", path),
        requests=tuple(_request(request, path) for request in requests),
        allow_unsent=tuple(names_of(data, "allow_unsent", path)),
        data=data,
    )


def names_of(data: Mapping[str, Any], field: str, path: Path | str) -> list[Unsent]:
    """The names and (name, layer) pairs that a file has in a field.

    Raises:
        LayoutError: the field is no list of "name" and ["name", layer].
    """
    given = data.get(field, [])
    if not isinstance(given, list):
        raise LayoutError(f"{path}: {field} must be a list, not {shown(given)}")
    try:
        return [_name_of(item, f"{field} item {number}") for number, item in enumerate(given)]
    except LayoutError as error:
        raise LayoutError(f"{path}: {error}") from None


def _name_of(item: Any, what: str) -> Unsent:
    if isinstance(item, str):
        return item
    if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str):
        raise LayoutError(f'{what} must be "name" or ["name", layer], not {shown(item)}')
    return item[0], integer(item[1], f"{what}: layer of {shown(item[0])}", -INT64_END, INT64_END)


def _layout(data: dict[str, Any], side: str, path: Path | str) -> Layout:
    given = data[side]
    if isinstance(given, dict):
        return Layout.from_dict(given)
    if "page_size" not in data:
        raise LayoutError(f"{path}: {side} is no object, and there is no page_size beside it")
    replica = data.get("src_replica", [0, 1]) if side == "src" else [0, 1]
    return Layout.from_dict({"page_size": data["page_size"], "regions": given, "replica": replica})


def _request(data: dict[str, Any], path: Path | str) -> Request:
    missing = {"src_pages", "dst_pages"} - data.keys()
    if missing and not (missing == {"src_pages"} and _OTHERS in data):
        raise LayoutError(f"{path}: a request lacks {sorted(missing)}")
    src_pages = data.get("src_pages", {})
    if _OTHERS in data:
        if not isinstance(src_pages, dict):
            raise LayoutError(f"{path}: beside {_OTHERS}, src_pages must be an object")
        src_pages = {**src_pages, None: data[_OTHERS]}
    positions = {name: data[name] for name in _VALUES if data.get(name) is not None}
    for name in _VALUES:
        if name + _FOR_OTHERS in data:
            by_space = positions.setdefault(name, {})
            if not isinstance(by_space, dict):
                raise LayoutError(f"{path}: beside {name}{_FOR_OTHERS}, {name} must be an object")
            positions[name] = {**by_space, None: data[name + _FOR_OTHERS]}
    return Request(src_pages, data["dst_pages"], **positions)
