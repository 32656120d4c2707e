"""A sequential paired test of the candidate against champion and anchor: a pure function of the scores.

For each opponent two e-processes (`e_process`) read the differences of scores on the same task and seed:

- `not_worse` tests the null hypothesis "the candidate is worse by `margin` or more". To be promoted it has to be
  rejected for every opponent. This is an intersection-union test (Berger 1982): a version that is worse than any one
  opponent by `margin` is promoted with at most the error of one test.
- `_worse` tests the null hypothesis "the candidate is not worse". If it is rejected for any opponent, the candidate is
  refused.

A true difference between -margin and 0 lies in the indifference zone of Wald (1945): the candidate may pass or fail. A
candidate that is undecided after `tasks_max` tasks is refused, which cannot promote wrongly.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from headrace_registry import spending
from headrace_registry.e_process import EProcess
from headrace_registry.records import ALONE, Standing, TrialResult
from headrace_registry.settings import GateSettings

State = Literal["open", "passed", "failed", "undecided"]


class Comparison:
    """The candidate against one opponent: a version, or a score that it has to reach."""

    def __init__(self, opponent: str | float, margin: float, alpha: float, beta: float) -> None:
        self.opponent = opponent
        self.margin = margin
        self._alpha = alpha
        self._beta = beta
        self.not_worse = EProcess(null=-margin, gap=margin)
        self._worse = EProcess(null=0.0, gap=margin)
        self.state: State = "open"

    def take(self, scores: Mapping[str, float], candidate: str) -> None:
        """Take the scores of one task. A decision is final."""
        if self.state != "open":
            return
        theirs = scores[self.opponent] if isinstance(self.opponent, str) else self.opponent
        difference = scores[candidate] - theirs
        self.not_worse.see(difference)
        self._worse.see(-difference)
        if self.not_worse.convinced(self._alpha):
            self.state = "passed"
        elif self._worse.convinced(self._beta):
            self.state = "failed"


@dataclass(slots=True)
class Lead:
    """The evidence that version `of` is better than the anchor. It is collected over as many trials as needed."""

    of: str
    anchor: str
    error: float
    bets: EProcess

    @property
    def won(self) -> bool:
        return self.bets.convinced(self.error)

    def take(self, scores: Mapping[str, float]) -> None:
        if self.of in scores and self.anchor in scores and not self.won:
            self.bets.see(scores[self.of] - scores[self.anchor])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Lead:
        found = json.loads(text)
        return cls(**{**found, "bets": EProcess(**found["bets"])})


class Trial:
    """The test of one candidate. `take` the scores of each task in the order of the draws, until `state` is not open.

    The order of the answers must not matter, because quick tasks differ from slow ones.
    """

    def __init__(
        self, rule: GateSettings, number: int, candidate: str, champion: str | None, standing: Standing = ALONE
    ) -> None:
        """The `number`-th trial of its family. `standing` has the anchor, and the champion's lead over it."""
        self.rule = rule
        self.number = number
        self.candidate = candidate
        self.champion = champion
        self.anchor = standing.anchor
        self.alpha = spending.promotion(rule.alpha, number)
        opponents: list[tuple[str | float, float]] = []
        if champion:
            opponents.append((champion, rule.margin))
        if self.anchor and self.anchor != candidate:
            opponents.append((self.anchor, rule.anchor_margin))
        if rule.minimum_score > 0:
            opponents.append((rule.minimum_score, rule.margin))
        beta = spending.refusal(rule.beta, max(1, len(opponents)))
        self.comparisons = [Comparison(opponent, margin, self.alpha, beta) for opponent, margin in opponents]
        self.tasks = 0
        self.plays = 0
        self._lead = self._new_lead()
        self._champions_lead = Lead.from_json(standing.lead) if standing.lead else None

    @property
    def players(self) -> tuple[str, ...]:
        """The versions that still have to play: the candidate, and each opponent without a decision."""
        open_ones = [one.opponent for one in self.comparisons if one.state == "open" and isinstance(one.opponent, str)]
        return (self.candidate, *open_ones)

    @property
    def state(self) -> State:
        states = {one.state for one in self.comparisons}
        if "failed" in states:
            return "failed"
        if states <= {"passed"}:
            return "passed"
        return "undecided" if self.tasks >= self.rule.tasks_max else "open"

    def take(self, scores: Mapping[str, float]) -> None:
        """The scores of one task and seed by version, of all `players` at least. Each is in [0, 1]."""
        assert self.state == "open"
        self.tasks += 1
        self.plays += len(scores)
        for comparison in self.comparisons:
            comparison.take(scores, self.candidate)
        for lead in (self._lead, self._champions_lead):
            if lead:
                lead.take(scores)

    def result(self, stopped_by: str = "gate.tasks_max") -> TrialResult:
        """The outcome with its numbers; `stopped_by` names the setting that ended a trial that is still open."""
        state = "undecided" if self.state == "open" else self.state
        return TrialResult(
            champion=self.champion,
            anchor=self.anchor,
            passed=state == "passed",
            reason=self._reason(state, stopped_by),
            statistics=self._statistics(),
            standing=self._standing(state == "passed"),
        )

    def _reason(self, state: State, stopped_by: str) -> str:
        named = {state: [self._named(one) for one in self.comparisons if one.state == state] for state in _STATES}
        if state == "passed":
            return f"not inferior to {' and '.join(named['passed'])}"
        if state == "failed":
            return f"inferior to {' and '.join(named['failed'])}"
        still = " and ".join(f"{self._named(one)} - {one.margin:g}" for one in self.comparisons if one.state == "open")
        return f"undecided after {self.tasks} tasks ({stopped_by}): not shown to be better than {still}"

    def _named(self, comparison: Comparison) -> str:
        if not isinstance(comparison.opponent, str):
            return f"gate.minimum_score = {comparison.opponent:g}"
        return comparison.opponent if comparison.opponent == self.champion else f"the anchor {comparison.opponent}"

    def _statistics(self) -> dict[str, float]:
        numbers = {
            "tasks": float(self.tasks),
            "plays": float(self.plays),
            "trial": float(self.number),
            "alpha": self.alpha,
            "beta": self.rule.beta,
        }
        for comparison in self.comparisons:
            if not isinstance(comparison.opponent, str):
                numbers["minimum_score"] = comparison.opponent
                continue
            which = "" if comparison.opponent == self.champion else "anchor_"
            numbers[f"{which}difference"] = comparison.not_worse.mean
            numbers[f"{which}margin"] = comparison.margin
            if comparison.not_worse.standard_error is not None:
                numbers[f"{which}standard_error"] = comparison.not_worse.standard_error
        return numbers

    def _new_lead(self) -> Lead | None:
        """The lead of the candidate over the anchor. Without an anchor, the champion is the anchor."""
        anchor = self.anchor or self.champion
        if anchor is None or anchor == self.candidate:
            return None
        error = spending.succession(self.rule.alpha, self.number)
        return Lead(self.candidate, anchor, error, EProcess(null=0.0, gap=self.rule.anchor_margin))

    def _standing(self, promoted: bool) -> Standing:
        """The anchor after this trial. A version that is better becomes the anchor, and a new family
        begins."""
        succeeded = self._champions_lead is not None and self._champions_lead.won
        if promoted:
            if self._lead is None or self._lead.won:
                return Standing(trials=self.number) if self.anchor == self.candidate else ALONE
            if not succeeded:
                return Standing(self._lead.anchor, self.number, self._lead.to_json())
            assert self.champion
            error = spending.succession(self.rule.alpha, 1)
            bets = EProcess(null=0.0, gap=self.rule.anchor_margin)
            return Standing(self.champion, 1, Lead(self.candidate, self.champion, error, bets).to_json())
        if succeeded:
            return ALONE
        lead = self._champions_lead.to_json() if self._champions_lead else None
        return Standing(self.anchor, self.number, lead)


_STATES: tuple[State, ...] = ("open", "passed", "failed", "undecided")
