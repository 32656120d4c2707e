"""Report of the controls as a table and JSON, with problems and advice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace_operations.controls.kinds import TRUE, Control
from headrace_schemas.programs.replay import ShortRun
from headrace_statistics.clustered_means import Mean, Score, difference, mean


@dataclass(frozen=True, slots=True)
class Run:
    """One training with a control and a seed, and the scores of its plays of audit tasks."""

    control: Control
    seed: int
    run: ShortRun
    scores: Sequence[Score]


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one control over all seeds."""

    control: Control
    score: Mean
    gain: Mean
    """Gain over the base, compared play by play."""
    steps: int
    trained: int
    stopped: tuple[str, ...]

    @property
    def gain_text(self) -> str:
        return f"{self.gain.value:+.3f} ± {self.gain.error:.3f}"

    @property
    def verdict(self) -> str:
        """Change of the score, at two standard errors."""
        if self.gain.within():
            return "same"
        return "better" if self.gain.value > 0 else "worse"

    @property
    def as_expected(self) -> bool:
        """Whether the result is the expected one. A result that is `open` is only unexpected if the score falls."""
        expected = self.control.expected
        if expected in ("not better", "open"):
            return self.verdict != ("better" if expected == "not better" else "worse")
        return self.verdict == expected


_NOISE = (
    "rewards without information lower the score: at this learning rate the noise of a batch changes the model. Lower "
    "trainer.optimizer.learning_rate or raise trainer.batch_experiences: smaller steps, and more of them, learn the "
    "same with less noise"
)


class Report:
    """Results of all controls and of the base, in the order of training."""

    def __init__(self, experiences: int, base: Sequence[Score], runs: Sequence[Run]) -> None:
        self.experiences = experiences
        self.base = mean([base])
        by_control: dict[str, list[Run]] = {}
        for run in runs:
            by_control.setdefault(run.control.name, []).append(run)
        self.rows = tuple(_row(same_control, base) for same_control in by_control.values())

    @property
    def problems(self) -> list[str]:
        """Explanations of unexpected results."""
        truth = next((row for row in self.rows if row.control is TRUE), None)
        return [f"{row.control.name}: {_problem_text(row, truth)}" for row in self.rows if not row.as_expected]

    @property
    def advice(self) -> list[str]:
        """Suggestions for results that are expected, but could be better."""
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
    plays = [run.scores for run in runs]
    return Row(
        runs[0].control,
        mean(plays, shared=True),
        difference(plays, [base] * len(plays), shared=True),
        sum(run.run.steps for run in runs),
        sum(run.run.trained for run in runs),
        tuple(run.run.stopped for run in runs if run.run.stopped),
    )


def _problem_text(row: Row, truth: Row | None) -> str:
    gain = row.gain_text
    if truth is not None and row is not truth and row.verdict == "better":
        gain += f", the true reward {truth.gain_text}"
    return f"{row.control.otherwise} ({gain})"
