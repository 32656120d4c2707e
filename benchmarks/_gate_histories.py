"""What becomes of a model over many versions: the present rule, and the one before it, for many runs at once."""

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
    """The true score of champion and anchor of each run, and what `records.Standing` holds of it."""

    champion: Floats
    anchor: Floats
    trials: Floats
    lead: Floats
    lead_error: Floats

    @classmethod
    def of(cls, true: Floats) -> Models:
        runs = len(true)
        return cls(true.copy(), np.full(runs, np.nan), np.zeros(runs), fresh(runs), np.full(runs, 1e-300))

    def meet(self, draw: np.random.Generator, rule: GateSettings, candidate: Floats) -> tuple[Floats, Floats]:
        """A candidate of that true score has its trial in every run. Returns the tasks and the plays that it took."""
        numbers = self.trials + 1
        found = play(draw, rule, Trials(candidate, self.champion, self.anchor, numbers, self.lead, self.lead_error))
        own = succession(rule, numbers)
        won = found.passed & (found.lead[0] >= -np.log(own))
        followed = ~np.isnan(self.anchor) & (found.champions_lead[0] >= -np.log(self.lead_error))
        new, heir, kept = found.passed & ~won & ~followed, found.passed & ~won & followed, ~found.passed & ~followed
        alone = won | (~found.passed & followed)
        beside = np.where(np.isnan(self.anchor), self.champion, self.anchor)
        self.anchor = np.select([alone, new, heir], [np.nan, beside, self.champion], self.anchor)
        self.trials = np.select([alone, heir], [0.0, 1.0], numbers)
        self.lead = np.select([new, kept], [found.lead, found.champions_lead], 0.0)
        firsts = succession(rule, np.ones_like(own))
        self.lead_error = np.select([new, heir, kept], [own, firsts, self.lead_error], 1e-300)
        self.champion = np.where(found.passed, candidate, self.champion)
        return found.tasks, found.plays


def audited(draw: np.random.Generator, true: Floats, plays: int) -> Floats:
    """The score that is recorded of a version of that true score: audit plays, which chose nothing."""
    total = np.zeros_like(true)
    for _ in range(plays):
        total += scores(draw, thresholds(true), draw.standard_normal(true.shape))
    return total / plays


class OldModels:
    """The rule before: one play of 96 tasks that never change, compared with the champion's score of its own gate."""

    def __init__(self, draw: np.random.Generator, true: Floats) -> None:
        self._draw = draw
        self._hardness = draw.standard_normal((OLD_TASKS, len(true)))
        self.champion = true.copy()
        self.recorded = self._score(true)

    def judge(self, candidate: Floats) -> Flags:
        """What would be decided about it."""
        return self._passes(self._score(candidate))

    def _passes(self, score: Floats) -> Flags:
        passed: Flags = score >= self.recorded - OLD_MARGIN - 1e-12
        return passed

    def meet(self, candidate: Floats) -> Flags:
        score = self._score(candidate)
        passed = self._passes(score)
        self.champion = np.where(passed, candidate, self.champion)
        self.recorded = np.where(passed, score, self.recorded)
        return passed

    def _score(self, true: Floats) -> Floats:
        limits = np.broadcast_to(thresholds(true), self._hardness.shape)
        mean: Floats = scores(self._draw, limits, self._hardness).mean(axis=0)
        return mean
