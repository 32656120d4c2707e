"""How much more, or less, would users like the candidate? From answers that none of them saw.

Of prompt i: c and d, what the judges say of the candidate's and of the champion's new answer; of the user's own
session, which the champion served, l, what the judges say of it, y, what the user said, and the weight w of its answer
(`overlap`). Users speak in a share p of the sessions. f foretells y from a judgement (`calibration`). The estimate is
doubly robust (Robins, Rotnitzky & Zhao, JASA 1994; for logged decisions Dudík, Langford & Li, "Doubly robust policy
evaluation and learning", ICML 2011):

    Δ = mean(f(c) - f(d)) + T1 - T0,   r = y - f(l) where the user spoke,   T0 = mean(r),   T1 = Σ w r / Σ w.

The first part is what the judges make of it, in users' terms. T0 says how far f misses the champion's users, T1 how
far it would miss the candidate's: E[w r] over the champion's answers is E[r] over the candidate's. So judges that like
one style too well cancel, where the weights overlap; where they do not, there is no T1 and no estimate, and the reason
has a name. Self-normalised weights trade a bias of order 1/n for less variance (Owen, section 9.2).

The variance is that of the influence function, one value for each prompt,

    φ = f(c) - f(d) + (spoke/p) ((w / mean(w)) (r - T1) - (r - T0)),

and the interval is Student's, with as many degrees of freedom as answers count, less one.

What it rests on: prompts are a sample of the traffic, and who speaks does not depend on how good the answer was beyond
what the judges see of it. Users who speak only when they are angry break the second, of both versions alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from headrace_registry.shadow import calibration
from headrace_registry.shadow.demands import Demands
from headrace_registry.shadow.overlap import Overlap, overlap, weight
from headrace_statistics import student_t

_LEVEL = 0.975


@dataclass(frozen=True, slots=True)
class ShadowPair:
    """Both new answers to one prompt, and the session that it is from."""

    number: int
    candidate: float
    """c, as all judgements here in 0..1."""
    champion: float
    """d."""
    judged: float | None = None
    """l; None: nobody judged the user's session, or it went on after its first answer."""
    said: float | None = None
    """y."""
    log_weight: float | None = None
    """None: the weight of its answer is not known, as of one that was sampled greedily."""

    @property
    def spoke(self) -> bool:
        return self.judged is not None and self.said is not None and self.log_weight is not None


@dataclass(frozen=True, slots=True)
class ShadowEstimate:
    """The difference in what users say, candidate less champion, with the ends of its 95 % interval; or why there is
    none."""

    pairs: int
    spoke: int
    overlap: Overlap
    judged: float | None = None
    """The mean of c - d: what the judges alone make of it, uncorrected."""
    difference: float | None = None
    lower: float | None = None
    upper: float | None = None
    refused: str | None = None


def estimate(pairs: Sequence[ShadowPair], demands: Demands) -> ShadowEstimate:
    known = [pair for pair in pairs if pair.spoke]
    found = overlap([pair.log_weight for pair in known if pair.log_weight is not None])
    judged = math.fsum(pair.candidate - pair.champion for pair in pairs) / len(pairs) if pairs else None
    refused = _refusal(len(pairs), len(known), found, demands)
    if refused is not None:
        return ShadowEstimate(len(pairs), len(known), found, judged, refused=refused)
    difference, error = _doubly_robust(pairs, known, found.mean)
    freedom = max(1.0, found.effective - 1.0)
    half = student_t.quantile(_LEVEL, freedom) * error
    return ShadowEstimate(
        len(pairs), len(known), found, judged, difference, max(-1.0, difference - half), min(1.0, difference + half)
    )


def _refusal(pairs: int, spoke: int, found: Overlap, demands: Demands) -> str | None:
    if pairs < demands.pairs_min:
        return f"too few prompts: {pairs} of {demands.pairs_min} have two answers with a judgement"
    if spoke < demands.spoke_min:
        return f"too few users: {spoke} of {demands.spoke_min} said something of an answer whose weight is known"
    return found.refusal(demands.effective_min, demands.effective_share_min)


def _doubly_robust(pairs: Sequence[ShadowPair], known: Sequence[ShadowPair], mean_weight: float) -> tuple[float, float]:
    """The difference and its standard error."""
    lines = calibration.lines([(one.number, one.judged or 0.0, one.said or 0.0) for one in known])

    def foretold(pair: ShadowPair, judged: float) -> float:
        return lines[calibration.fold(pair.number)].foretell(judged)

    residuals = {one.number: (one.said or 0.0) - foretold(one, one.judged or 0.0) for one in known}
    weights = {one.number: weight(one.log_weight or 0.0) / mean_weight for one in known}
    ours = math.fsum(residuals.values()) / len(known)
    theirs = math.fsum(weights[number] * one for number, one in residuals.items()) / len(known)
    direct = [foretold(one, one.candidate) - foretold(one, one.champion) for one in pairs]
    mean = math.fsum(direct) / len(direct)
    share = len(known) / len(pairs)
    influence = []
    for pair, value in zip(pairs, direct, strict=True):
        phi = value - mean
        if pair.number in residuals:
            one = residuals[pair.number]
            phi += (weights[pair.number] * (one - theirs) - (one - ours)) / share
        influence.append(phi)
    squares = math.fsum(phi * phi for phi in influence)
    return mean + theirs - ours, math.sqrt(squares / (len(pairs) - 1) / len(pairs))
