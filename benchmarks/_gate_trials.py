"""The gate's trial for thousands of runs at once, in numpy. The module is an independent implementation, so that it and
the service verify each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks._gate_worlds import Floats, scores, thresholds
from headrace_registry.settings import GateSettings

Flags = NDArray[np.bool_]
_COMPACT = 32
"""Number of tasks after which finished runs are removed from the arrays."""
_CHAMPION, _CHAMPION_WORSE, _ANCHOR, _ANCHOR_WORSE, _LEAD, _CHAMPIONS_LEAD = range(6)


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
        stake = np.minimum(edge / (variance + edge * edge), 0.5 / np.maximum(1 + self.null, 1e-12))
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
