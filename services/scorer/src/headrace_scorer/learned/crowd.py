"""Logistic regression on few and noisy thumbs, fitted together with the reliability of each rater.

The model is that of V. C. Raykar et al., Learning From Crowds, JMLR 11 (2010) 1297, with one reliability for each
rater, as in A. P. Dawid and A. M. Skene, Applied Statistics 28 (1979) 20, which has no features. Whether a run is good
is a latent variable. A rater's thumb is right with the probability of that rater, which is estimated from the agreement
with other raters of the same run and with the features of the run.

The influence of one rater is bounded in three ways. The reliability has a prior, that of the crowd. Values below 1/2
count as 1/2, so thumbs of a rater who is always wrong are ignored and not inverted. All thumbs of a rater have at most
a share of the total weight. Shapes: `_R` runs, `_D` columns, `_T` thumbs, `_A` raters.
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
_CONVERGED = 1e-6
_RELIABILITY_RANGE = (0.5, 0.95)
"""Smallest and largest reliability of a rater that counts."""
_CROWD_PRIOR = (40.0, 10.0)
"""Prior pseudo-counts of the crowd, of right and wrong thumbs: without evidence four of five are right."""
_RATER_PRIOR = 4.0
"""Prior pseudo-count of each rater, with the reliability of the crowd."""
_INTERCEPT_PRECISION = 0.1
_COVARIANCE_PRECISION_MAX = 3.0
"""Largest prior precision in the covariance. A prior that was selected because it fits well is no evidence, so it does
not narrow the intervals."""
_RATER_WEIGHT_MIN = 5.0


@dataclass(frozen=True, slots=True)
class Thumbs:
    """Thumbs (ratings of runs by people) as parallel arrays: index of the run, index of the rater, value and weight."""

    run_T: Index
    rater_T: Index
    value_T: Array
    weight_T: Array
    raters: tuple[str, ...]
    """Names, sorted. The empty name stands for all people without a name."""


@dataclass(frozen=True, slots=True)
class CrowdFit:
    """Fitted regression weights (the intercept first) with their covariance, and the reliability of each rater and of
    the crowd.

    A reliability is the probability that a rater's thumb is right.
    """

    weights_D: Array
    covariance_DD: Array
    right_A: Array
    crowd_right: float


def thumbs_of(runs: Sequence[ThumbedRun], share_max: float) -> Thumbs:
    """Return all thumbs of `runs` with their weights.

    The weights of one named rater add up to at most `share_max` of all thumbs, or to five thumbs where that is more.
    The weights of people without a name are not limited.
    """
    thumbs = [(index, thumb.rater, thumb.value) for index, run in enumerate(runs) for thumb in run.thumbs]
    raters = tuple(sorted({rater for _, rater, _ in thumbs}))
    rater_index = {name: index for index, name in enumerate(raters)}
    rater_T = np.array([rater_index[rater] for _, rater, _ in thumbs], dtype=np.int64)
    counts_A = np.bincount(rater_T, minlength=len(raters)).astype(np.float64)
    weight_A = np.minimum(1.0, max(_RATER_WEIGHT_MIN, share_max * len(thumbs)) / np.maximum(counts_A, 1.0))
    weight_A[[index for index, name in enumerate(raters) if not name]] = 1.0
    return Thumbs(
        run_T=np.array([index for index, _, _ in thumbs], dtype=np.int64),
        rater_T=rater_T,
        value_T=np.array([value for _, _, value in thumbs], dtype=np.float64),
        weight_T=weight_A[rater_T],
        raters=raters,
    )


def fit(table_RD: Array, thumbs: Thumbs, prior_D: Array, precision: float) -> CrowdFit:
    """Fit the regression weights and the reliabilities of raters by expectation maximization.

    The result is deterministic.

    Args:
        table_RD: feature table, without the intercept.
        prior_D: means of the normal priors of the weights.
        precision: precision of these priors, except that of the intercept, which is wide.
    """
    rows_RD = with_intercept(table_RD)
    means_D = np.concatenate([[0.0], prior_D])
    precisions_D = np.full(rows_RD.shape[1], precision)
    precisions_D[0] = _INTERCEPT_PRECISION
    run_weight_R = np.minimum(1.0, _sum_by_index(thumbs.weight_T, thumbs.run_T, len(rows_RD)))
    weights_D = means_D
    crowd = _CROWD_PRIOR[0] / sum(_CROWD_PRIOR)
    right_A = np.full(len(thumbs.raters), crowd)
    for _ in range(_ROUNDS_MAX):
        thumb_log_odds_R = _sum_by_index(_log_odds(thumbs, right_A), thumbs.run_T, len(rows_RD))
        good_R = sigmoid(rows_RD @ weights_D + thumb_log_odds_R)
        crowd, right_A = _reliabilities(thumbs, good_R)
        before = weights_D
        for _ in range(_NEWTON_STEPS):
            weights_D = _newton(rows_RD, good_R, run_weight_R, weights_D, means_D, precisions_D)
        if float(np.abs(weights_D - before).max()) < _CONVERGED:
            break
    information_DD = _information(rows_RD, thumbs, right_A, run_weight_R, weights_D)
    information_DD += np.diag(np.minimum(precisions_D, _COVARIANCE_PRECISION_MAX))
    covariance_DD: Array = np.linalg.inv(information_DD).astype(np.float64)
    return CrowdFit(weights_D, covariance_DD, right_A, crowd)


def with_intercept(table_RD: Array) -> Array:
    """Return the feature table with a column of ones before its first column."""
    return np.hstack([np.ones((len(table_RD), 1)), table_RD])


def sigmoid(value: Array) -> Array:
    """Return the logistic function, which converts log odds to probabilities."""
    return 1 / (1 + np.exp(-np.clip(value, -35, 35)))


def thumb_up_probability(good_T: Array, right_T: Array) -> Array:
    """Return the probability of a thumb up.

    Args:
        good_T: probability that the run is good.
        right_T: probability that the rater is right.
    """
    return (1 - right_T) + (2 * right_T - 1) * good_T


def _log_odds(thumbs: Thumbs, right_A: Array) -> Array:
    """Return for each thumb the weighted log odds that it adds to its run being good."""
    right_T = right_A[thumbs.rater_T]
    return thumbs.weight_T * (2 * thumbs.value_T - 1) * np.log(right_T / (1 - right_T))


def _reliabilities(thumbs: Thumbs, good_R: Array) -> tuple[float, Array]:
    """Estimate the reliability of the crowd and of each rater.

    Args:
        good_R: probability that each run is good.
    """
    good_T = good_R[thumbs.run_T]
    agreed_T = thumbs.weight_T * (good_T * thumbs.value_T + (1 - good_T) * (1 - thumbs.value_T))
    crowd = float((_CROWD_PRIOR[0] + agreed_T.sum()) / (sum(_CROWD_PRIOR) + thumbs.weight_T.sum()))
    agreed_A = _sum_by_index(agreed_T, thumbs.rater_T, len(thumbs.raters))
    weight_A = _sum_by_index(thumbs.weight_T, thumbs.rater_T, len(thumbs.raters))
    right_A = (_RATER_PRIOR * crowd + agreed_A) / (_RATER_PRIOR + weight_A)
    return crowd, np.clip(right_A, *_RELIABILITY_RANGE)


def _newton(
    rows_RD: Array, good_R: Array, run_weight_R: Array, weights_D: Array, means_D: Array, precisions_D: Array
) -> Array:
    """Return the weights of the logistic regression after one Newton step.

    Args:
        rows_RD: features of each run.
        good_R: target: the probability that the run is good.
        run_weight_R: weight of each run.
        weights_D: weights before the step.
        means_D: means of the prior of the weights.
        precisions_D: precisions of the prior of the weights.
    """
    predicted_R = sigmoid(rows_RD @ weights_D)
    slope_D = rows_RD.T @ (run_weight_R * (good_R - predicted_R)) - precisions_D * (weights_D - means_D)
    curve_DD = rows_RD.T @ (rows_RD * (run_weight_R * np.maximum(predicted_R * (1 - predicted_R), 1e-6))[:, None])
    return weights_D + np.linalg.solve(curve_DD + np.diag(precisions_D), slope_D)


def _information(rows_RD: Array, thumbs: Thumbs, right_A: Array, run_weight_R: Array, weights_D: Array) -> Array:
    """Return the Fisher information matrix of the regression weights, given the thumbs of all raters.

    A thumb of an unreliable rater adds less information than knowing whether the run is good would add. All thumbs of
    one run together add at most that much.
    """
    good_R = sigmoid(rows_RD @ weights_D)
    right_T, good_T = right_A[thumbs.rater_T], good_R[thumbs.run_T]
    up_T = thumb_up_probability(good_T, right_T)
    slope_T = (2 * right_T - 1) * good_T * (1 - good_T)
    information_T = thumbs.weight_T * slope_T**2 / np.maximum(up_T * (1 - up_T), 1e-9)
    certain_R = run_weight_R * good_R * (1 - good_R)
    information_R = np.minimum(_sum_by_index(information_T, thumbs.run_T, len(rows_RD)), certain_R)
    information_DD: Array = rows_RD.T @ (rows_RD * information_R[:, None])
    return information_DD


def _sum_by_index(value_T: Array, index_T: Index, size: int) -> Array:
    """Return the sum of the values for each index below `size`."""
    sums: Array = np.bincount(index_T, weights=value_T, minlength=size).astype(np.float64)
    return sums
