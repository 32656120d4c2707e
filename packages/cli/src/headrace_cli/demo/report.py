"""The report of a demo, and whether it reached its goal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from headrace_cli.demo.measures import BeforeAfter, PromisedLine
from headrace_cli.demo.recipe import Goal
from headrace_cli.demo.rows import Row
from headrace_operations.turn_account import TurnAccount


@dataclass(frozen=True, slots=True)
class VersionScore:
    """Held-out success of one version on the audit tasks, None of one that was refused; `at_s` counts from the start of
    the traffic, `takeover_s` from the registration to the promotion.
    """

    version: str
    score: float | None
    at_s: float
    promoted: bool
    takeover_s: float | None = None


def takeover_mean_s(versions: Sequence[VersionScore]) -> float | None:
    """Mean seconds from published to serving of the versions that took over after the first; None without any."""
    waits_s = [version.takeover_s for version in versions[1:] if version.takeover_s is not None]
    return statistics.fmean(waits_s) if waits_s else None


@dataclass(frozen=True, slots=True)
class ShownTask:
    """What the first version and the last one wrote of one task."""

    task: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class Report:
    """`reports/demo.json`. Success rates are in 0..1, on tasks that chose no version; the account is that of turns,
    from topics alone.
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
    """What the recipe measures besides, of the first version and of the last."""
    shown: ShownTask | None = None
    rows: tuple[Row, ...] = ()
    """The same at each row of the recipe."""
    checks: tuple[PromisedLine, ...] = ()
    """What it checks without any service."""

    @classmethod
    def account(cls, account: TurnAccount) -> dict[str, object]:
        """The part of the report that the account gives."""
        return {
            "turns_captured": account.captured,
            "turns_trained": account.trained,
            "turns_waiting": sum(account.waiting.values()),
            "turns_dropped": dict(account.dropped),
            "account_problems": account.problems,
        }

    def shortfalls(self, goal: Goal) -> list[str]:
        """What is not as promised; empty on success."""
        dropped = sum(self.turns_dropped.values())
        total = self.turns_trained + self.turns_waiting + dropped
        checks = {
            f"success rose by {self.after - self.before:+.3f}, wanted {goal.gain_min:+.3f}": (
                self.after - self.before >= goal.gain_min
            ),
            f"{self.swaps} versions took over, wanted {goal.swaps_min}": self.swaps >= goal.swaps_min,
            f"{self.failed_requests} of the agent's {self.requests} requests failed": not self.failed_requests,
            f"the account does not add up: {self.turns_captured} captured, {total} accounted": (
                total == self.turns_captured
            ),
            f"the account contradicts itself: {'; '.join(self.account_problems[:3])}": not self.account_problems,
            "no turn was trained": self.turns_trained > 0,
        }
        return [text for text, holds in checks.items() if not holds]

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")
