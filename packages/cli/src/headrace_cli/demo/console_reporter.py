"""Prints the demo: a line for each version, and the progress of each step."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from headrace_cli.demo.measures import BeforeAfter, DemoMeasure, medians
from headrace_cli.demo.report import Report, ShownTask, takeover_mean_s
from headrace_cli.demo.rows import Row, median_row
from headrace_cli.demo.seeds import SeedsReport
from headrace_cli.progress import ProgressDisplay
from headrace_schemas import ModelEvent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from headrace_cli.demo.recipe import Recipe
    from headrace_cli.demo.watch import Watch


class ConsoleReporter:
    """Everything that the demo says."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._first: float | None = None

    def happened(self, line: str) -> None:
        self._console.print(f"[yellow]{line}[/]")

    def decided(self, event: ModelEvent) -> None:
        """One line for each version that was evaluated, and for what became of it."""
        score = event.statistics.get("score")
        if event.decision == "evaluated" and score is not None:
            self._first = score if self._first is None else self._first
            bar = "█" * round(score * 40)
            gain = f"{(score - self._first) * 100:+5.1f} points" if score != self._first else ""
            self._console.print(f"{event.version}  held-out success [bold]{score:6.1%}[/]  [cyan]{bar:40}[/] {gain}")
        elif event.decision in ("rejected", "rolled_back", "withdrawn"):
            self._console.print(f"{event.version}  [yellow]{event.decision}[/]: {event.reason}")

    @contextlib.contextmanager
    def doing(self, what: str, *, with_its_own_bar: bool = False) -> Iterator[None]:
        """`with_its_own_bar`: what is done draws a bar in a terminal, and is silent elsewhere."""
        began = time.monotonic()
        drawn = with_its_own_bar and self._console.is_terminal
        with contextlib.nullcontext() if drawn else ProgressDisplay("demo", doing=what, console=self._console):
            yield
        self._console.print(f"[dim]{what}: {time.monotonic() - began:.1f} s[/]")

    @contextlib.contextmanager
    def working(self, seconds: float) -> Iterator[Callable[[Watch], None]]:
        """The agent works for so many seconds at most; it stops as soon as it has become good enough."""
        began = time.monotonic()
        with ProgressDisplay(
            "the agent works", seconds, unit="s at most", estimate=False, console=self._console
        ) as progress:

            def update(watch: Watch) -> None:
                told = f"{watch.swaps} swaps, {watch.gain * 100:+.1f} points"
                progress.at(time.monotonic() - began, doing=told)

            yield update

    def ended(self, report: Report, shortfalls: list[str]) -> None:
        dropped = ", ".join(f"{count} {reason}" for reason, count in report.turns_dropped.items()) or "none"
        takeover_s = takeover_mean_s(report.versions)
        serving = "" if takeover_s is None else f", {takeover_s:.1f} s after they were published"
        self._console.print(
            f"\nheld-out success [bold]{report.before:.1%} → {report.after:.1%}[/] in {report.wall_s:.0f} s "
            f"({report.traffic_s:.0f} s of traffic), {report.swaps} versions took over{serving}\n"
            f"turns captured {report.turns_captured} = trained {report.turns_trained} + waiting {report.turns_waiting}"
            f" + dropped {sum(report.turns_dropped.values())} ({dropped})\n"
            f"requests {report.requests}, failed {report.failed_requests}"
        )
        for text in shortfalls:
            self._console.print(f"[red]not as promised:[/] {text}")

    def table(self, recipe: Recipe, reports: Sequence[Report]) -> None:
        """What the recipe measures of its versions; medians where there are several seeds."""
        if recipe.rows is None:
            self.measured(recipe.measures, [report.measures for report in reports])
            return
        self.rows(recipe, [report.rows for report in reports])

    def rows(self, recipe: Recipe, seeds: Sequence[Sequence[Row]]) -> None:
        """A column for each row of the recipe. Of a single seed with 95 % intervals over its plays."""
        assert recipe.rows is not None
        table = _table(len(seeds), recipe.rows.unit, *(str(row.at) for row in seeds[0]))
        for name, measure in recipe.measures.items():
            texts = map(measure.text, median_row(name, seeds))
            margins = [row.margins.get(name) if len(seeds) == 1 else None for row in seeds[0]]
            found = zip(texts, margins, strict=True)
            table.add_row(name, *(text if one is None else f"{text} ± {measure.text(one)}" for text, one in found))
        self._console.print(table)

    def measured(self, measures: Mapping[str, DemoMeasure], seeds: Sequence[Mapping[str, BeforeAfter]]) -> None:
        """A row for each measure: before, after, and by how much it changed; medians where there are several seeds."""
        if not measures:
            return
        table = _table(len(seeds), "", "before", "after", "change")
        for name, measure in measures.items():
            before, after, gain = medians(name, seeds)
            change = f"{gain * 100:+.1f} points" if measure.percent else f"{gain:+.2f}"
            table.add_row(name, measure.text(before), f"[bold]{measure.text(after)}[/]", change)
        self._console.print(table)

    def showed(self, shown: ShownTask | None) -> None:
        """What both versions wrote, as it is: none of it is markup."""
        for when, text in (("before", shown.before), ("after", shown.after)) if shown else ():
            self._console.print(f"\n[dim]{when}[/]")
            self._console.print(text, markup=False, highlight=False)

    def held(self, report: SeedsReport) -> None:
        for line in report.lines:
            told = "" if line.holds else f": wanted {line.wanted}, found {line.found}"
            style = "green" if line.holds else "red"
            self._console.print(f"[{style}]{'holds' if line.holds else 'FAILS':6}[/]", end="")
            self._console.print(f"{line.name}{told}", markup=False, highlight=False)


def _table(seeds: int, first: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=f"median of {seeds} seeds" if seeds > 1 else None, box=None, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table
