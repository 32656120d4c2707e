"""A logistic model and the reliability of the people who taught it, learned together from few and noisy thumbs.

V. C. Raykar et al., Learning From Crowds, JMLR 11 (2010) 1297, with one coin for each rater, as A. P. Dawid and A. M.
Skene, Applied Statistics 28 (1979) 20, without features. What a run is worth is hidden; a rater says it rightly with a
probability of his own. That is learned from how he agrees with other raters of the run and with what its features say.

How far one rater reaches is bounded three times. His reliability has a prior, the crowd's; it never counts below 1/2,
so who is always wrong is not heard, instead of being believed the other way round; and all his thumbs weigh no more
than a share of all there are. Shapes: `_R` runs, `_D` columns, `_T` thumbs, `_A` raters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace_scorer.learned.models import ThumbedRun

Array = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64]

_ROUNDS_MAX = 60
_NEWTON_STEPS = 3
_SETTLED = 1e-6
_RIGHT = (0.5, 0.95)
"""Between these a rater's reliability counts."""
_CROWD_PRIOR = (40.0, 10.0)
"""Imaginary thumbs of the crowd, right and wrong: without evidence four of five are right."""
_RATER_PRIOR = 4.0
"""Imaginary thumbs of each rater, as reliable as the crowd."""
_INTERCEPT_PRECISION = 0.1
_DOUBT_PRECISION = 3.0
"""A prior that was chosen because it does well is no evidence: intervals are as wide as with a weak one."""
_HEARD_MIN = 5.0


@dataclass(frozen=True, slots=True)
class Thumbs:
    """All thumbs as arrays: of which run, by whom, what, and how much they weigh."""

    run_T: Index
    rater_T: Index
    value_T: Array
    weight_T: Array
    raters: tuple[str, ...]
    """Sorted; an empty name is everybody without one."""


@dataclass(frozen=True, slots=True)
class CrowdFit:
    """`weights_D` with the intercept first, the covariance of these, and how reliable each rater is."""

    weights_D: Array
    covariance_DD: Array
    right_A: Array
    crowd_right: float


def gathered(runs: Sequence[ThumbedRun], share_max: float) -> Thumbs:
    """The thumbs of `runs`. No named rater weighs more than `share_max` of all thumbs, or five."""
    said = [(at, thumb.rater, thumb.value) for at, run in enumerate(runs) for thumb in run.thumbs]
    raters = tuple(sorted({rater for _, rater, _ in said}))
    number = {name: at for at, name in enumerate(raters)}
    rater_T = np.array([number[rater] for _, rater, _ in said], dtype=np.int64)
    counts_A = np.bincount(rater_T, minlength=len(raters)).astype(np.float64)
    heard_A = np.minimum(1.0, max(_HEARD_MIN, share_max * len(said)) / np.maximum(counts_A, 1.0))
    heard_A[[at for at, name in enumerate(raters) if not name]] = 1.0
    return Thumbs(
        run_T=np.array([at for at, _, _ in said], dtype=np.int64),
        rater_T=rater_T,
        value_T=np.array([value for _, _, value in said], dtype=np.float64),
        weight_T=heard_A[rater_T],
        raters=raters,
    )


def fit(table_RD: Array, thumbs: Thumbs, prior_D: Array, precision: float) -> CrowdFit:
    """Expectation maximization. Each weight has a normal prior with the mean `prior_D` and this `precision`; only the
    intercept's is wide. Deterministic."""
    rows_RD = with_intercept(table_RD)
    means_D = np.concatenate([[0.0], prior_D])
    precisions_D = np.full(rows_RD.shape[1], precision)
    precisions_D[0] = _INTERCEPT_PRECISION
    heard_R = np.minimum(1.0, _summed(thumbs.weight_T, thumbs.run_T, len(rows_RD)))
    weights_D = means_D
    crowd = _CROWD_PRIOR[0] / sum(_CROWD_PRIOR)
    right_A = np.full(len(thumbs.raters), crowd)
    for _ in range(_ROUNDS_MAX):
        said_R = _summed(_log_odds(thumbs, right_A), thumbs.run_T, len(rows_RD))
        good_R = sigmoid(rows_RD @ weights_D + said_R)
        crowd, right_A = _reliabilities(thumbs, good_R)
        before = weights_D
        for _ in range(_NEWTON_STEPS):
            weights_D = _newton(rows_RD, good_R, heard_R, weights_D, means_D, precisions_D)
        if float(np.abs(weights_D - before).max()) < _SETTLED:
            break
    information_DD = _information(rows_RD, thumbs, right_A, heard_R, weights_D)
    information_DD += np.diag(np.minimum(precisions_D, _DOUBT_PRECISION))
    covariance_DD: Array = np.linalg.inv(information_DD).astype(np.float64)
    return CrowdFit(weights_D, covariance_DD, right_A, crowd)


def with_intercept(table_RD: Array) -> Array:
    return np.hstack([np.ones((len(table_RD), 1)), table_RD])


def sigmoid(value: Array) -> Array:
    return 1 / (1 + np.exp(-np.clip(value, -35, 35)))


def said_good(good_T: Array, right_T: Array) -> Array:
    """How probable a thumb up is of a run that is good with `good_T`, by a rater who is right with `right_T`."""
    return (1 - right_T) + (2 * right_T - 1) * good_T


def _log_odds(thumbs: Thumbs, right_A: Array) -> Array:
    right_T = right_A[thumbs.rater_T]
    return thumbs.weight_T * (2 * thumbs.value_T - 1) * np.log(right_T / (1 - right_T))


def _reliabilities(thumbs: Thumbs, good_R: Array) -> tuple[float, Array]:
    """Of the crowd, and of each rater; a name that nobody has speaks as the crowd does."""
    good_T = good_R[thumbs.run_T]
    agreed_T = thumbs.weight_T * (good_T * thumbs.value_T + (1 - good_T) * (1 - thumbs.value_T))
    crowd = float((_CROWD_PRIOR[0] + agreed_T.sum()) / (sum(_CROWD_PRIOR) + thumbs.weight_T.sum()))
    agreed_A = _summed(agreed_T, thumbs.rater_T, len(thumbs.raters))
    spoken_A = _summed(thumbs.weight_T, thumbs.rater_T, len(thumbs.raters))
    right_A = (_RATER_PRIOR * crowd + agreed_A) / (_RATER_PRIOR + spoken_A)
    return crowd, np.clip(right_A, *_RIGHT)


def _newton(
    rows_RD: Array, good_R: Array, heard_R: Array, weights_D: Array, means_D: Array, precisions_D: Array
) -> Array:
    now_R = sigmoid(rows_RD @ weights_D)
    slope_D = rows_RD.T @ (heard_R * (good_R - now_R)) - precisions_D * (weights_D - means_D)
    curve_DD = rows_RD.T @ (rows_RD * (heard_R * np.maximum(now_R * (1 - now_R), 1e-6))[:, None])
    return weights_D + np.linalg.solve(curve_DD + np.diag(precisions_D), slope_D)


def _information(rows_RD: Array, thumbs: Thumbs, right_A: Array, heard_R: Array, weights_D: Array) -> Array:
    """Fisher's, of what was said: a thumb that may be wrong tells less than the truth would, and several of one run no
    more than the truth."""
    good_R = sigmoid(rows_RD @ weights_D)
    right_T, good_T = right_A[thumbs.rater_T], good_R[thumbs.run_T]
    up_T = said_good(good_T, right_T)
    told_T = thumbs.weight_T * ((2 * right_T - 1) * good_T * (1 - good_T)) ** 2 / np.maximum(up_T * (1 - up_T), 1e-9)
    told_R = np.minimum(_summed(told_T, thumbs.run_T, len(rows_RD)), heard_R * good_R * (1 - good_R))
    found: Array = rows_RD.T @ (rows_RD * told_R[:, None])
    return found


def _summed(value_T: Array, index_T: Index, size: int) -> Array:
    found: Array = np.bincount(index_T, weights=value_T, minlength=size).astype(np.float64)
    return found
