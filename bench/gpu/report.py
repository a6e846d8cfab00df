"""What has been found so far: figures and steps, written anew after each, so that whoever is killed leaves a table."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

NOT_BEGUN = "not begun"
BEGUN = "begun"
MEASURED = "measured"


@dataclasses.dataclass
class Step:
    """One step and what it came to: "passed", "failed", "out of time", or why it did not run."""

    name: str
    result: str = NOT_BEGUN
    seconds: float = 0.0
    detail: str = ""

    @property
    def failed(self) -> bool:
        return self.result in ("failed", "out of time")


@dataclasses.dataclass
class Figures:
    """Of one back end. `parts` says of each part of the benchmark how far it came."""

    parts: dict[str, str]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    machine: str = ""
    failure: str = ""


class Report:
    """Two files of a folder: table.md for people, results.json for programs. Each is whole at any moment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[Step] = []
        self.figures: dict[str, Figures] = {}
        self.title = ""

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        results = {
            "title": self.title,
            "steps": [dataclasses.asdict(step) for step in self.steps],
            "figures": {name: dataclasses.asdict(found) for name, found in self.figures.items()},
        }
        for name, text in (("table.md", self.text()), ("results.json", json.dumps(results, indent=1))):
            half = self.folder / f".{name}.half"
            half.write_text(text + "\n")
            half.replace(self.folder / name)

    def text(self) -> str:
        """One table of figures (goal, what each back end reached, whether it is met), one of steps."""
        lines = [self.title, *self._figures(), "", "| step | result | seconds | |", "|---|---|---|---|"]
        lines += [f"| {step.name} | {step.result} | {step.seconds:.0f} | {step.detail} |" for step in self.steps]
        return "\n".join(lines if self.steps else lines[:-3])

    def _figures(self) -> list[str]:
        if not self.figures:
            return []
        names = list(self.figures)
        machines = dict.fromkeys(found.machine for found in self.figures.values() if found.machine)
        lines = [
            "",
            *machines,
            "",
            "| | goal | " + " | ".join(names) + " | met |",
            "|---|---|" + "---|" * (len(names) + 1),
        ]
        order = dict.fromkeys(row["what"] for found in self.figures.values() for row in found.rows)
        for what in order:
            rows = [next((r for r in found.rows if r["what"] == what), None) for found in self.figures.values()]
            some = next(row for row in rows if row is not None)
            goal = "" if some["limit"] is None else f"{'≥' if some['least'] else '≤'} {some['limit']:g} {some['unit']}"
            met = "" if rows[0] is None or rows[0]["met"] is None else "yes" if rows[0]["met"] else "NO"
            lines.append(f"| {what} | {goal} | {' | '.join(map(_cell, rows))} | {met} |")
        for name, found in self.figures.items():
            missing = [f"{part} ({state})" for part, state in found.parts.items() if state != MEASURED]
            if missing:
                lines.append(f"\nNot measured by {name}: {', '.join(missing)}")
            if found.failure:
                lines.append(f"\n{name} did not come to its end: {found.failure}")
        return lines


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or math.isnan(row["value"]):
        return "-"
    figure = f"{row['value']:.2f}" if row["unit"] in ("×", "TB/s") else f"{row['value']:.1f}"
    return f"{figure} {row['unit']}" + (f" ({row['note']})" if row["note"] else "")
