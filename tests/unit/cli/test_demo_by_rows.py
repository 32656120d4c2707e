"""Demos that measure while they train: promises of their rows, the wait before a row, checks without services."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from rich.console import Console

from headrace_cli.demo import checks, recipe, settled
from headrace_cli.demo.console_reporter import ConsoleReporter
from headrace_cli.demo.measures import DemoMeasure, MeasuredPlays, PromisedLine
from headrace_cli.demo.rows import Row, RowsRecipe, row_lines
from headrace_cli.demo.seeds import SeedsReport
from headrace_cli.demo.settled import TrainingWait
from headrace_cli.demo.watch import Watch
from headrace_operations.errors import StartFailed
from headrace_schemas import Experience, TrainingMetrics
from tests.unit.cli.test_demo_measures import report

WEREWOLF = recipe.read(Path(__file__).parents[3] / "examples" / "werewolf")
WINS = "wolves win"


def rows(*values: float) -> tuple[Row, ...]:
    """Every measure of the recipe has the value of its row."""
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
    failed = [line.name for line in row_lines(WEREWOLF.measures, [rows(*values)]) if not line.holds]
    assert failed == [f"{WINS}: {name}" for name in fails]


def test_of_several_seeds_the_median_of_each_row_counts() -> None:
    seeds = [rows(0.5, 0.6, 0.7, value) for value in (0.2, 0.85, 0.9)]
    assert all(line.holds for line in row_lines(WEREWOLF.measures, seeds))
    assert not all(line.holds for line in row_lines(WEREWOLF.measures, [*seeds, seeds[0], seeds[0]]))


def test_checks_without_services_count() -> None:
    failed = PromisedLine("ablation: hide alone", "< 80%", "81%", holds=False)
    good = {name: report().measures["accuracy"] for name in WEREWOLF.measures}
    failed_report = replace(report(), measures=good, rows=rows(0.5, 0.6, 0.7, 0.9), checks=(failed,))
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
    ConsoleReporter(Console(file=output, width=100)).table(chosen, [replace(report(), rows=(row,))])
    assert " ".join(output.getvalue().split()) == "games 100 wolves win 75.0% ± 79.6%"


@pytest.mark.parametrize("wrong", [[100, 500], [0], [0, 500, 100], [0, 100, 100]])
def test_rows_begin_with_0_and_rise(wrong: list[int]) -> None:
    with pytest.raises(ValidationError, match=r"ascend from 0|at least 2"):
        RowsRecipe(unit="games", at=tuple(wrong))


def test_checks_are_lines_of_json_or_the_demo_does_not_begin() -> None:
    line: dict[str, Any] = {"name": "a", "wanted": "< 1", "found": "0", "holds": True}
    assert checks.run([sys.executable, "-c", f"print({json.dumps(json.dumps(line))})"], {}) == (PromisedLine(**line),)
    for program in ("print('{}')", "raise SystemExit(1)", "print('yes')"):
        with pytest.raises(StartFailed, match="the checks of the demo did not run"):
            checks.run([sys.executable, "-c", program], {})


class Bus:
    """A bus of two topics with one list of events for each poll."""

    def __init__(self, *looks: Sequence[Any]) -> None:
        self._looks = list(looks)
        self._now: Sequence[Any] = ()

    async def events(self, _topics: object, kind: type) -> AsyncIterator[Any]:
        if kind is Experience:
            self._now = self._looks.pop(0) if self._looks else ()
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


async def looks_until_settled(
    monkeypatch: pytest.MonkeyPatch, *looks: Sequence[Any], champions: Sequence[str] = ("m@0",)
) -> int:
    """How often it looked. Time passes by a second with each look."""
    clock = SimpleNamespace(now=0.0)

    async def sleep(_seconds: float) -> None:
        clock.now += 1.0

    @asynccontextmanager
    async def connected(_bus: str) -> AsyncIterator[None]:
        yield

    monkeypatch.setattr(settled, "connected", connected)
    monkeypatch.setattr(settled, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(settled, "asyncio", SimpleNamespace(sleep=sleep))
    settling = TrainingWait("bus", "m")
    monkeypatch.setattr(settling, "_follow", Bus(*looks))
    await settling.until_settled(Watch("bus", "m", champions=list(champions)), 60.0)
    return int(clock.now)


async def test_a_row_waits_until_everything_is_trained_and_the_bus_is_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = await looks_until_settled(
        monkeypatch, [experience_event("a")], [], [experience_event("b")], [trained("a", "b")]
    )
    assert looked == 3 + 5, "5 s after the last news"


async def test_the_wait_for_an_incomplete_batch_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (
        await looks_until_settled(monkeypatch, [experience_event("a"), experience_event("b")], [trained("a")]) == 1 + 21
    )
    assert (
        await looks_until_settled(monkeypatch, [experience_event("a")], [trained("a")], [trained(undone=["a"])])
        == 2 + 21
    )


async def test_a_row_waits_for_the_newest_version_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    news = [experience_event("a")], [trained("a", version="m@1")]
    assert await looks_until_settled(monkeypatch, *news, champions=("m@0", "m@1")) == 1 + 5
    with pytest.raises(StartFailed, match="0 experiences are not trained, and the newest version is m@1"):
        await looks_until_settled(monkeypatch, *news)
