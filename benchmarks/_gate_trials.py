"""The gate's trials for thousands of runs at once, in numpy, with simulated versions of known quality.

The code is independent of the gate's, so that the two verify each other. `Models` applies the present gate rule over
many versions, and `OldRuleModels` the old one.

A task is equally hard for all versions. Success means that a latent normal variable, of which task and seed determine
the share `SHARED`, exceeds the threshold of the version's true score. At a true score of 0.5 and a share of 0.5, the
scores of two versions on the same task have a correlation of (2/π) asin(0.5) = 0.33.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from headrace_registry.settings import GateSettings

Floats = NDArray[np.float64]
SHARED = 0.5


def thresholds(true: Floats) -> Floats:
    """Return the thresholds of versions with these true scores, elementwise."""
    values, indices = np.unique(np.clip(true, 1e-9, 1 - 1e-9), return_inverse=True)
    limits: Floats = np.array([NormalDist().inv_cdf(float(value)) for value in values])[indices].reshape(true.shape)
    return limits


def scores(draw: np.random.Generator, limits: Floats, hardness: Floats) -> Floats:
    """Return 0 or 1 for each of `limits` (players by runs). All players of a run play one task of the given
    hardness."""
    player_noise: Floats = draw.standard_normal(limits.shape)
    won: Floats = (SHARED**0.5 * hardness + (1 - SHARED) ** 0.5 * player_noise < limits).astype(np.float64)
    return won


Flags = NDArray[np.bool_]
_COMPACT = 32
"""Number of tasks after which finished runs are removed from the arrays."""
_CHAMPION, _CHAMPION_WORSE, _ANCHOR, _ANCHOR_WORSE, _LEAD, _CHAMPIONS_LEAD = range(6)
_STAKES_MAX = np.array([0.75, 0.5, 0.75, 0.5, 0.5, 0.5])[:, None]
"""Largest share of the wealth that one value can cost, for each e-process."""


@dataclass
class Bets:
    """Six e-processes (`e_process.EProcess`), as rows, in each of many runs, as columns."""

    null: Floats
    gap: Floats
    log: Floats
    count: Floats
    total: Floats
    squares: Floats

    def see(self, value: Floats, where: Flags) -> None:
        """Update the e-processes in `where` with `value`. The others are unchanged."""
        weight = self.count + 1
        variance = (1 + self.squares) / weight
        expected = (self.total + self.null + self.gap) / weight
        edge = np.maximum(self.gap, expected - self.null - np.sqrt(variance / weight))
        stake = np.minimum(edge / (variance + edge * edge), _STAKES_MAX / np.maximum(1 + self.null, 1e-12))
        self.log += where * np.log1p(stake * (value - self.null))
        before = self.total / np.maximum(self.count, 1)
        self.count += where
        self.total += where * value
        self.squares += where * ((value - before) * (value - self.total / np.maximum(self.count, 1)))

    def of_runs(self, chosen: Flags) -> Bets:
        return Bets(
            self.null, self.gap, *(part[:, chosen] for part in (self.log, self.count, self.total, self.squares))
        )

    def row(self, number: int) -> Floats:
        """Return the state of one e-process of all runs, to be continued in another trial: log wealth, count, total and
        squares."""
        return np.array([part[number] for part in (self.log, self.count, self.total, self.squares)])


@dataclass
class Trials:
    """One trial for each of many runs: the true scores, and the state carried over. An anchor of NaN means no
    anchor."""

    candidate: Floats
    champion: Floats
    anchor: Floats
    numbers: Floats
    """Number of the trial in its family, from 1."""
    champions_lead: Floats
    """`Bets.row` of the champion against the anchor."""
    champions_error: Floats


@dataclass
class Outcomes:
    """Results of trials, elementwise."""

    passed: Flags
    failed: Flags
    tasks: Floats
    plays: Floats
    succession_state: Floats
    champions_lead: Floats

    @classmethod
    def none(cls, runs: int) -> Outcomes:
        """Return the outcomes before the first task."""
        nothing_passed = np.zeros(runs, bool)
        return cls(nothing_passed, nothing_passed.copy(), np.zeros(runs), np.zeros(runs), fresh(runs), fresh(runs))


def fresh(runs: int) -> Floats:
    """Return the initial state of an e-process."""
    return np.zeros((4, runs))


def succession(rule: GateSettings, numbers: Floats) -> Floats:
    """Return the error level of succession tests for trials with these numbers."""
    return 0.2 * rule.alpha / (numbers * (numbers + 1))


Scores = Callable[[Floats, NDArray[np.int64]], Floats]
"""Function that returns scores of one task (players by runs), from the players' thresholds and the indices of the
unfinished runs."""


def play(draw: np.random.Generator, rule: GateSettings, trials: Trials, source: Scores | None = None) -> Outcomes:
    """Run all trials to their ends, with scores from `source` if given."""

    def drawn(limits: Floats, _runs: NDArray[np.int64]) -> Floats:
        return scores(draw, limits, draw.standard_normal((limits.shape[1],)))

    return _Playing(source or drawn, rule, trials).run()


class _Playing:
    def __init__(self, source: Scores, rule: GateSettings, trials: Trials) -> None:
        runs = len(trials.candidate)
        self.source, self.rule = source, rule
        self.apart = ~np.isnan(trials.anchor)
        versions = np.array([trials.candidate, trials.champion, np.where(self.apart, trials.anchor, 0.5)])
        self.limits = thresholds(versions)
        margins = np.array([rule.margin, rule.margin] + [rule.anchor_margin] * 4)[:, None]
        null = margins * np.array([-1, 0, -1, 0, 0, 0])[:, None]
        self.bets = Bets(null, margins, *(np.zeros((6, runs)) for _ in range(4)))
        for part, carried in zip((self.bets.log, self.bets.count, self.bets.total, self.bets.squares),
                                 trials.champions_lead, strict=True):  # fmt: skip
            part[_CHAMPIONS_LEAD] = carried
        alpha = 0.8 * rule.alpha / (trials.numbers * (trials.numbers + 1))
        beta = rule.beta / 2 / np.where(self.apart, 2, 1)
        errors = [alpha, beta, alpha, beta, succession(rule, trials.numbers), trials.champions_error]
        self.needed = -np.log(np.array(errors))
        self.open = np.array([np.ones(runs, bool), self.apart])
        self.at = np.arange(runs)
        self.result = Outcomes.none(runs)

    def run(self) -> Outcomes:
        for task in range(self.rule.tasks_max):
            self._task()
            if task % _COMPACT == _COMPACT - 1:
                self._settle()
                if not self.at.size:
                    break
        self._settle()
        self._store_leads(np.ones(self.at.size, bool))
        return self.result

    def _task(self) -> None:
        candidate, champion, anchor = self.source(self.limits, self.at)
        against_champion, against_anchor, champion_against_anchor = (
            candidate - champion,
            candidate - anchor,
            champion - anchor,
        )
        values = np.array([against_champion, -against_champion, against_anchor, -against_anchor,
                           np.where(self.apart, against_anchor, against_champion),
                           champion_against_anchor])  # fmt: skip
        failed = self.result.failed[self.at]
        champions, anchors = self.open & ~failed
        own_lead = np.where(self.apart, anchors, champions)
        where = np.array([champions, champions, anchors, anchors, own_lead, champions & anchors])
        where[_LEAD:] &= self.bets.log[_LEAD:] < self.needed[_LEAD:]
        self.bets.see(values, where)
        self.result.tasks[self.at] += champions | anchors
        self.result.plays[self.at] += champions * 1.0 + anchors + (champions | anchors)
        won = self.bets.log >= self.needed
        lost = (champions & ~won[_CHAMPION] & won[_CHAMPION_WORSE]) | (anchors & ~won[_ANCHOR] & won[_ANCHOR_WORSE])
        self.result.failed[self.at] |= lost
        self.open &= ~won[[_CHAMPION, _ANCHOR]]

    def _settle(self) -> None:
        """Remove the finished runs from the arrays."""
        failed = self.result.failed[self.at]
        over = failed | ~self.open.any(axis=0)
        self.result.passed[self.at] = over & ~failed
        if over.any():
            self._store_leads(over)
            self.at, self.apart, self.bets = self.at[~over], self.apart[~over], self.bets.of_runs(~over)
            self.limits, self.needed, self.open = (part[:, ~over] for part in (self.limits, self.needed, self.open))

    def _store_leads(self, which: Flags) -> None:
        self.result.succession_state[:, self.at[which]] = self.bets.row(_LEAD)[:, which]
        self.result.champions_lead[:, self.at[which]] = self.bets.row(_CHAMPIONS_LEAD)[:, which]


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
        """Run a trial of a candidate in every run. Return the numbers of tasks and of plays."""
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


class OldRuleModels:
    """Champions of many runs under the old gate rule.

    A candidate plays 96 fixed tasks once. It passes unless its mean score is below the champion's own gate score by
    more than the margin.
    """

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
