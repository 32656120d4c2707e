"""Promises of a demo about its measures: means, medians over seeds, lines that hold or fail, and the output."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from headrace.errors import UsageError
from headrace_cli.demo import recipe
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_cli.demo.measures import BeforeAfter, DemoMeasure, MeasuredPlays, lines
from headrace_cli.demo.report import Report, ShownTask
from headrace_cli.demo.runner import _example
from headrace_cli.demo.seeds import SeedsReport

EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent"
MATHS = recipe.read(EXAMPLE)
GOOD = {"accuracy": BeforeAfter(0.7, 0.9), "steps": BeforeAfter(8.5, 5.9), "format": BeforeAfter(0.6, 0.95)}


def report(seed: int = 0, **settings: Any) -> Report:
    account = {"turns_captured": 5, "turns_trained": 5, "turns_waiting": 0, "turns_dropped": {}}
    fields = {"before": 0.7, "after": 0.9, "versions": (), **account, "failed_requests": 0, "requests": 9, "swaps": 4,
             "wall_s": 500.0, "traffic_s": 300.0, "seed": seed, "measures": GOOD}  # fmt: skip
    return Report(**{**fields, **settings})


def failing(*reports: Report) -> list[str]:
    return [line.name for line in SeedsReport.of(MATHS, MATHS.goal, reports).lines if not line.holds]


def test_the_lines_of_the_seed_hold_where_they_should() -> None:
    assert failing(report()) == []
    assert len(SeedsReport.of(MATHS, MATHS.goal, [report()]).lines) == 8


@pytest.mark.parametrize(
    ("name", "measured", "fails"),
    [
        ("accuracy", BeforeAfter(0.75, 0.85), []),
        ("accuracy", BeforeAfter(0.7, 0.84), ["accuracy: after"]),
        ("accuracy", BeforeAfter(0.8, 0.89), ["accuracy: gain"]),
        ("steps", BeforeAfter(7.99, 6.0), ["steps: before"]),
        ("steps", BeforeAfter(8.0, 6.21), ["steps: after"]),
        ("format", BeforeAfter(0.66, 0.92), ["format: before"]),
        ("format", BeforeAfter(0.65, 0.91), ["format: after"]),
    ],
)
def test_each_limit_of_the_math_agent_is_held(name: str, measured: BeforeAfter, fails: list[str]) -> None:
    assert failing(report(measures={**GOOD, name: measured})) == fails


def test_of_several_seeds_the_medians_count_and_a_failed_request_of_one_does_too() -> None:
    bad = {**GOOD, "accuracy": BeforeAfter(0.7, 0.2)}
    assert failing(report(0), report(1), report(2, measures=bad)) == []
    assert failing(report(0), report(1, measures=bad), report(2, measures=bad)) == ["accuracy: after", "accuracy: gain"]
    assert failing(report(0), report(1, failed_requests=1)) == ["seed 1"]
    assert failing(report(0), report(1, wall_s=601.0)) == ["seconds of the longest seed"]


def test_the_median_gain_is_that_of_a_seed_and_no_difference_of_medians() -> None:
    seeds = [{"x": BeforeAfter(*pair)} for pair in ((0.0, 0.5), (0.4, 0.5), (0.5, 0.6))]
    (line,) = lines({"x": DemoMeasure(field="score", gain_min=0.1)}, seeds)
    assert (line.found, line.holds) == ("0.10", True)


def test_means_of_printed_values() -> None:
    played = MeasuredPlays.read(b'{"task": "b", "score": 1, "text": "B"}\n\n{"task": "a", "score": 0.5, "text": "A"}\n')
    assert played.mean("score") == 0.75
    with pytest.raises(UsageError, match="2 of 2 measured plays have no number 'steps'"):
        played.mean("steps")
    recipe = MATHS.model_copy(update={"shown": "text"})
    assert _example(recipe, played, played) == ShownTask("a", "A", "A")
    assert _example(MATHS, played, played) is None
    assert _example(recipe.model_copy(update={"shown": None}), played, played) is None


def test_the_table_and_the_solutions_are_printed_as_they_are() -> None:
    output = io.StringIO()
    reporter = ConsoleReporter(Console(file=output, width=100))
    reporter.print_measures(MATHS.measures, [GOOD])
    reporter.print_example(ShownTask("task", "[b]24 + 13[/b]", "Answer: 37"))
    reporter.print_promises(
        SeedsReport.of(MATHS, MATHS.goal, [report(measures={**GOOD, "steps": BeforeAfter(8.0, 7.0)})])
    )
    text = " ".join(output.getvalue().split())
    assert (
        "before after change accuracy 70.0% 90.0% +20.0 points steps 8.50 5.90 -2.60 format 60.0% 95.0% +35.0 points"
        in text
    )
    assert "before [b]24 + 13[/b] after Answer: 37" in text
    assert "FAILS steps: after: wanted <= 6.20, found 7.00" in text


def test_the_report_is_written_for_other_programs(tmp_path: Path) -> None:
    example = ShownTask("t", "1", "2")
    SeedsReport.of(MATHS, MATHS.goal, [replace(report(), shown=example)]).write(tmp_path / "r" / "example-math.json")
    written = json.loads((tmp_path / "r" / "example-math.json").read_text())
    assert written["seeds"][0]["measures"]["steps"] == {"before": 8.5, "after": 5.9}
    assert written["seeds"][0]["shown"]["after"] == "2"
    assert {"name": "steps: after", "wanted": "<= 6.20", "found": "5.90", "holds": True} in written["lines"]
