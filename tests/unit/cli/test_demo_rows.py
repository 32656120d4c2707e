"""Tests of demos that measure a model while it trains, and print one row for each measurement.

They cover the agent runs between rows, the wait before a row, the measures (means and medians over seeds), the promises
that hold or fail, the checks without services, and the output.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from headrace.errors import UsageError
from headrace_cli.demo import demo_run, recipe, runner
from headrace_cli.demo.console_reporter import ConsoleReporter, Watch
from headrace_cli.demo.demo_run import TrainingWait
from headrace_cli.demo.measures import (
    BeforeAfter,
    CheckResult,
    DemoMeasure,
    MeasuredPlays,
    Row,
    RowsRecipe,
    check_measures,
    check_rows,
)
from headrace_cli.demo.report import Report, SeedsReport, ShownTask
from headrace_cli.demo.runner import _example
from headrace_operations.supervisor.state import StartFailed
from headrace_schemas import Experience, ModelEvent, TrainingMetrics

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
    ConsoleReporter(Console(file=output, width=100)).print_table(SEARCH, reports)
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


EXAMPLE = Path(__file__).parents[3] / "examples" / "math_agent"
MATHS = recipe.read(EXAMPLE)
GOOD = {"accuracy": BeforeAfter(0.7, 0.9), "steps": BeforeAfter(8.5, 5.9), "format": BeforeAfter(0.6, 0.95)}


def demo_report(seed: int = 0, **settings: Any) -> Report:
    account = {"turns_captured": 5, "turns_trained": 5, "turns_waiting": 0, "turns_dropped": {}}
    fields = {"before": 0.7, "after": 0.9, "versions": (), **account, "failed_requests": 0, "requests": 9, "swaps": 4,
             "wall_s": 500.0, "traffic_s": 300.0, "seed": seed, "measures": GOOD}  # fmt: skip
    return Report(**{**fields, **settings})


def failing(*reports: Report) -> list[str]:
    return [line.name for line in SeedsReport.of(MATHS, MATHS.goal, reports).lines if not line.holds]


def test_the_lines_of_the_seed_hold_where_they_should() -> None:
    assert failing(demo_report()) == []
    assert len(SeedsReport.of(MATHS, MATHS.goal, [demo_report()]).lines) == 7


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
    assert failing(demo_report(measures={**GOOD, name: measured})) == fails


def test_of_several_seeds_the_medians_count_and_a_failed_request_of_one_does_too() -> None:
    bad = {**GOOD, "accuracy": BeforeAfter(0.7, 0.2)}
    assert failing(demo_report(0), demo_report(1), demo_report(2, measures=bad)) == []
    assert failing(demo_report(0), demo_report(1, measures=bad), demo_report(2, measures=bad)) == [
        "accuracy: after",
        "accuracy: gain",
    ]
    assert failing(demo_report(0), demo_report(1, failed_requests=1)) == ["seed 1"]


def test_the_median_gain_is_that_of_a_seed_and_no_difference_of_medians() -> None:
    seeds = [{"x": BeforeAfter(*pair)} for pair in ((0.0, 0.5), (0.4, 0.5), (0.5, 0.6))]
    (line,) = check_measures({"x": DemoMeasure(field="score", gain_min=0.1)}, seeds)
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
        SeedsReport.of(MATHS, MATHS.goal, [demo_report(measures={**GOOD, "steps": BeforeAfter(8.0, 7.0)})])
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
    SeedsReport.of(MATHS, MATHS.goal, [replace(demo_report(), shown=example)]).write(
        tmp_path / "r" / "example-math.json"
    )
    written = json.loads((tmp_path / "r" / "example-math.json").read_text())
    assert written["seeds"][0]["measures"]["steps"] == {"before": 8.5, "after": 5.9}
    assert written["seeds"][0]["shown"]["after"] == "2"
    assert {"name": "steps: after", "wanted": "<= 6.20", "found": "5.90", "holds": True} in written["lines"]


WEREWOLF = recipe.read(Path(__file__).parents[3] / "examples" / "werewolf")
WINS = "wolves win"


def rows(*values: float) -> tuple[Row, ...]:
    """Return rows after 0, 100, 500 and 1000 sessions in which each measure has the row's item of `values`."""
    at = zip((0, 100, 500, 1000), values, strict=False)
    return tuple(Row(number, f"m@{number:016}", dict.fromkeys(WEREWOLF.measures, value)) for number, value in at)


@pytest.mark.parametrize(
    ("values", "fails"),
    [
        ((0.5, 0.55, 0.67, 0.8), []),
        ((0.5, 0.55, 0.66, 0.8), ["at 500"]),
        ((0.5, 0.55, 0.7, 0.79), ["at 1000"]),
        ((0.5, 0.5, 0.7, 0.85), ["rises"]),
        ((0.5, 0.55, 0.86, 0.85), ["rises"]),
        ((0.5, 0.55), ["at 500", "at 1000"]),
        ((0.5,), ["at 500", "at 1000", "rises"]),
    ],
)
def test_each_row_of_werewolf_is_held(values: tuple[float, ...], fails: list[str]) -> None:
    failed = [line.name for line in check_rows(WEREWOLF.measures, [rows(*values)]) if not line.holds]
    assert failed == [f"{WINS}: {name}" for name in fails]


def test_of_several_seeds_the_median_of_each_row_counts() -> None:
    seeds = [rows(0.5, 0.6, 0.7, value) for value in (0.2, 0.85, 0.9)]
    assert all(line.holds for line in check_rows(WEREWOLF.measures, seeds))
    assert not all(line.holds for line in check_rows(WEREWOLF.measures, [*seeds, seeds[0], seeds[0]]))


def test_checks_without_services_count() -> None:
    failed = CheckResult("ablation: hide alone", "< 80%", "81%", holds=False)
    good = {name: demo_report().measures["accuracy"] for name in WEREWOLF.measures}
    failed_report = replace(demo_report(), measures=good, rows=rows(0.5, 0.6, 0.7, 0.9), checks=(failed,))
    failing = [line.name for line in SeedsReport.of(WEREWOLF, WEREWOLF.goal, [failed_report]).lines if not line.holds]
    assert failing == [f"{WINS}: before", failed.name], "0.7 is where the measures of the report begin"


def test_a_row_by_hand_and_how_it_is_printed() -> None:
    played = MeasuredPlays.read(b"\n".join(json.dumps({"score": score}).encode() for score in (1, 1, 1, 0)))
    measures = {WINS: DemoMeasure(field="score", percent=True)}
    row = Row.of(100, "m@1", measures, played)
    assert (row.measures[WINS], row.plays) == (0.75, 4)
    assert row.margins[WINS] == pytest.approx(3.1824463 * 0.5 / 2)
    output = io.StringIO()
    chosen = WEREWOLF.model_copy(update={"measures": measures})
    ConsoleReporter(Console(file=output, width=100)).print_table(chosen, [replace(demo_report(), rows=(row,))])
    assert " ".join(output.getvalue().split()) == "games 100 wolves win 75.0% ± 79.6%"


@pytest.mark.parametrize("wrong", [[100, 500], [0], [0, 500, 100], [0, 100, 100]])
def test_rows_begin_with_0_and_rise(wrong: list[int]) -> None:
    with pytest.raises(ValidationError, match=r"ascend from 0|at least 2"):
        RowsRecipe(unit="games", at=tuple(wrong))


def test_checks_are_lines_of_json_or_the_demo_does_not_begin() -> None:
    line: dict[str, Any] = {"name": "a", "wanted": "< 1", "found": "0", "holds": True}
    assert runner.run_recipe_checks([sys.executable, "-c", f"print({json.dumps(json.dumps(line))})"], {}) == (
        CheckResult(**line),
    )
    for program in ("print('{}')", "raise SystemExit(1)", "print('yes')"):
        with pytest.raises(StartFailed, match="the checks of the demo did not run"):
            runner.run_recipe_checks([sys.executable, "-c", program], {})


class Bus:
    """Bus with two topics that returns the next list of events at each poll."""

    def __init__(self, *polls: Sequence[Any]) -> None:
        self._polls = list(polls)
        self._now: Sequence[Any] = ()

    async def events(self, _topics: object, kind: type) -> AsyncIterator[Any]:
        if kind is Experience:
            self._now = self._polls.pop(0) if self._polls else ()
        for event in self._now:
            if event.kind is kind:
                yield event


def experience_event(name: str) -> SimpleNamespace:
    return SimpleNamespace(kind=Experience, model="m", experience_id=name)


def trained(*names: str, version: str | None = None, undone: Sequence[str] = ()) -> SimpleNamespace:
    verdicts = [SimpleNamespace(experience_id=name) for name in names]
    taken_back = [SimpleNamespace(experience_id=name, queued=True) for name in undone]
    fields = {"version": version, "verdicts": verdicts, "undone": taken_back, "restored": ()}
    return SimpleNamespace(kind=TrainingMetrics, model="m", **fields)


async def polls_until_settled(
    monkeypatch: pytest.MonkeyPatch, *polls: Sequence[Any], champions: Sequence[str] = ("m@0",)
) -> int:
    """Return the number of polls until training is settled. The clock advances by one second with each poll."""
    clock = SimpleNamespace(now=0.0)

    async def sleep(_seconds: float) -> None:
        clock.now += 1.0

    @asynccontextmanager
    async def connected(_bus: str) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(demo_run, "connected", connected)
    monkeypatch.setattr(demo_run, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(demo_run, "asyncio", SimpleNamespace(sleep=sleep))
    settling = TrainingWait("bus", "m")
    monkeypatch.setattr(settling, "_follow", Bus(*polls))
    await settling.until_settled(Watch("bus", "m", champions=list(champions)), 60.0)
    return int(clock.now)


async def test_a_row_waits_until_everything_is_trained_and_the_bus_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    count = await polls_until_settled(
        monkeypatch, [experience_event("a")], [], [experience_event("b")], [trained("a", "b")]
    )
    assert count == 3 + 5, "5 s after the last news"


async def test_the_wait_for_an_incomplete_batch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        await polls_until_settled(monkeypatch, [experience_event("a"), experience_event("b")], [trained("a")]) == 1 + 21
    )
    assert (
        await polls_until_settled(monkeypatch, [experience_event("a")], [trained("a")], [trained(undone=["a"])])
        == 2 + 21
    )


def test_a_withdrawn_version_is_decided() -> None:
    watch, version = Watch("bus", "m"), "m@" + "a" * 16
    fields = {"time": datetime.now(UTC), "decision_id": "d", "model": "m", "decision": "withdrawn"}
    watch._add(ModelEvent.model_validate({**fields, "version": version}))
    assert version in watch.rejected


async def test_a_row_waits_for_the_newest_version_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    news = [experience_event("a")], [trained("a", version="m@1")]
    assert await polls_until_settled(monkeypatch, *news, champions=("m@0", "m@1")) == 1 + 5
    with pytest.raises(StartFailed, match="0 experiences are not trained, and the newest version is m@1"):
        await polls_until_settled(monkeypatch, *news)
