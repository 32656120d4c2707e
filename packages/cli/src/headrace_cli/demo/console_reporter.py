"""Console output of the demo: one line for each version and each decision of the registry, and progress displays."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.errors import Unreachable
from headrace.topics import Progress, Range, Topics, connected
from headrace_cli.commands.shared import console_line
from headrace_cli.demo.measures import BeforeAfter, DemoMeasure, Row, median_row, medians
from headrace_cli.demo.report import Report, SeedsReport, ShownTask, takeover_mean_s
from headrace_cli.terminal import ProgressDisplay
from headrace_schemas import ModelEvent

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from headrace_cli.demo.recipe import Recipe

_POLL_S = 0.5


class ConsoleReporter:
    """Console output of a demo: progress, versions, decisions and results."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._first: float | None = None

    def print_event(self, line: str) -> None:
        """Print an event of the supervisor."""
        self._console.print(f"[yellow]{line}[/]")

    def print_console(self, url: str, data_dir: Path) -> None:
        """Print the address of the web console with a one-time token, which replaces an unused earlier token."""
        command = f"headrace console --data-dir {shlex.quote(str(data_dir))}"
        self._console.print(console_line(url, data_dir, command=command), soft_wrap=True)

    def print_decision(self, event: ModelEvent) -> None:
        """Print a line for each evaluated version, and for each version that was refused or rolled back."""
        score = event.statistics.get("score")
        if event.decision == "evaluated" and score is not None:
            self._first = score if self._first is None else self._first
            bar = "█" * round(score * 40)
            gain = f"{(score - self._first) * 100:+5.1f} points" if score != self._first else ""
            self._console.print(f"{event.version}  held-out success [bold]{score:6.1%}[/]  [cyan]{bar:40}[/] {gain}")
        elif event.decision in ("rejected", "rolled_back", "withdrawn"):
            self._console.print(f"{event.version}  [yellow]{event.decision}[/]: {event.reason}")

    @contextlib.contextmanager
    def show_activity(self, activity: str, *, with_its_own_bar: bool = False) -> Iterator[None]:
        """Show the name of the activity with a progress display while the block runs.

        Args:
            activity: what the demo does in the block.
            with_its_own_bar: whether the block draws its own progress bar in a terminal, so that this one is omitted
                there.
        """
        began = time.monotonic()
        has_own_bar = with_its_own_bar and self._console.is_terminal
        with (
            contextlib.nullcontext()
            if has_own_bar
            else ProgressDisplay("demo", activity=activity, console=self._console)
        ):
            yield
        self._console.print(f"[dim]{activity}: {time.monotonic() - began:.1f} s[/]")

    @contextlib.contextmanager
    def agent_progress(self, tasks: int, seconds: float) -> Iterator[Callable[[Watch, int], None]]:
        """Show the progress of the agent until it has finished its tasks or the time is over; the agent may stop
        earlier.

        Args:
            tasks: Number of the agent's tasks; 0 for an agent that is limited only by time.
            seconds: Maximum time of the agent's work.

        Returns:
            A function that takes the registry's decisions and the number of finished tasks.
        """
        began = time.monotonic()
        total, unit = (tasks, "tasks at most") if tasks else (seconds, "s at most")
        with ProgressDisplay("the agent works", total, unit=unit, estimate=False, console=self._console) as progress:

            def update(watch: Watch, finished: int) -> None:
                status = f"{watch.swaps} swaps, {watch.gain * 100:+.1f} points"
                progress.update(finished if tasks else time.monotonic() - began, activity=status)

            yield update

    def print_summary(self, report: Report, shortfalls: list[str]) -> None:
        """Print the summary of a demo, followed by the checks that failed."""
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

    def print_table(self, recipe: Recipe, reports: Sequence[Report]) -> None:
        """Print the measures of the recipe's versions; with several seeds, their medians."""
        if recipe.rows is None:
            self.print_measures(recipe.measures, [report.measures for report in reports])
            return
        self.print_rows(recipe, [report.rows for report in reports])

    def print_rows(self, recipe: Recipe, seeds: Sequence[Sequence[Row]]) -> None:
        """Print a table with the measures at each point of the recipe (`RowsRecipe`), one column for each point.

        For a single seed, values have 95 % intervals over plays; for several seeds, they are medians.
        """
        assert recipe.rows is not None
        table = _table(len(seeds), recipe.rows.unit, *(str(row.at) for row in seeds[0]))
        for name, measure in recipe.measures.items():
            texts = map(measure.text, median_row(name, seeds))
            margins = [row.margins.get(name) if len(seeds) == 1 else None for row in seeds[0]]
            cells = zip(texts, margins, strict=True)
            cells_with_margins = (
                text if margin is None else f"{text} ± {measure.text(margin)}" for text, margin in cells
            )
            table.add_row(name, *cells_with_margins)
        self._console.print(table)

    def print_measures(self, measures: Mapping[str, DemoMeasure], seeds: Sequence[Mapping[str, BeforeAfter]]) -> None:
        """Print a row for each measure: before, after and change; with several seeds, their medians."""
        if not measures:
            return
        table = _table(len(seeds), "", "before", "after", "change")
        for name, measure in measures.items():
            before, after, gain = medians(name, seeds)
            change = f"{gain * 100:+.1f} points" if measure.percent else f"{gain:+.2f}"
            table.add_row(name, measure.text(before), f"[bold]{measure.text(after)}[/]", change)
        self._console.print(table)

    def print_example(self, example: ShownTask | None) -> None:
        """Print the texts of both versions for one task, without interpreting markup."""
        for label, text in (("before", example.before), ("after", example.after)) if example else ():
            self._console.print(f"\n[dim]{label}[/]")
            self._console.print(text, markup=False, highlight=False)

    def print_promises(self, report: SeedsReport) -> None:
        """Print each promise of the demo with its limit, the measured value, and whether it holds."""
        for line in report.lines:
            difference = "" if line.holds else f": wanted {line.wanted}, found {line.found}"
            style = "green" if line.holds else "red"
            self._console.print(f"[{style}]{'holds' if line.holds else 'FAILS':6}[/]", end="")
            self._console.print(f"{line.name}{difference}", markup=False, highlight=False)


def _table(seeds: int, first: str, *columns: str) -> Table:
    from rich.table import Table

    table = Table(title=f"median of {seeds} seeds" if seeds > 1 else None, box=None, title_justify="left")
    table.add_column(first)
    for column in columns:
        table.add_column(column, justify="right")
    return table


@dataclass(frozen=True, slots=True)
class VersionAudit:
    """Score of a version on the audit tasks, which take part in no decision about versions."""

    version: str
    score: float
    time: datetime


@dataclass(slots=True)
class Watch:
    """Follower of the registry's events about one model. Call `run` once; the fields may be read at any time."""

    bus: str
    model: str
    """The trained model; events of other models are ignored."""
    on_event: Callable[[ModelEvent], None] = lambda event: None
    scores: dict[str, VersionAudit] = field(default_factory=dict)
    """Audit score by version, in the order of evaluation; only versions that served have one."""
    rejected: dict[str, datetime] = field(default_factory=dict)
    """Versions that were refused or withdrawn, with the time."""
    champions: list[str] = field(default_factory=list)
    """Versions that took over, in order; the first one is the base."""
    registered: dict[str, datetime] = field(default_factory=dict)
    """Time at which the registry registered each version."""
    takeover_s: dict[str, float] = field(default_factory=dict)
    """Seconds between registration and promotion of each version that took over, by the registry's clock."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _seen: set[str] = field(default_factory=set)
    _offset: int = 0

    @property
    def swaps(self) -> int:
        return max(0, len(self.champions) - 1)

    @property
    def gain(self) -> float:
        """Score of the last measured champion minus that of the first; 0 with fewer than two scores."""
        scores = [self.scores[version].score for version in self.champions if version in self.scores]
        return scores[-1] - scores[0] if scores else 0.0

    async def run(self) -> None:
        """Read the events until cancelled. If the bus does not answer, try again until it does."""
        while True:
            with contextlib.suppress(Unreachable):
                async with connected(self.bus) as topics:
                    await self._follow(topics)
            await asyncio.sleep(_POLL_S)

    async def _follow(self, topics: Topics) -> None:
        while True:
            progress = Progress()
            async for entry in topics.read(Range("model-events", from_offset=self._offset), progress):
                self._offset = entry.offset + 1
                event = entry.event
                if isinstance(event, ModelEvent) and event.model == self.model and event.event_id not in self._seen:
                    self._seen.add(event.event_id)
                    self._add(event)
            await asyncio.sleep(_POLL_S)

    def _add(self, event: ModelEvent) -> None:
        if "score" in event.statistics:
            self.scores.setdefault(event.version, VersionAudit(event.version, event.statistics["score"], event.time))
        if event.decision == "registered":
            self.registered.setdefault(event.version, event.time)
        elif event.decision == "promoted":
            self.champions.append(event.version)
            if event.version in self.registered:
                waited = event.time - self.registered[event.version]
                self.takeover_s.setdefault(event.version, waited.total_seconds())
        elif event.decision in ("rejected", "withdrawn"):
            self.rejected[event.version] = event.time
        elif event.decision == "rolled_back" and event.previous is not None:
            self.champions.append(event.previous)
        self.on_event(event)
        self.changed.set()
