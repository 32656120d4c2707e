"""Acceptance lines of the training arms of `benchmarks.signals`. Pure, so that tests can use constructed results."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks import _gains_arms as arms
from benchmarks._gains_arms import Gain
from benchmarks._learning_lines import Line
from benchmarks._run_processes import auroc
from headrace_statistics import student_t
from headrace_statistics.clustered_means import Score

POINTS_MIN, EDITS_MAX, SESSIONS_MAX = 0.15, arms.EDITS, 500
FEW_SHARE_MIN, NATURAL_SHARE_MIN, POISON_COST_MAX, GUARD_LOSS_MAX = 0.7, 0.5, 0.05, 0.01
OF_BINARY_MAX, RIGHT_SIGN_MIN, AUROC_MIN = 0.5, 0.9, 0.8
_BASES = dict.fromkeys((arms.DIRECTED_BASE, arms.TYPED, arms.BY_TOKEN, *arms.RIVALS), arms.DIRECTED_BASE)


@dataclass(frozen=True, slots=True)
class Figure:
    """Mean over seeds with the 95 % interval of Student's t, which is infinite for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def reach(self) -> float:
        return student_t.mean_margin(self.values, 0.975)

    def report(self) -> dict[str, object]:
        low, high = (round(bound, 4) for bound in (self.mean - self.reach, self.mean + self.reach))
        by_seed = [round(value, 4) for value in self.values]
        return {"mean": round(self.mean, 4), "low": low, "high": high, "by_seed": by_seed}


class Gains:
    """Run results by arm and seed. Compared runs have played the same audit tasks with the same seeds."""

    def __init__(self, runs: Iterable[Gain]) -> None:
        self.arms: dict[str, list[Gain]] = {}
        for result in sorted(runs, key=lambda run: run.seed):
            self.arms.setdefault(result.arm, []).append(result)

    def has(self, *names: str) -> bool:
        return all(name in self.arms for name in names)

    def score(self, arm: str) -> Figure:
        return Figure(tuple(_mean(run.scores) for run in self.arms[arm]))

    def gain(self, arm: str, kind: str = "") -> Figure:
        """Return the gain over the base, on all tasks or on tasks of one `kind`."""
        return Figure(tuple(_mean_difference(run.scores, base, kind) for run, base in self._with_base(arm)))

    def after(self, arm: str) -> list[tuple[int, Figure]]:
        """Return, for each number of trained sessions that all seeds have reached, the gain over the base."""
        gains = []
        for traced in zip(*([run.trace for run in self.arms[arm]]), strict=False):
            pairs = zip(traced, self._with_base(arm), strict=True)
            gains.append(
                (traced[0][0], Figure(tuple(_mean_difference(plays, base, "") for (_, plays), (_, base) in pairs)))
            )
        return gains

    def sessions_to(self, arm: str, points: float) -> float:
        """Return the number of sessions after which the mean gain reaches `points`, or infinity."""
        return next((float(sessions) for sessions, gain in self.after(arm) if gain.mean >= points), math.inf)

    def aurocs(self, arm: str, *, paid: bool = False) -> Figure:
        """Return the AUROC of the reward model's estimates of all runs, or of the rewards that it gave if `paid`."""
        runs = [run.judged if paid else run.ordered for run in self.arms[arm]]
        return Figure(
            tuple(auroc(np.array([value for _, value in run]), np.array([good for good, _ in run])) for run in runs)
        )

    def _with_base(self, arm: str) -> list[tuple[Gain, Sequence[Score]]]:
        bases = {run.seed: run.scores for run in self.arms[_BASES.get(arm, arms.BASE)]}
        return [(run, bases[run.seed]) for run in self.arms[arm]]


def _mean(plays: Sequence[Score]) -> float:
    return statistics.fmean(value for _, value in plays)


def _mean_difference(plays: Sequence[Score], base: Sequence[Score], kind: str) -> float:
    """Return the mean difference over the plays that both have, because a base may have more."""
    pairs = [(score, other) for score, other in zip(plays, base, strict=False) if score[0].startswith(kind)]
    assert all(score[0] == other[0] for score, other in pairs), "the same tasks in the same order"
    return statistics.fmean(score[1] - other[1] for score, other in pairs)


def lines(gains: Gains) -> list[Line]:
    """Return all lines of the arms that were run."""
    return [*_edit_lines(gains), *_thumb_lines(gains), *_natural_lines(gains), *_typed_lines(gains), *_gap_lines(gains)]


def _edit_lines(gains: Gains) -> list[Line]:
    acceptance_lines = []
    for arm in (arms.SFT, arms.DPO):
        if gains.has(arm, arms.BASE):
            most = max(run.edits for run in gains.arms[arm])
            acceptance_lines.append(Line(f"{arm}: gain", gains.gain(arm).mean, POINTS_MIN, 1))
            acceptance_lines.append(Line(f"{arm}: edits, of the seed with most", most, 1, EDITS_MAX))
    return acceptance_lines


def _thumb_lines(gains: Gains) -> list[Line]:
    if not gains.has(arms.FEW, arms.EXPLICIT, arms.BASE):
        return []
    few, full = gains.gain(arms.FEW).mean, gains.gain(arms.EXPLICIT).mean
    acceptance_lines = [
        Line("few thumbs: AUROC of the reward model on all runs", gains.aurocs(arms.FEW).mean, AUROC_MIN, 1),
        Line("few thumbs: AUROC of the rewards that it paid", gains.aurocs(arms.FEW, paid=True).mean, AUROC_MIN, 1),
        Line("few thumbs: share of the gain with full labels", _share(few, full), FEW_SHARE_MIN, math.inf),
    ]
    if gains.has(arms.POISONED):
        cost = few - gains.gain(arms.POISONED).mean
        acceptance_lines.append(Line("few thumbs: what 2 % poisoners cost", cost, -1, POISON_COST_MAX))
    return acceptance_lines


def _natural_lines(gains: Gains) -> list[Line]:
    if not gains.has(arms.NATURAL, arms.EXPLICIT, arms.BASE):
        return []
    share = _share(gains.gain(arms.NATURAL).mean, gains.gain(arms.EXPLICIT).mean)
    return [Line("natural signals: share of the gain of explicit feedback", share, NATURAL_SHARE_MIN, math.inf)]


def _typed_lines(gains: Gains) -> list[Line]:
    if not gains.has(arms.TYPED, arms.DIRECTED_BASE):
        return []
    sessions = max(run.sessions for run in gains.arms[arms.TYPED])
    acceptance_lines = [
        Line("typed corrections: gain", gains.gain(arms.TYPED).mean, POINTS_MIN, 1),
        Line("typed corrections: sessions", sessions, 1, SESSIONS_MAX),
        Line("typed corrections: what the guard loses", -gains.gain(arms.TYPED, arms.GUARD).mean, -1, GUARD_LOSS_MAX),
    ]
    if gains.has(*arms.RIVALS):
        name = "typed corrections: sessions to 15 points, as a share of those with binary rewards"
        typed = gains.sessions_to(arms.TYPED, POINTS_MIN)
        binary = min(gains.sessions_to(arm, POINTS_MIN) for arm in arms.RIVALS)
        acceptance_lines.append(Line(name, math.inf if math.isinf(typed) else typed / binary, 0, OF_BINARY_MAX))
    return acceptance_lines


def _gap_lines(gains: Gains) -> list[Line]:
    """Return the line about gaps. A setting is right if training began with a gap, and was refused without one."""
    outcomes = [bool(run.steps) for run in gains.arms.get(arms.HAS_A_GAP.name, [])]
    outcomes += [not run.steps for arm in arms.HAS_NONE for run in gains.arms.get(arm.name, [])]
    if not outcomes:
        return []
    return [
        Line(
            "typed corrections: settings whose gap has the right sign",
            _share(sum(outcomes), len(outcomes)),
            RIGHT_SIGN_MIN,
            1,
        )
    ]


def misled(gains: Gains) -> Figure | None:
    """Return 1 for each seed in which training began with misleading users, otherwise 0."""
    runs = gains.arms.get(arms.MISLED.name, [])
    return Figure(tuple(float(bool(run.steps)) for run in runs)) if runs else None


def _share(part: float, total: float) -> float:
    """Return a share, or 0 if there is no gain to share."""
    return part / total if total > 0 else 0.0


def rows(gains: Gains) -> dict[str, Mapping[str, object]]:
    """Return the report of each arm that was scored."""
    return {arm: _row(gains, arm) for arm, runs in gains.arms.items() if runs[0].scores}


def _with_worst(figure: Figure) -> dict[str, object]:
    return {**figure.report(), "worst": round(min(figure.values), 4)}


def _row(gains: Gains, arm: str) -> Mapping[str, object]:
    runs = gains.arms[arm]
    row: dict[str, object] = {"score": gains.score(arm).report()}
    if gains.has(_BASES.get(arm, arms.BASE)):
        row["gain"] = gains.gain(arm).report()
        row["after"] = {str(sessions): round(gain.mean, 4) for sessions, gain in gains.after(arm)}
    if any(run.judged for run in runs):
        row["auroc"] = _with_worst(gains.aurocs(arm))
        row["auroc_paid"] = _with_worst(gains.aurocs(arm, paid=True))
    for name in ("sessions", "edits", "steps"):
        row[name] = [getattr(run, name) for run in runs]
    if arm in arms.PAPERS:
        row["paper"] = arms.PAPERS[arm]
    row["stopped"] = [run.health for run in runs if run.health]
    return row
