"""A demo with several seeds, compared with the promises of its recipe: `reports/<name>.json`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headrace_cli.demo.measures import PromisedLine, lines
from headrace_cli.demo.recipe import Goal, Recipe
from headrace_cli.demo.report import Report
from headrace_cli.demo.rows import row_lines


@dataclass(frozen=True, slots=True)
class SeedsReport:
    """Reports of all seeds, and the promises: those about measures for the medians, the others for each seed."""

    title: str
    seeds: tuple[Report, ...]
    lines: tuple[PromisedLine, ...]

    @classmethod
    def of(cls, recipe: Recipe, goal: Goal, reports: Sequence[Report]) -> SeedsReport:
        promises = lines(recipe.measures, [report.measures for report in reports])
        if recipe.rows is not None:
            promises += row_lines(recipe.measures, [report.rows for report in reports])
        promises += reports[0].checks  # equal for all seeds
        promises += [
            PromisedLine(f"seed {report.seed}", "as promised", "; ".join(shortfalls) or "as promised", not shortfalls)
            for report in reports
            for shortfalls in [report.shortfalls(goal)]
        ]
        return cls(recipe.title, tuple(reports), tuple(promises))

    @property
    def holds(self) -> bool:
        return all(line.holds for line in self.lines)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
