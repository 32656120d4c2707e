"""Estimates how much more, or less, users would like the candidate, from answers that no user saw.

For prompt i: c and d are the judges' scores of the candidate's and of the champion's new answer. For the user's own
session, which the champion served: l is the judges' score, y the user's feedback, and w the weight of its answer
(`overlap`). Users give feedback in a share p of the sessions. f predicts y from a judgement (`calibration`). The
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
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_registry.shadow import calibration
from headrace_registry.shadow.overlap import Overlap, overlap, weight
from headrace_registry.shadow.requirements import EstimateRequirements
from headrace_statistics import student_t

_LEVEL = 0.975


@dataclass(frozen=True, slots=True)
class ShadowPair:
    """Scores of both new answers to one prompt, and of the user's own session."""

    number: int
    candidate: float
    """c. All scores are in 0..1."""
    champion: float
    """d."""
    judged: float | None = None
    """l, or None if the user's session was not judged or continued after its first answer."""
    user_value: float | None = None
    """y."""
    log_weight: float | None = None
    """Log of w, or None if it is unknown, for example of an answer that was sampled greedily."""

    @property
    def spoke(self) -> bool:
        return self.judged is not None and self.user_value is not None and self.log_weight is not None


@dataclass(frozen=True, slots=True)
class ShadowEstimate:
    """Difference in users' feedback, candidate minus champion, with its 95 % interval, or why there is no estimate."""

    pairs: int
    spoke: int
    overlap: Overlap
    judged: float | None = None
    """Mean of c - d: the judges' difference, uncorrected."""
    difference: float | None = None
    lower: float | None = None
    upper: float | None = None
    refused: str | None = None


def estimate(pairs: Sequence[ShadowPair], requirements: EstimateRequirements) -> ShadowEstimate:
    """Return the doubly robust estimate, or the reason why `requirements` allow none."""
    observed = [pair for pair in pairs if pair.spoke]
    weights_overlap = overlap([pair.log_weight for pair in observed if pair.log_weight is not None])
    judged = math.fsum(pair.candidate - pair.champion for pair in pairs) / len(pairs) if pairs else None
    refused = _refusal(len(pairs), len(observed), weights_overlap, requirements)
    if refused is not None:
        return ShadowEstimate(len(pairs), len(observed), weights_overlap, judged, refused=refused)
    difference, error = _doubly_robust(pairs, observed, weights_overlap.mean)
    freedom = max(1.0, weights_overlap.effective - 1.0)
    half_width = student_t.quantile(_LEVEL, freedom) * error
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
    """Return the difference and its standard error."""
    lines = calibration.lines(
        [(observation.number, observation.judged or 0.0, observation.user_value or 0.0) for observation in observed]
    )

    def predicted(pair: ShadowPair, judged: float) -> float:
        return lines[calibration.fold(pair.number)].predict(judged)

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
