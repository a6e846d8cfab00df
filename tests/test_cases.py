"""Every case in tests/cases: the oracle and the package must both give the bytes, or the refusal, that it asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvplan
from kvplan.planning import reference

PATHS = sorted((Path(__file__).parent / "cases").glob("*.json"))
REFUSED = (kvplan.PlanError, kvplan.PairingError)


def load(path: Path) -> dict[str, Any]:
    case: dict[str, Any] = json.loads(path.read_text())
    assert ("expected" in case) != ("error" in case), f"{path.name} must say either what is expected or what is refused"
    return case


def layout(regions: list[dict[str, Any]], page_size: int) -> kvplan.Layout:
    return kvplan.Layout.from_dict({"page_size": page_size, "regions": regions})


def layouts(case: dict[str, Any]) -> tuple[kvplan.Layout, kvplan.Layout]:
    return layout(case["src"], case["page_size"]), layout(case["dst"], case["page_size"])


def positions(case: dict[str, Any]) -> dict[str, int]:
    return {name: case[name] for name in ("src_start", "dst_start", "num_tokens") if name in case}


def by_torch(pages: list[int]) -> Any:
    return torch.tensor(pages, dtype=torch.int64)


def by_numpy(pages: list[int]) -> Any:
    return np.array(pages, dtype=np.int32)


def planned(case: dict[str, Any], array: Any = by_torch) -> kvplan.Plan:
    src_pages = array(case["src_pages"])
    dst_pages = {space: array(pages) for space, pages in case["dst_pages"].items()}
    return kvplan.pair(*layouts(case)).plan(src_pages, dst_pages, **positions(case))


def test_cases_are_there() -> None:
    assert PATHS, "tests/cases is empty"


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_oracle(path: Path) -> None:
    case = load(path)

    def plan() -> list[reference.Triple]:
        return reference.plan(*layouts(case), case["src_pages"], case["dst_pages"], **positions(case))

    if "error" in case:
        with pytest.raises(REFUSED, match=case["error"]):
            plan()
    else:
        assert plan() == [tuple(triple) for triple in case["expected"]]


@pytest.mark.parametrize("array", [by_torch, by_numpy])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_plan(path: Path, array: Any) -> None:
    case = load(path)
    if "error" in case:
        with pytest.raises(REFUSED, match=case["error"]):
            planned(case, array)
        return
    plan = planned(case, array)
    src, dst, nbytes = plan.lists()
    assert reference.canonical(zip(dst, src, nbytes, strict=True)) == [tuple(triple) for triple in case["expected"]]
    assert len(plan) == len(nbytes)
    assert plan.total_bytes == sum(nbytes) == sum(n for _, _, n in case["expected"])


@pytest.mark.parametrize("path", [path for path in PATHS if "error" not in load(path)], ids=lambda path: path.stem)
def test_descriptors_keep_their_order(path: Path) -> None:
    case = load(path)
    src, dst, nbytes = planned(case).lists()
    expected = reference.descriptors(*layouts(case), case["src_pages"], case["dst_pages"], **positions(case))
    assert list(zip(src, dst, nbytes, strict=True)) == expected


@pytest.mark.parametrize("path", [path for path in PATHS if "error" not in load(path)], ids=lambda path: path.stem)
def test_descriptors_stay_in_registered_memory(path: Path) -> None:
    case = load(path)
    src_layout, dst_layout = layouts(case)
    plan = planned(case)
    src, dst, nbytes = plan.lists()
    covered = 0
    for segment in plan.segments:
        assert segment.start == covered, "segments follow each other"
        covered = segment.stop
        for i in range(segment.start, segment.stop):
            assert inside(src_layout, segment.src_memory, src[i], nbytes[i])
            assert inside(dst_layout, segment.dst_memory, dst[i], nbytes[i])
    assert covered == len(plan)


def inside(layout: kvplan.Layout, memory: kvplan.Memory, addr: int, nbytes: int) -> bool:
    """Whether one span of this memory, among those an engine registers, holds all these bytes."""
    return any(
        span_memory == memory and base <= addr and addr + nbytes <= base + size
        for span_memory, base, size in layout.memory_spans()
    )
