"""The result of the controls: a table, JSON, a sentence for each expectation that did not hold, and advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace_operations.controls.kinds import TRUE, Control
from headrace_operations.controls.statistics import Mean, Score, difference, mean
from headrace_schemas.controls import ShortRun


@dataclass(frozen=True, slots=True)
class Run:
    """A control with a seed: its training, and its plays of the audit tasks."""

    control: Control
    seed: int
    run: ShortRun
    scores: Sequence[Score]


@dataclass(frozen=True, slots=True)
class Row:
    """A control over all seeds."""

    control: Control
    score: Mean
    gain: Mean
    """Over the base, play by play."""
    steps: int
    trained: int
    stopped: tuple[str, ...]

    @property
    def gain_text(self) -> str:
        return f"{self.gain.value:+.3f} ± {self.gain.error:.3f}"

    @property
    def verdict(self) -> str:
        """How the score went, at two standard errors."""
        if self.gain.within():
            return "same"
        return "better" if self.gain.value > 0 else "worse"

    @property
    def as_expected(self) -> bool:
        """`open` is wrong only when the score falls."""
        wanted = self.control.expected
        if wanted in ("not better", "open"):
            return self.verdict != ("better" if wanted == "not better" else "worse")
        return self.verdict == wanted


_NOISE = (
    "rewards that say nothing lower the score: at this learning rate the noise of a batch moves the model. Lower "
    "trainer.optimizer.learning_rate or raise trainer.batch_experiences: shorter steps, and more of them, learn the "
    "same with less noise"
)


class Report:
    """All controls beside the base, in the order in which they were trained."""

    def __init__(self, experiences: int, base: Sequence[Score], runs: Sequence[Run]) -> None:
        self.experiences = experiences
        self.base = mean([base])
        by_control: dict[str, list[Run]] = {}
        for one in runs:
            by_control.setdefault(one.control.name, []).append(one)
        self.rows = tuple(_row(found, base) for found in by_control.values())

    @property
    def problems(self) -> list[str]:
        """In words, what did not come out as it has to."""
        truth = next((row for row in self.rows if row.control is TRUE), None)
        return [f"{row.control.name}: {_said(row, truth)}" for row in self.rows if not row.as_expected]

    @property
    def advice(self) -> list[str]:
        """In words, what is as it may be, and could be better."""
        ruined = [row for row in self.rows if row.control.expected == "not better" and row.verdict == "worse"]
        return [f"{row.control.name}: {_NOISE} ({row.gain_text})" for row in ruined]

    def as_json(self) -> dict[str, Any]:
        return {
            "experiences": self.experiences,
            "base": self.base.report(),
            "controls": [
                {
                    "name": row.control.name,
                    "shows": row.control.shows,
                    "expected": row.control.expected,
                    "verdict": row.verdict,
                    "as_expected": row.as_expected,
                    "score": row.score.report(),
                    "gain": row.gain.report(),
                    "steps": row.steps,
                    "trained": row.trained,
                    "stopped": list(row.stopped),
                }
                for row in self.rows
            ],
            "problems": self.problems,
            "advice": self.advice,
        }


def _row(runs: Sequence[Run], base: Sequence[Score]) -> Row:
    plays = [one.scores for one in runs]
    return Row(
        runs[0].control,
        mean(plays, shared=True),
        difference(plays, [base] * len(plays), shared=True),
        sum(one.run.steps for one in runs),
        sum(one.run.trained for one in runs),
        tuple(one.run.stopped for one in runs if one.run.stopped),
    )


def _said(row: Row, truth: Row | None) -> str:
    gain = row.gain_text
    if truth is not None and row is not truth and row.verdict == "better":
        gain += f", the true reward {truth.gain_text}"
    return f"{row.control.otherwise} ({gain})"
