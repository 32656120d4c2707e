"""Estimates how much more or less users would like the candidate than the champion, from answers that no user has seen.

For prompt i: c and d are the judges' scores of the candidate's and of the champion's new answer. For the user's own
session, which the champion served: l is the judges' score, y the user's feedback, and w the weight of its answer
(`overlap`). Users give feedback in a share p of the sessions. f predicts y from a judgement. The
estimate is doubly robust (Robins, Rotnitzky & Zhao, JASA 1994; for logged decisions Dudík, Langford & Li, "Doubly
robust policy evaluation and learning", ICML 2011):

    Δ = mean(f(c) - f(d)) + T1 - T0,   r = y - f(l) where the user gave feedback,   T0 = mean(r),   T1 = Σ w r / Σ
        w.

The first part is the judges' difference in users' terms. T0 is how far f misses the champion's users, T1 how far it
would miss the candidate's: E[w r] over the champion's answers is E[r] over the candidate's. So a bias of the judges
towards one style cancels where the weights overlap. Where they do not, there is no T1 and no estimate, and the reason
is reported. Self-normalised weights trade a bias of order 1/n for less variance (Owen, section 9.2).

The variance is that of the influence function, one value for each prompt,

    φ = f(c) - f(d) + (feedback/p) ((w / mean(w)) (r - T1) - (r - T0)),

and the interval is Student's, with the effective number of answers minus one as degrees of freedom.

Assumptions: prompts are a sample of the traffic, and whether a user gives feedback depends on the answer's quality only
through the judges' score. Users who give feedback only when they are angry violate the second, for both versions alike.

The line f is fitted by least squares and clipped to [0, 1]. Only users' own sessions have both a judgement and
feedback. A session takes no part in the fit of the line that predicts it: the sessions are divided into folds, and each
fold has the line of the others (cross-fitting: Chernozhukov et al., "Double/debiased machine learning", Econometrics
Journal 2018). So the line's own errors do not look like knowledge, and the residuals stay unbiased.

The answer of a logged session has the weight w = Π π_candidate(token) / π_logged(token) over its tokens, both after the
temperature that it was sampled with (importance sampling; for sequences Precup, Sutton & Singh, "Eligibility traces for
off-policy policy evaluation", ICML 2000). Two properties hold when the versions overlap, and both are checked:

- The mean of the weights is 1. Where most of the candidate's answers were never given, it is near 0, and no number of
  sessions repairs that.
- The effective sample size n_eff = (Σw)² / Σw² (Kong, "A note on importance sampling using standardized weights", 1992;
  Owen, "Monte Carlo theory, methods and examples", section 9.3) is the number of answers that the sum rests on.

The second property alone can mislead: weights that are all equally tiny have n_eff = n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from headrace_runtime.settings.sections import Section
from headrace_statistics import intervals

_LOG_MAX = 50.0
MEAN_LOW, MEAN_HIGH = 0.5, 2.0
"""Accepted range of the mean weight. The mean scatters around 1 by about 1/√n_eff, which is less than a fifth if n_eff
suffices."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """Statistics of importance weights, which show how well recorded answers of one version can represent another
    version."""

    answers: int
    effective: float
    """Effective sample size of the answers, n_eff."""
    mean: float
    """Mean of the importance weights."""

    def refusal(self, effective_min: float, share_min: float) -> str | None:
        """Return the reason why the answers cannot represent the version, or None if they can."""
        if self.answers == 0:
            return "no overlap: no answer has a weight"
        if not MEAN_LOW <= self.mean <= MEAN_HIGH:
            return f"no overlap: the weights of {self.answers} answers have the mean {self.mean:.2g} in place of 1"
        if self.effective < max(effective_min, share_min * self.answers):
            return f"no overlap: {self.answers} answers count as {self.effective:.1f}"
        return None


def weight(log_weight: float) -> float:
    """Return the importance weight of one answer.

    Args:
        log_weight: sum over its tokens of the logprob under the candidate minus the logprob under the logged version.
    """
    return math.exp(min(log_weight, _LOG_MAX))


def overlap(log_weights: Sequence[float]) -> Overlap:
    """Compute the importance weight statistics of recorded answers: their number, their effective sample size and the
    mean weight.

    Args:
        log_weights: log importance weight of each answer, candidate against the version that sampled it.
    """
    weights = [weight(log_weight_of_answer) for log_weight_of_answer in log_weights]
    squares = math.fsum(log_weight_of_answer * log_weight_of_answer for log_weight_of_answer in weights)
    total = math.fsum(weights)
    effective = total * total / squares if squares > 0 else 0.0
    return Overlap(len(weights), effective, total / len(weights) if weights else 0.0)


FOLDS = 5


@dataclass(frozen=True, slots=True)
class Line:
    """Regression line that predicts users' feedback from a judge's score: `level + slope * (score - centre)`."""

    level: float
    slope: float
    centre: float

    def predict(self, judged: float) -> float:
        return min(1.0, max(0.0, self.level + self.slope * (judged - self.centre)))


def fit(pairs: Sequence[tuple[float, float]]) -> Line:
    """Fit a line that predicts users' feedback from the judges' score, by least squares.

    Without pairs, the line predicts 1/2. If all scores are equal, it predicts the mean feedback.
    """
    if not pairs:
        return Line(0.5, 0.0, 0.5)
    centre = math.fsum(judged for judged, _ in pairs) / len(pairs)
    level = math.fsum(feedback for _, feedback in pairs) / len(pairs)
    spread = math.fsum((judged - centre) ** 2 for judged, _ in pairs)
    joint = math.fsum((judged - centre) * (feedback - level) for judged, feedback in pairs)
    return Line(level, joint / spread if spread > 1e-12 else 0.0, centre)


def fold(number: int) -> int:
    """Return the index of the cross-fitting fold to which the prompt with this number belongs."""
    return number % FOLDS


def fit_lines(sessions: Sequence[tuple[int, float, float]]) -> tuple[Line, ...]:
    """Return, for each fold, the line that was fitted to the sessions of the other folds.

    Args:
        sessions: number of the prompt, judges' score and feedback of each session.
    """
    return tuple(
        fit([(judged, feedback) for number, judged, feedback in sessions if fold(number) != held_out])
        for held_out in range(FOLDS)
    )


class EstimateRequirements(Section):
    """Minimum numbers for an estimate. Below them there is none, and the reason is reported."""

    pairs_min: Annotated[int, Field(ge=10)] = 40
    """Prompts with two judged answers."""
    spoke_min: Annotated[int, Field(ge=10)] = 30
    """Sessions with feedback of the user on an answer whose weight is known."""
    effective_min: Annotated[float, Field(ge=10)] = 25.0
    """Effective number of the champion's answers when they are weighted for the candidate."""
    effective_share_min: Annotated[float, Field(gt=0, le=1)] = 0.2
    """The same, as a share of their number."""


_LEVEL = 0.975


@dataclass(frozen=True, slots=True)
class ShadowPair:
    """Judges' scores of both new answers to one prompt, and score and feedback of the user's own session. All are from
    0 to 1."""

    number: int
    candidate: float
    """Judges' score of the candidate's answer (c)."""
    champion: float
    """Judges' score of the champion's answer (d)."""
    judged: float | None = None
    """Judges' score of the user's session (l), or None if it was not judged or continued after its first answer."""
    user_value: float | None = None
    """Feedback of the user (y), or None."""
    log_weight: float | None = None
    """Logarithm of the importance weight (w), or None if it is not known, for example if the answer was sampled
    greedily."""

    @property
    def spoke(self) -> bool:
        return self.judged is not None and self.user_value is not None and self.log_weight is not None


@dataclass(frozen=True, slots=True)
class ShadowEstimate:
    """Estimated difference of users' feedback, candidate minus champion, with its 95 % interval, or the reason why
    there is no estimate."""

    pairs: int
    spoke: int
    overlap: Overlap
    judged: float | None = None
    """Mean of c - d: the difference of the judges' scores without the correction."""
    difference: float | None = None
    lower: float | None = None
    upper: float | None = None
    refused: str | None = None


def estimate(pairs: Sequence[ShadowPair], requirements: EstimateRequirements) -> ShadowEstimate:
    """Compute the doubly robust estimate. If the data do not fulfil `requirements`, the result contains the reason
    instead."""
    observed = [pair for pair in pairs if pair.spoke]
    weights_overlap = overlap([pair.log_weight for pair in observed if pair.log_weight is not None])
    judged = math.fsum(pair.candidate - pair.champion for pair in pairs) / len(pairs) if pairs else None
    refused = _refusal(len(pairs), len(observed), weights_overlap, requirements)
    if refused is not None:
        return ShadowEstimate(len(pairs), len(observed), weights_overlap, judged, refused=refused)
    difference, error = _doubly_robust(pairs, observed, weights_overlap.mean)
    freedom = max(1.0, weights_overlap.effective - 1.0)
    half_width = intervals.quantile(_LEVEL, freedom) * error
    return ShadowEstimate(
        len(pairs),
        len(observed),
        weights_overlap,
        judged,
        difference,
        max(-1.0, difference - half_width),
        min(1.0, difference + half_width),
    )


def _refusal(pairs: int, spoke: int, weights_overlap: Overlap, requirements: EstimateRequirements) -> str | None:
    if pairs < requirements.pairs_min:
        return f"too few prompts: {pairs} of {requirements.pairs_min} have two answers with a judgement"
    if spoke < requirements.spoke_min:
        return f"too few users: {spoke} of {requirements.spoke_min} gave feedback on an answer whose weight is known"
    return weights_overlap.refusal(requirements.effective_min, requirements.effective_share_min)


def _doubly_robust(
    pairs: Sequence[ShadowPair], observed: Sequence[ShadowPair], mean_weight: float
) -> tuple[float, float]:
    """Return the doubly robust estimate of the difference, and its standard error."""
    lines = fit_lines(
        [(observation.number, observation.judged or 0.0, observation.user_value or 0.0) for observation in observed]
    )

    def predicted(pair: ShadowPair, judged: float) -> float:
        return lines[fold(pair.number)].predict(judged)

    residuals = {
        observation.number: (observation.user_value or 0.0) - predicted(observation, observation.judged or 0.0)
        for observation in observed
    }
    weights = {observation.number: weight(observation.log_weight or 0.0) / mean_weight for observation in observed}
    champion_residual = math.fsum(residuals.values()) / len(observed)
    candidate_residual = math.fsum(weights[number] * observation for number, observation in residuals.items()) / len(
        observed
    )
    direct = [
        predicted(observation, observation.candidate) - predicted(observation, observation.champion)
        for observation in pairs
    ]
    mean = math.fsum(direct) / len(direct)
    share = len(observed) / len(pairs)
    influence = []
    for pair, value in zip(pairs, direct, strict=True):
        phi = value - mean
        if pair.number in residuals:
            observation = residuals[pair.number]
            phi += (
                weights[pair.number] * (observation - candidate_residual) - (observation - champion_residual)
            ) / share
        influence.append(phi)
    squares = math.fsum(phi * phi for phi in influence)
    return mean + candidate_residual - champion_residual, math.sqrt(squares / (len(pairs) - 1) / len(pairs))
