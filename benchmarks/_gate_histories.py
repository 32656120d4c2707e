"""A model's quality over many versions under the present gate rule and under the old one, for many runs at once."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks._gate_trials import Flags, Trials, fresh, play, succession
from benchmarks._gate_worlds import Floats, scores, thresholds
from headrace_registry.settings import GateSettings

OLD_TASKS = 96
OLD_MARGIN = 0.05


@dataclass
class Models:
    """True scores of champion and anchor of each run, with the state of `records.Standing`."""

    champion: Floats
    anchor: Floats
    trials: Floats
    succession_state: Floats
    lead_error: Floats

    @classmethod
    def of(cls, true: Floats) -> Models:
        runs = len(true)
        return cls(true.copy(), np.full(runs, np.nan), np.zeros(runs), fresh(runs), np.full(runs, 1e-300))

    def meet(self, draw: np.random.Generator, rule: GateSettings, candidate: Floats) -> tuple[Floats, Floats]:
        """Run the trial of a candidate in every run, and return the numbers of tasks and plays."""
        numbers = self.trials + 1
        outcomes = play(
            draw, rule, Trials(candidate, self.champion, self.anchor, numbers, self.succession_state, self.lead_error)
        )
        error = succession(rule, numbers)
        won = outcomes.passed & (outcomes.succession_state[0] >= -np.log(error))
        followed = ~np.isnan(self.anchor) & (outcomes.champions_lead[0] >= -np.log(self.lead_error))
        new = outcomes.passed & ~won & ~followed
        heir = outcomes.passed & ~won & followed
        unchanged = ~outcomes.passed & ~followed
        alone = won | (~outcomes.passed & followed)
        beside = np.where(np.isnan(self.anchor), self.champion, self.anchor)
        self.anchor = np.select([alone, new, heir], [np.nan, beside, self.champion], self.anchor)
        self.trials = np.select([alone, heir], [0.0, 1.0], numbers)
        self.succession_state = np.select([new, unchanged], [outcomes.succession_state, outcomes.champions_lead], 0.0)
        first_error = succession(rule, np.ones_like(error))
        self.lead_error = np.select([new, heir, unchanged], [error, first_error, self.lead_error], 1e-300)
        self.champion = np.where(outcomes.passed, candidate, self.champion)
        return outcomes.tasks, outcomes.plays


def audited(draw: np.random.Generator, true: Floats, plays: int) -> Floats:
    """Return the recorded score of a version with the true score `true`: the mean of audit plays, which are not used
    for decisions."""
    total = np.zeros_like(true)
    for _ in range(plays):
        total += scores(draw, thresholds(true), draw.standard_normal(true.shape))
    return total / plays


class OldModels:
    """The old rule: one play of 96 fixed tasks, compared with the champion's score in its own gate."""

    def __init__(self, draw: np.random.Generator, true: Floats) -> None:
        self._draw = draw
        self._hardness = draw.standard_normal((OLD_TASKS, len(true)))
        self.champion = true.copy()
        self.recorded = self._score(true)

    def judge(self, candidate: Floats) -> Flags:
        """Return whether the candidate would pass."""
        return self._passes(self._score(candidate))

    def _passes(self, score: Floats) -> Flags:
        passed: Flags = score >= self.recorded - OLD_MARGIN - 1e-12
        return passed

    def meet(self, candidate: Floats) -> Flags:
        """Judge a candidate and replace the champion where it passes."""
        score = self._score(candidate)
        passed = self._passes(score)
        self.champion = np.where(passed, candidate, self.champion)
        self.recorded = np.where(passed, score, self.recorded)
        return passed

    def _score(self, true: Floats) -> Floats:
        limits = np.broadcast_to(thresholds(true), self._hardness.shape)
        mean: Floats = scores(self._draw, limits, self._hardness).mean(axis=0)
        return mean
