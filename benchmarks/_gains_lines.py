"""What the runs that train a model have to show, from what came of them. No model in here: it can be tested by hand."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from headrace_statistics import student_t

from benchmarks import _gains_arms as arms
from benchmarks._gains_found import Gain
from benchmarks._learning_lines import Line
from benchmarks._ranks import auroc
from headrace_cli.controls.statistics import Score

POINTS_MIN, EDITS_MAX, SESSIONS_MAX = 0.15, arms.EDITS, 500
FEW_SHARE_MIN, NATURAL_SHARE_MIN, POISON_COST_MAX, GUARD_LOSS_MAX = 0.7, 0.5, 0.05, 0.01
OF_BINARY_MAX, RIGHT_SIGN_MIN, AUROC_MIN = 0.5, 0.9, 0.8
_BASES = dict.fromkeys((arms.DIRECTED_BASE, arms.TYPED, arms.BY_TOKEN, *arms.RIVALS), arms.DIRECTED_BASE)


@dataclass(frozen=True, slots=True)
class Figure:
    """A mean over seeds, and where it may lie: Student's interval, 95 %. Infinite for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def reach(self) -> float:
        return student_t.mean_margin(self.values, 0.975)

    def report(self) -> dict[str, object]:
        low, high = (round(one, 4) for one in (self.mean - self.reach, self.mean + self.reach))
        by_seed = [round(one, 4) for one in self.values]
        return {"mean": round(self.mean, 4), "low": low, "high": high, "by_seed": by_seed}


class Gains:
    """Runs by arm and seed. What is compared has played the same audit tasks with the same seeds."""

    def __init__(self, runs: Iterable[Gain]) -> None:
        self.arms: dict[str, list[Gain]] = {}
        for one in sorted(runs, key=lambda run: run.seed):
            self.arms.setdefault(one.arm, []).append(one)

    def has(self, *names: str) -> bool:
        return all(name in self.arms for name in names)

    def score(self, arm: str) -> Figure:
        return Figure(tuple(_mean(run.scores) for run in self.arms[arm]))

    def gain(self, arm: str, kind: str = "") -> Figure:
        """Over the base; of tasks of one kind alone where `kind` says so."""
        return Figure(tuple(_over(run.scores, base, kind) for run, base in self._with_base(arm)))

    def after(self, arm: str) -> list[tuple[int, Figure]]:
        """Sessions that were learned from, and the gain over the base by then; as far as all seeds came."""
        found = []
        for traced in zip(*([one.trace for one in self.arms[arm]]), strict=False):
            pairs = zip(traced, self._with_base(arm), strict=True)
            found.append((traced[0][0], Figure(tuple(_over(plays, base, "") for (_, plays), (_, base) in pairs))))
        return found

    def sessions_to(self, arm: str, points: float) -> float:
        """After how many sessions the mean gain is so large; infinite where it never is."""
        return next((float(sessions) for sessions, gain in self.after(arm) if gain.mean >= points), math.inf)

    def aurocs(self, arm: str, *, paid: bool = False) -> Figure:
        """Of what the reward model believes of all runs, or of the rewards that it paid for those of which it spoke."""
        runs = [run.judged if paid else run.ordered for run in self.arms[arm]]
        return Figure(
            tuple(auroc(np.array([value for _, value in run]), np.array([good for good, _ in run])) for run in runs)
        )

    def _with_base(self, arm: str) -> list[tuple[Gain, Sequence[Score]]]:
        bases = {one.seed: one.scores for one in self.arms[_BASES.get(arm, arms.BASE)]}
        return [(run, bases[run.seed]) for run in self.arms[arm]]


def _mean(plays: Sequence[Score]) -> float:
    return statistics.fmean(value for _, value in plays)


def _over(plays: Sequence[Score], base: Sequence[Score], kind: str) -> float:
    """The mean difference over the plays that both have: a base may have more."""
    pairs = [(own, other) for own, other in zip(plays, base, strict=False) if own[0].startswith(kind)]
    assert all(own[0] == other[0] for own, other in pairs), "the same tasks in the same order"
    return statistics.fmean(own[1] - other[1] for own, other in pairs)


def lines(found: Gains) -> list[Line]:
    """All that can be said of the arms that were run."""
    return [*_edits(found), *_few(found), *_natural(found), *_typed(found), *_gaps(found)]


def _edits(found: Gains) -> list[Line]:
    made = []
    for arm in (arms.SFT, arms.DPO):
        if found.has(arm, arms.BASE):
            most = max(run.edits for run in found.arms[arm])
            made.append(Line(f"{arm}: gain", found.gain(arm).mean, POINTS_MIN, 1))
            made.append(Line(f"{arm}: edits, of the seed with most", most, 1, EDITS_MAX))
    return made


def _few(found: Gains) -> list[Line]:
    if not found.has(arms.FEW, arms.EXPLICIT, arms.BASE):
        return []
    few, full = found.gain(arms.FEW).mean, found.gain(arms.EXPLICIT).mean
    made = [
        Line("few thumbs: AUROC of the reward model on all runs", found.aurocs(arms.FEW).mean, AUROC_MIN, 1),
        Line("few thumbs: AUROC of the rewards that it paid", found.aurocs(arms.FEW, paid=True).mean, AUROC_MIN, 1),
        Line("few thumbs: share of the gain with full labels", _share(few, full), FEW_SHARE_MIN, math.inf),
    ]
    if found.has(arms.POISONED):
        cost = few - found.gain(arms.POISONED).mean
        made.append(Line("few thumbs: what 2 % poisoners cost", cost, -1, POISON_COST_MAX))
    return made


def _natural(found: Gains) -> list[Line]:
    if not found.has(arms.NATURAL, arms.EXPLICIT, arms.BASE):
        return []
    share = _share(found.gain(arms.NATURAL).mean, found.gain(arms.EXPLICIT).mean)
    return [Line("natural signals: share of the gain of explicit feedback", share, NATURAL_SHARE_MIN, math.inf)]


def _typed(found: Gains) -> list[Line]:
    if not found.has(arms.TYPED, arms.DIRECTED_BASE):
        return []
    sessions = max(run.sessions for run in found.arms[arms.TYPED])
    made = [
        Line("typed corrections: gain", found.gain(arms.TYPED).mean, POINTS_MIN, 1),
        Line("typed corrections: sessions", sessions, 1, SESSIONS_MAX),
        Line("typed corrections: what the guard loses", -found.gain(arms.TYPED, arms.GUARD).mean, -1, GUARD_LOSS_MAX),
    ]
    if found.has(*arms.RIVALS):
        name = "typed corrections: sessions to 15 points, as a share of those with binary rewards"
        typed = found.sessions_to(arms.TYPED, POINTS_MIN)
        binary = min(found.sessions_to(arm, POINTS_MIN) for arm in arms.RIVALS)
        made.append(Line(name, math.inf if math.isinf(typed) else typed / binary, 0, OF_BINARY_MAX))
    return made


def _gaps(found: Gains) -> list[Line]:
    """A setting is right where training began with a gap, and was refused without one."""
    right = [bool(run.steps) for run in found.arms.get(arms.HAS_A_GAP.name, [])]
    right += [not run.steps for arm in arms.HAS_NONE for run in found.arms.get(arm.name, [])]
    if not right:
        return []
    return [
        Line(
            "typed corrections: settings whose gap has the right sign",
            _share(sum(right), len(right)),
            RIGHT_SIGN_MIN,
            1,
        )
    ]


def misled(found: Gains) -> Figure | None:
    """Whether training began where users misled: 1 or 0 for each seed."""
    runs = found.arms.get(arms.MISLED.name, [])
    return Figure(tuple(float(bool(run.steps)) for run in runs)) if runs else None


def _share(part: float, whole: float) -> float:
    """Of a gain that is none, none."""
    return part / whole if whole > 0 else 0.0


def rows(found: Gains) -> dict[str, Mapping[str, object]]:
    """The report of each arm that was scored."""
    return {arm: _row(found, arm) for arm, runs in found.arms.items() if runs[0].scores}


def _with_worst(figure: Figure) -> dict[str, object]:
    return {**figure.report(), "worst": round(min(figure.values), 4)}


def _row(found: Gains, arm: str) -> Mapping[str, object]:
    runs = found.arms[arm]
    row: dict[str, object] = {"score": found.score(arm).report()}
    if found.has(_BASES.get(arm, arms.BASE)):
        row["gain"] = found.gain(arm).report()
        row["after"] = {str(sessions): round(gain.mean, 4) for sessions, gain in found.after(arm)}
    if any(run.judged for run in runs):
        row["auroc"] = _with_worst(found.aurocs(arm))
        row["auroc_paid"] = _with_worst(found.aurocs(arm, paid=True))
    for name in ("sessions", "edits", "steps"):
        row[name] = [getattr(run, name) for run in runs]
    if arm in arms.PAPERS:
        row["paper"] = arms.PAPERS[arm]
    row["stopped"] = [run.health for run in runs if run.health]
    return row
