"""Report of a demo: whether it reached its goal, its chart, and the comparison of several seeds with its promises."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace_cli.demo.measures import BeforeAfter, CheckResult, Row, check_measures, check_rows
from headrace_cli.demo.recipe import Goal, Recipe
from headrace_operations.charts import FAINT, INK, LINE, pyplot, save
from headrace_operations.turn_account import TurnAccount


@dataclass(frozen=True, slots=True)
class VersionScore:
    """Success rate of one version on the audit tasks, which are held out.

    `score` is None for a refused version. `at_s` counts from the start of the traffic, `takeover_s` from the
    registration of the version to its promotion.
    """

    version: str
    score: float | None
    at_s: float
    promoted: bool
    takeover_s: float | None = None


def takeover_mean_s(versions: Sequence[VersionScore]) -> float | None:
    """Return the mean seconds from registration to promotion of the versions after the first, or None if there are
    none.
    """
    waits_s = [version.takeover_s for version in versions[1:] if version.takeover_s is not None]
    return statistics.fmean(waits_s) if waits_s else None


@dataclass(frozen=True, slots=True)
class ShownTask:
    """Texts that the first and the last version wrote for one task."""

    task: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a demo, as they are in `reports/demo.json`.

    `before` and `after` are the success rates, in 0..1, of the first and the last version on audit tasks. These are
    held-out tasks that no decision about versions depends on. `turns_trained`, `turns_waiting` and `turns_dropped` are
    counts of captured turns by their training state.
    """

    before: float
    after: float
    versions: tuple[VersionScore, ...]
    turns_captured: int
    turns_trained: int
    turns_waiting: int
    turns_dropped: dict[str, int]
    failed_requests: int
    requests: int
    swaps: int
    wall_s: float
    traffic_s: float
    seed: int
    account_problems: tuple[str, ...] = ()
    measures: dict[str, BeforeAfter] = field(default_factory=dict)
    """Further measures of the recipe, of the first and the last version."""
    shown: ShownTask | None = None
    rows: tuple[Row, ...] = ()
    """Measures at each point of the recipe's rows."""
    checks: tuple[CheckResult, ...] = ()
    """Results of the checks without services."""

    @classmethod
    def account(cls, account: TurnAccount) -> dict[str, object]:
        """Return the report's fields that are taken from the turn account."""
        return {
            "turns_captured": account.captured,
            "turns_trained": account.trained,
            "turns_waiting": sum(account.waiting.values()),
            "turns_dropped": dict(account.dropped),
            "account_problems": account.problems,
        }

    def shortfalls(self, goal: Goal) -> list[str]:
        """Return a clause for each promise that the demo missed, including those in `goal`; empty if it missed none."""
        dropped = sum(self.turns_dropped.values())
        total = self.turns_trained + self.turns_waiting + dropped
        promises = {
            f"success rose by {self.after - self.before:+.3f}, the goal is {goal.gain_min:+.3f}": (
                self.after - self.before >= goal.gain_min
            ),
            f"{self.swaps} versions took over, the goal is {goal.swaps_min}": self.swaps >= goal.swaps_min,
            f"{self.failed_requests} of the agent's {self.requests} requests failed": not self.failed_requests,
            f"the account does not add up: {self.turns_captured} captured, {total} accounted": (
                total == self.turns_captured
            ),
            f"the account has contradictions: {'; '.join(self.account_problems[:3])}": not self.account_problems,
            "no turn was trained": self.turns_trained > 0,
        }
        return [text for text, holds in promises.items() if not holds]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")


def draw_chart(report: Report, title: str, path: Path) -> bool:
    """Draw the scores of a demo's versions as a PNG. Return False if matplotlib is not installed or no version has a
    score.
    """
    if not any(version.promoted and version.score is not None for version in report.versions):
        return False
    try:
        plt = pyplot()
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7.2, 3.8), dpi=150)
    scored = [
        (version.at_s, version.score * 100)
        for version in report.versions
        if version.promoted and version.score is not None
    ]
    rejected = [version.at_s for version in report.versions if not version.promoted]
    times, scores = zip(*scored, strict=True)
    axes.step(times, scores, where="post", color=LINE, linewidth=2)
    axes.plot(times, scores, "o", color=LINE, label="took over")
    if rejected:
        axes.plot(rejected, [3] * len(rejected), "x", color=FAINT, label="refused")
        axes.legend(frameon=False, loc="lower right")
    axes.set_title(title, loc="left", color=INK, fontsize=11)
    axes.set_xlabel("seconds of the agent's own traffic", color=INK)
    axes.set_ylabel("audit tasks answered right, %", color=INK)
    axes.set_ylim(0, 100)
    axes.grid(axis="y", color="#e9ecef")
    captured = f"{report.turns_captured:,} calls captured, {report.turns_trained:,} trained, {report.swaps} swaps"
    axes.text(
        0.01, 0.02, f"{captured}, {report.failed_requests} failed requests", transform=axes.transAxes, color=FAINT
    )
    save(figure, path)
    return True


@dataclass(frozen=True, slots=True)
class SeedsReport:
    """Results of a demo with several seeds, and whether each promise holds for the median or for each of the seeds."""

    title: str
    seeds: tuple[Report, ...]
    lines: tuple[CheckResult, ...]

    @classmethod
    def of(cls, recipe: Recipe, goal: Goal, reports: Sequence[Report]) -> SeedsReport:
        promises = check_measures(recipe.measures, [report.measures for report in reports])
        if recipe.rows is not None:
            promises += check_rows(recipe.measures, [report.rows for report in reports])
        promises += reports[0].checks  # equal for all seeds
        promises += [
            CheckResult(f"seed {report.seed}", "as promised", "; ".join(shortfalls) or "as promised", not shortfalls)
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
