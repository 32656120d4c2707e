"""Sequential paired test of a candidate against the champion and the anchor (a pure function of the scores).

For each opponent, two e-processes (`e_process`) test the differences of scores on the same task and seed:

- `not_worse` tests the null hypothesis "the candidate is worse by `margin` or more". A promotion needs its rejection
for every opponent. This is an intersection-union test (Berger 1982): a version that is worse than any one opponent by
`margin` is promoted with at most the error of one test.

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

from headrace_registry.settings import GateSettings
from headrace_registry.storage.records import CHAMPION_IS_ANCHOR, AnchorState, TrialResult
from headrace_statistics import e_process
from headrace_statistics.e_process import EProcess

State = Literal["open", "passed", "failed", "undecided"]
_STAKE_MAX = 0.75
"""Largest fraction of the e-process's wealth that one task may cost a candidate. Versions of one lineage have the same
score on most tasks. With a fraction of 1/2, a version equal to the champion needs up to a third more tasks to pass."""


class Comparison:
    """Tests of the candidate against one opponent, which is a version or a minimum score."""

    def __init__(self, opponent: str | float, margin: float, alpha: float, beta: float) -> None:
        self.opponent = opponent
        self.margin = margin
        self._alpha = alpha
        self._beta = beta
        self.not_worse = EProcess(null=-margin, gap=margin, stake_max=_STAKE_MAX)
        self._worse = EProcess(null=0.0, gap=margin)
        self.state: State = "open"

    def add_scores(self, scores: Mapping[str, float], candidate: str) -> None:
        """Add the scores of one task, by version. A decision that was reached does not change any more."""
        if self.state != "open":
            return
        opponent_score = scores[self.opponent] if isinstance(self.opponent, str) else self.opponent
        difference = scores[candidate] - opponent_score
        self.not_worse.update(difference)
        self._worse.update(-difference)
        if self.not_worse.null_rejected(self._alpha):
            self.state = "passed"
        elif self._worse.null_rejected(self._beta):
            self.state = "failed"


@dataclass(slots=True)
class SuccessionEvidence:
    """Evidence, collected over several trials, that the version `of` is better than the anchor, the earlier version
    that candidates must not fall behind."""

    of: str
    anchor: str
    error: float
    bets: EProcess

    @property
    def is_better(self) -> bool:
        """Whether `of` was shown to be better than the anchor, so that it becomes the new anchor."""
        return self.bets.null_rejected(self.error)

    def add_scores(self, scores: Mapping[str, float]) -> None:
        """Add the scores of one task, by version, if both versions have one."""
        if self.of in scores and self.anchor in scores and not self.is_better:
            self.bets.update(scores[self.of] - scores[self.anchor])

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> SuccessionEvidence:
        values = json.loads(text)
        return cls(**{**values, "bets": EProcess(**values["bets"])})


class Trial:
    """Sequential test of one candidate against its opponents.

    Call `add_scores` for each task in the order in which the tasks were drawn, while `state` is `open`.

    The order in which the plays end must not matter, because quick tasks may differ from slow ones.
    """

    def __init__(
        self,
        rule: GateSettings,
        number: int,
        candidate: str,
        champion: str | None,
        anchor_state: AnchorState = CHAMPION_IS_ANCHOR,
    ) -> None:
        """Create the trial of a candidate.

        Args:
            number: number of versions that were compared with this anchor, including this one.
            anchor_state: the anchor, and the champion's evidence that it is better.
        """
        self.rule = rule
        self.number = number
        self.candidate = candidate
        self.champion = champion
        self.anchor = anchor_state.anchor
        self.alpha = e_process.promotion_error(rule.alpha, number)
        opponents: list[tuple[str | float, float]] = []
        if champion:
            opponents.append((champion, rule.margin))
        if self.anchor and self.anchor != candidate:
            opponents.append((self.anchor, rule.anchor_margin))
        if rule.minimum_score > 0:
            opponents.append((rule.minimum_score, rule.margin))
        beta = e_process.refusal_error(rule.beta, max(1, len(opponents)))
        self.comparisons = [Comparison(opponent, margin, self.alpha, beta) for opponent, margin in opponents]
        self.tasks = 0
        self.plays = 0
        self._candidate_evidence = self._new_evidence()
        self._champion_evidence = SuccessionEvidence.from_json(anchor_state.lead) if anchor_state.lead else None

    @property
    def players(self) -> tuple[str, ...]:
        """Versions that must play the next task: the candidate, and each opponent whose comparison is not decided."""
        open_opponents = [
            comparison.opponent
            for comparison in self.comparisons
            if comparison.state == "open" and isinstance(comparison.opponent, str)
        ]
        return (self.candidate, *open_opponents)

    @property
    def state(self) -> State:
        states = {comparison.state for comparison in self.comparisons}
        if "failed" in states:
            return "failed"
        if states <= {"passed"}:
            return "passed"
        return "undecided" if self.tasks >= self.rule.tasks_max else "open"

    def add_scores(self, scores: Mapping[str, float]) -> None:
        """Add the scores of one task and seed, each from 0 to 1, by version. They must contain all `players`."""
        assert self.state == "open"
        self.tasks += 1
        self.plays += len(scores)
        for comparison in self.comparisons:
            comparison.add_scores(scores, self.candidate)
        for evidence in (self._candidate_evidence, self._champion_evidence):
            if evidence:
                evidence.add_scores(scores)

    def result(self, stopped_by: str = "gate.tasks_max") -> TrialResult:
        """Return the result of the trial with its statistics.

        Args:
            stopped_by: name of the setting that ended a trial without a decision.
        """
        state = "undecided" if self.state == "open" else self.state
        return TrialResult(
            champion=self.champion,
            anchor=self.anchor,
            passed=state == "passed",
            reason=self._reason(state, stopped_by),
            statistics=self._statistics(),
            anchor_state=self._next_anchor_state(state == "passed"),
        )

    def _reason(self, state: State, stopped_by: str) -> str:
        names = {
            state: [self._label(comparison) for comparison in self.comparisons if comparison.state == state]
            for state in _STATES
        }
        if state == "passed":
            return f"not inferior to {' and '.join(names['passed'])}"
        if state == "failed":
            return f"inferior to {' and '.join(names['failed'])}"
        open_comparisons = " and ".join(
            f"{self._label(comparison)} - {comparison.margin:g}"
            for comparison in self.comparisons
            if comparison.state == "open"
        )
        return f"undecided after {self.tasks} tasks ({stopped_by}): not shown to be better than {open_comparisons}"

    def _label(self, comparison: Comparison) -> str:
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
            prefix = "" if comparison.opponent == self.champion else "anchor_"
            if not isinstance(comparison.opponent, str):
                prefix, numbers["minimum_score"] = "minimum_", comparison.opponent
            numbers[f"{prefix}difference"] = comparison.not_worse.mean
            numbers[f"{prefix}margin"] = comparison.margin
            if comparison.not_worse.standard_error is not None:
                numbers[f"{prefix}standard_error"] = comparison.not_worse.standard_error
        return numbers

    def _new_evidence(self) -> SuccessionEvidence | None:
        """Return evidence, still without scores, about whether the candidate is better than the anchor.

        The anchor is the earlier version that candidates must not fall behind, by default the champion. The result is
        None without an anchor, or if the candidate is the anchor itself.
        """
        anchor = self.anchor or self.champion
        if anchor is None or anchor == self.candidate:
            return None
        error = e_process.succession_error(self.rule.alpha, self.number)
        return SuccessionEvidence(self.candidate, anchor, error, EProcess(null=0.0, gap=self.rule.anchor_margin))

    def _next_anchor_state(self, promoted: bool) -> AnchorState:
        """Return the anchor and its evidence for the next trial.

        The anchor is an earlier version that each candidate is compared with in addition to the champion, so that many
        small losses cannot add up. A version that was shown to be better than the anchor becomes the new anchor. The
        number of versions that were compared with the anchor, by which the allowed error shrinks, then begins again.

        Args:
            promoted: whether this trial has promoted its candidate.
        """
        succeeded = self._champion_evidence is not None and self._champion_evidence.is_better
        if promoted:
            if self._candidate_evidence is None or self._candidate_evidence.is_better:
                return AnchorState(trials=self.number) if self.anchor == self.candidate else CHAMPION_IS_ANCHOR
            if not succeeded:
                return AnchorState(self._candidate_evidence.anchor, self.number, self._candidate_evidence.to_json())
            assert self.champion
            error = e_process.succession_error(self.rule.alpha, 1)
            bets = EProcess(null=0.0, gap=self.rule.anchor_margin)
            return AnchorState(
                self.champion, 1, SuccessionEvidence(self.candidate, self.champion, error, bets).to_json()
            )
        if succeeded:
            return CHAMPION_IS_ANCHOR
        evidence = self._champion_evidence.to_json() if self._champion_evidence else None
        return AnchorState(self.anchor, self.number, evidence)


_STATES: tuple[State, ...] = ("open", "passed", "failed", "undecided")
