"""A recipe with rows: the stretches of the agent, their measures, and the output."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from headrace.errors import UsageError
from headrace_cli.demo import recipe
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_cli.demo.measures import BeforeAfter
from headrace_cli.demo.report import Report
from headrace_cli.demo.rows import Row

EXAMPLES = Path(__file__).parents[3] / "examples"
SEARCH = recipe.read(EXAMPLES / "email_search")


def report(seed: int, *tools: float) -> Report:
    rows = tuple(
        Row(at, f"v@{at}", {"tool": tool, "arguments": tool / 2, "recall": tool * 6})
        for at, tool in zip((0, 5, 10), tools, strict=True)
    )
    measures = {name: BeforeAfter(rows[0].measures[name], rows[-1].measures[name]) for name in SEARCH.measures}
    return Report(0.3, 0.5, (), 5, 5, 0, {}, 0, 9, 10, 300.0, 200.0, seed, measures=measures, rows=rows)


def printed(*reports: Report) -> str:
    output = io.StringIO()
    ConsoleReporter(Console(file=output, width=100)).table(SEARCH, reports)
    return " ".join(output.getvalue().split())


def test_the_agent_works_from_row_to_row() -> None:
    assert SEARCH.rows is not None
    assert SEARCH.rows.stretches == ((0, 5), (5, 10))


def test_a_row_for_each_measure_and_a_column_for_each_number() -> None:
    text = printed(report(0, 0.6, 0.78, 0.85))
    assert text == "rounds 0 5 10 tool 60.0% 78.0% 85.0% arguments 30.0% 39.0% 42.5% recall 3.60 4.68 5.10"


def test_of_several_seeds_each_row_is_the_median() -> None:
    text = printed(report(0, 0.6, 0.9, 0.8), report(1, 0.5, 0.7, 1.0), report(2, 0.4, 0.8, 0.9))
    assert text.startswith("median of 3 seeds rounds 0 5 10 tool 50.0% 80.0% 90.0%")


@pytest.mark.parametrize("at", ["[0]", "[1, 2]", "[0, 5, 5]", "[]"])
def test_rows_that_do_not_ascend_from_0_are_refused(at: str, tmp_path: Path) -> None:
    text = (EXAMPLES / "email_search" / "demo.toml").read_text(encoding="utf-8")
    (tmp_path / "demo.toml").write_text(text.replace("at = [0, 5, 10]", f"at = {at}"), encoding="utf-8")
    with pytest.raises(UsageError, match=r"rows\.at|must ascend from 0"):
        recipe.read(tmp_path)
