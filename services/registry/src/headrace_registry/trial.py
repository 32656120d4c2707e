"""May the candidate serve? A sequential paired test against champion and anchor, as a pure function of the scores.

Against each opponent two gamblers (`betting`) look at the differences of scores on the same task and seed:

- one bets that the candidate is less than `margin` worse. Its success is needed, against every opponent, to be
  promoted: an intersection-union test (Berger 1982), so a version that is `margin` worse than any one is promoted
  with the error of one;
- one bets that the candidate is worse at all. Its success against any one opponent is a refusal.

A true difference between -margin and 0 is the indifference zone of Wald (1945): either may be the outcome. Whoever
has convinced nobody after `tasks_max` tasks is refused as undecided, which costs nothing of the error of promoting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from headrace_registry import spending
from headrace_registry.betting import Bets
from headrace_registry.records import ALONE, Standing, Verdict
from headrace_registry.settings import GateSettings

State = Literal["open", "passed", "failed", "undecided"]


class Contest:
    """The candidate against one opponent: a version, or a score that has to be reached."""

    def __init__(self, opponent: str | float, margin: float, alpha: float, beta: float) -> None:
        self.opponent = opponent
        self.margin = margin
        self._alpha = alpha
        self._beta = beta
        self.not_worse = Bets(null=-margin, gap=margin)
        self._worse = Bets(null=0.0, gap=margin)
        self.state: State = "open"

    def take(self, scores: Mapping[str, float], candidate: str) -> None:
        """One task. What is decided stays decided."""
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
    """Is `of` better than the anchor? Followed over as many trials as it takes, from its own trial on."""

    of: str
    anchor: str
    error: float
    bets: Bets

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
        return cls(**{**found, "bets": Bets(**found["bets"])})


class Trial:
    """One candidate's turn. `take` the scores of each task in the order in which tasks were drawn, until `state` is
    not open.

    The order in which answers come must not matter: quick tasks are other tasks than slow ones.
    """

    def __init__(
        self, rule: GateSettings, number: int, candidate: str, champion: str | None, standing: Standing = ALONE
    ) -> None:
        """The `number`-th of its family. `standing` is the champion's: who the anchor is, and its lead over it."""
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
        self.contests = [Contest(opponent, margin, self.alpha, beta) for opponent, margin in opponents]
        self.tasks = 0
        self.plays = 0
        self._lead = self._new_lead()
        self._champions_lead = Lead.from_json(standing.lead) if standing.lead and self.anchor else None

    @property
    def players(self) -> tuple[str, ...]:
        """Who still has to play: an opponent that is decided about need not."""
        open_ones = [one.opponent for one in self.contests if one.state == "open" and isinstance(one.opponent, str)]
        return (self.candidate, *open_ones)

    @property
    def state(self) -> State:
        states = {one.state for one in self.contests}
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
        for contest in self.contests:
            contest.take(scores, self.candidate)
        for lead in (self._lead, self._champions_lead):
            if lead:
                lead.take(scores)

    def verdict(self, stopped_by: str = "gate.tasks_max") -> Verdict:
        """The outcome with its numbers; `stopped_by` names the setting that ended a trial that is still open."""
        state = "undecided" if self.state == "open" else self.state
        return Verdict(
            champion=self.champion,
            anchor=self.anchor,
            passed=state == "passed",
            reason=self._reason(state, stopped_by),
            statistics=self._statistics(),
            standing=self._standing(state == "passed"),
        )

    def _reason(self, state: State, stopped_by: str) -> str:
        named = {state: [self._named(one) for one in self.contests if one.state == state] for state in _STATES}
        if state == "passed":
            return f"not inferior to {' and '.join(named['passed'])}"
        if state == "failed":
            return f"inferior to {' and '.join(named['failed'])}"
        still = " and ".join(f"{self._named(one)} - {one.margin:g}" for one in self.contests if one.state == "open")
        return f"undecided after {self.tasks} tasks ({stopped_by}): not shown to be better than {still}"

    def _named(self, contest: Contest) -> str:
        if not isinstance(contest.opponent, str):
            return f"gate.minimum_score = {contest.opponent:g}"
        return contest.opponent if contest.opponent == self.champion else f"the anchor {contest.opponent}"

    def _statistics(self) -> dict[str, float]:
        numbers = {
            "tasks": float(self.tasks),
            "plays": float(self.plays),
            "trial": float(self.number),
            "alpha": self.alpha,
            "beta": self.rule.beta,
        }
        for contest in self.contests:
            if not isinstance(contest.opponent, str):
                numbers["minimum_score"] = contest.opponent
                continue
            which = "" if contest.opponent == self.champion else "anchor_"
            numbers[f"{which}difference"] = contest.not_worse.mean
            numbers[f"{which}margin"] = contest.margin
            if contest.not_worse.standard_error is not None:
                numbers[f"{which}standard_error"] = contest.not_worse.standard_error
        return numbers

    def _new_lead(self) -> Lead | None:
        """The candidate's own: over the anchor, which is the champion unless another is known to be the best."""
        anchor = self.anchor or self.champion
        if anchor is None or anchor == self.candidate:
            return None
        error = spending.succession(self.rule.alpha, self.number)
        return Lead(self.candidate, anchor, error, Bets(null=0.0, gap=self.rule.anchor_margin))

    def _standing(self, promoted: bool) -> Standing:
        """Who the anchor is from now on. Whoever is better than the anchor becomes the anchor, and a new family
        begins.
        """
        succeeded = self._champions_lead is not None and self._champions_lead.won
        if promoted:
            if self._lead is None or self._lead.won:
                return Standing(trials=self.number) if self.anchor == self.candidate else ALONE
            if not succeeded:
                return Standing(self._lead.anchor, self.number, self._lead.to_json())
            assert self.champion
            error = spending.succession(self.rule.alpha, 1)
            bets = Bets(null=0.0, gap=self.rule.anchor_margin)
            return Standing(self.champion, 1, Lead(self.candidate, self.champion, error, bets).to_json())
        if succeeded:
            return ALONE
        lead = self._champions_lead.to_json() if self._champions_lead else None
        return Standing(self.anchor, self.number, lead)


_STATES: tuple[State, ...] = ("open", "passed", "failed", "undecided")
