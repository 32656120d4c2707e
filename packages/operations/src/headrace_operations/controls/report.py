"""Report of the controls as a table, JSON and a chart, with problems and advice.

Rewards without information can move a model a little in any direction. So shuffled and random rewards are a problem
only if they gain more than a fifth of what the true reward gains, with the certainty of two standard errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headrace_operations.charts import FAINT, INK, LINE, WRONG, pyplot, save
from headrace_operations.controls.kinds import TRUE, Control
from headrace_schemas.programs import ShortRun
from headrace_statistics.intervals import Mean, Score, certainty_above, difference, mean

SHARE_MAX = 0.2
"""Largest gain of rewards without information, as a share of the gain of the true reward."""
CERTAINTY = 0.977
"""Certainty from which a larger gain counts as shown: two standard errors."""
_NO_GAIN = Mean(0.0, 0.0, None, 0.0, ())


@dataclass(frozen=True, slots=True)
class Run:
    """One training under a control experiment with one seed, and the scores of its version on the audit tasks."""

    control: Control
    seed: int
    run: ShortRun
    scores: Sequence[Score]


@dataclass(frozen=True, slots=True)
class Row:
    """Results of one control experiment (for example training on shuffled rewards), summarized over all its seeds."""

    control: Control
    score: Mean
    gain: Mean
    """Gain over the base, compared play by play."""
    steps: int
    trained: int
    stopped: tuple[str, ...]
    true_gain: Mean = _NO_GAIN
    """Gain of the true reward, 0 if it was not trained."""

    @property
    def gain_text(self) -> str:
        return f"{self.gain.value:+.3f} ± {self.gain.error:.3f}"

    @property
    def verdict(self) -> str:
        """Change of the score: `better`, `worse`, or `same` within two standard errors."""
        if self.gain.within():
            return "same"
        return "better" if self.gain.value > 0 else "worse"

    @property
    def share(self) -> float | None:
        """Gain divided by the gain of the true reward, or None if the latter is not above 0."""
        return self.gain.value / self.true_gain.value if self.true_gain.value > 0 else None

    @property
    def certainty(self) -> float:
        """Probability that this control gains more than `SHARE_MAX` times the gain of the true reward.

        Rewards without information should gain less, so a high probability is a warning.
        """
        return certainty_above(self.gain, self.true_gain, SHARE_MAX)

    @property
    def as_expected(self) -> bool:
        """Whether the control experiment ended with the result that its `Control.expected` predicts.

        For `open` every result but a fall of the score is expected. For `not better` the result is unexpected only if
        the score rises, with enough certainty, by more than `SHARE_MAX` times the gain of the true reward.
        """
        expected = self.control.expected
        if expected == "not better":
            return self.certainty < CERTAINTY
        return self.verdict != "worse" if expected == "open" else self.verdict == expected


_NOISE = (
    "rewards without information lower the score: at this learning rate the noise of a batch changes the model. Lower "
    "trainer.optimizer.learning_rate or raise trainer.batch_experiences: smaller steps, and more of them, learn the "
    "same with less noise"
)
_ONE_SEED = (
    "the standard errors are those over tasks: with one training of each control, the variation between trainings is "
    "not known. Repeat with --seeds 5 before you rely on a small difference"
)


class Report:
    """Results of all controls and of the base, in the order of training."""

    def __init__(
        self, experiences: int, base: Sequence[Score], runs: Sequence[Run], version: str = "", later: int = 0
    ) -> None:
        """Compare the scores of each run with those of the base.

        Args:
            experiences: number of experiences on which each control trained.
            base: scores of the base.
            runs: results of the trainings.
            version: version that sampled all these experiences.
            later: number of experiences of other versions, which are left out.
        """
        self.experiences = experiences
        self.version = version
        self.later = later
        self.base = mean([base])
        by_control: dict[str, list[Run]] = {}
        for run in runs:
            by_control.setdefault(run.control.name, []).append(run)
        rows = [_row(same_control, base) for same_control in by_control.values()]
        self.true_gain = next((row.gain for row in rows if row.control is TRUE), _NO_GAIN)
        self.rows = tuple(replace(row, true_gain=self.true_gain) for row in rows)
        self.seeds = max(map(len, by_control.values()), default=0)

    @property
    def problems(self) -> list[str]:
        """A text for each control with an unexpected result, which explains what that result means."""
        return [f"{row.control.name}: {_problem_text(row)}" for row in self.rows if not row.as_expected]

    @property
    def advice(self) -> list[str]:
        """Suggestions for results that are as expected but could be improved."""
        uninformed = [row for row in self.rows if row.control.expected == "not better"]
        advice = [f"{row.control.name}: {_NOISE} ({row.gain_text})" for row in uninformed if row.verdict == "worse"]
        advice += [
            f"{row.control.name}: gains {_comparison(row)}; this is no sign against the reward"
            for row in uninformed
            if row.verdict == "better" and row.as_expected
        ]
        if self.seeds == 1:
            advice.append(_ONE_SEED)
        return advice

    def as_json(self) -> dict[str, Any]:
        return {
            "experiences": self.experiences,
            "version": self.version,
            "left_out_of_later_versions": self.later,
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
                    "share_of_true_gain": None if row.share is None else round(row.share, 4),
                    "certainty_above_share": round(row.certainty, 4),
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


def _problem_text(row: Row) -> str:
    return f"{row.control.otherwise} ({_comparison(row) if row.control.expected == 'not better' else row.gain_text})"


def _comparison(row: Row) -> str:
    """Return in words the gain of a control, its share of the true reward's gain, and the certainty that it is too
    large.
    """
    beside = "" if row.share is None else f", {row.share:.0%} of the true reward's {row.true_gain.value:+.3f}"
    limit = "0" if row.share is None else f"{SHARE_MAX:.0%} of it"
    return f"{row.gain_text}{beside}; more than {limit} with a certainty of {row.certainty:.1%}"


def draw_chart(report: Report, path: Path) -> bool:
    """Draw the gain of each control experiment (for example training on shuffled rewards) to the PNG file `path`.

    Return False if matplotlib is not installed.
    """
    try:
        plt = pyplot()
    except ImportError:
        return False
    figure, axes = plt.subplots(figsize=(7.2, 0.5 * len(report.rows) + 1.4), dpi=150)
    axes.axvline(0, color=FAINT, linewidth=1)
    for y, row in zip(range(len(report.rows))[::-1], report.rows, strict=True):
        axes.errorbar(
            row.gain.value * 100,
            y,
            xerr=200 * row.gain.error,
            fmt="o",
            color=LINE if row.as_expected else WRONG,
            capsize=3,
        )
    axes.set_yticks(range(len(report.rows))[::-1], [row.control.name for row in report.rows])
    axes.set_xlabel("gain over the base, points, with two standard errors", color=INK)
    save(figure, path)
    return True
