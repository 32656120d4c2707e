"""The reward model `thumbs`: a logistic regression from features of runs to few and noisy thumbs.

A higher reward of another source is expected to be better, so the priors of the weights of such rewards have a positive
mean. All other priors have the mean 0.

The model scores a run only if there is evidence for the score. Cross-validation selects the precision of the prior: the
default, unless held-out thumbs are clearly more probable under another one. If the model does not separate held-out
thumbs up from thumbs down better than chance, it scores no run. It abstains from runs whose interval is too wide.
Scores are moderated by the uncertainty of the weights: D. J. C. MacKay, The Evidence Framework Applied to
Classification Networks, Neural Computation 4 (1992) 720.

An agent whose reward depends on features that it controls learns to look good instead of being good. So these features
are learned together with the others, and replaced by their means in the reward, as the length of answers is in Y.
Dubois et al., Length-Controlled AlpacaEval, arXiv:2404.04475.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from headrace_schemas.values.ids import matches_any
from headrace_scorer.learned.models import (
    Column,
    Features,
    FitRequirements,
    FittedModel,
    QualityEstimate,
    RewardModel,
    ThumbedRun,
)

if TYPE_CHECKING:
    from headrace_scorer.learned.columns import Array
    from headrace_scorer.learned.crowd import Thumbs

_PRECISIONS = (3.0, 10.0, 30.0)
"""Prior precisions: the default, and two that stay closer to the prior. With some eighty thumbs, a fifth of them wrong,
the likelihood of held-out thumbs is very noisy, so another precision has to be better by `_BETTER_BY` in it."""
_BETTER_BY = 2.0
_FOLDS = 5
_PRIOR_REACH = 2.0
"""Prior mean of the increase in log odds when all rewards of a run are one deviation higher."""
_MISFIT = 0.25
"""Assumed standard deviation, in log odds, of the model's own error. More thumbs do not reduce it."""


@dataclass(frozen=True, slots=True)
class FitFacts:
    """Report of a fit: size of the training data, and quality of the model on held-out thumbs, for the REST
    interface.
    """

    thumbs: int
    runs: int
    raters: int
    silent: str | None
    """Reason why the model scores no run; None if it does."""
    auroc: float | None = None
    """Area under the ROC curve on held-out thumbs. Noise in the thumbs lowers it."""
    auroc_low: float | None = None
    crowd_right: float | None = None
    precision: float | None = None
    refused: tuple[str, ...] = ()
    """Features that were left out because they reveal whether a run has a thumb."""
    unheard: tuple[str, ...] = ()
    """Raters who are right no more often than chance, and are ignored."""


@dataclass(frozen=True)
class FittedThumbs(FittedModel):
    """A fitted logistic regression, whose first weight is the intercept. A model that scores no run has no weights."""

    fit_facts: FitFacts
    requirements: FitRequirements
    columns: tuple[Column, ...] = ()
    weights_D: tuple[float, ...] = ()
    covariance_DD: tuple[tuple[float, ...], ...] = ()
    model_id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_id", hashlib.sha256(self.to_json()).hexdigest()[:16])

    def judge(self, features: Features) -> QualityEstimate | None:
        if self.fit_facts.silent is not None:
            return None
        row = [1.0, *(column.of(features) for column in self.columns)]
        value, low, high = self._probability_interval(row)
        if high - low > self.requirements.width_max:
            return None
        rewarded = [0.0 if column.controlled else number for column, number in zip(self.columns, row[1:], strict=True)]
        return QualityEstimate(value, low, high, self._probability_interval([1.0, *rewarded])[0])

    def _probability_interval(self, row: Sequence[float]) -> tuple[float, float, float]:
        """Return the probability that a run is good with its confidence interval, including the uncertainty of the
        weights.

        Args:
            row: the run's row of the feature table. A 0 in a column is the mean of all runs.

        Returns:
            The probability, and the lower and the upper end of the interval.
        """
        middle = math.fsum(weight * value for weight, value in zip(self.weights_D, row, strict=True))
        variance = _MISFIT**2 + math.fsum(
            left * math.fsum(entry * right for entry, right in zip(line, row, strict=True))
            for left, line in zip(row, self.covariance_DD, strict=True)
            if left
        )
        reach = NormalDist().inv_cdf(0.5 + self.requirements.confidence / 2) * math.sqrt(max(0.0, variance))
        low, high = _probability(middle - reach), _probability(middle + reach)
        value = _probability(middle / math.sqrt(1 + math.pi * max(0.0, variance) / 8))
        return min(high, max(low, value)), low, high

    def to_json(self) -> bytes:
        fields = {
            "facts": asdict(self.fit_facts),
            "demands": asdict(self.requirements),
            "columns": [asdict(column) for column in self.columns],
            "weights": self.weights_D,
            "covariance": self.covariance_DD,
        }
        return json.dumps(fields, sort_keys=True).encode()

    def facts(self) -> dict[str, object]:
        named = [f"{column.name}{' known' if column.presence else ''}" for column in self.columns]
        return {**asdict(self.fit_facts), "weights": dict(zip(["", *named], self.weights_D, strict=False))}


def fit(runs: Sequence[ThumbedRun], unrated: Sequence[Features], requirements: FitRequirements) -> FittedThumbs:
    """Fit the reward model (`RewardModel.fit`). The result scores no run if the thumbs do not meet the requirements."""
    from headrace_scorer.learned import columns, crowd

    ordered = sorted(_usable_runs(runs), key=lambda run: run.trajectory_id)
    unrated = sorted(unrated, key=lambda features: sorted(features.items()))
    facts = FitFacts(
        thumbs=sum(len(run.thumbs) for run in ordered),
        runs=len(ordered),
        raters=len({thumb.rater for run in ordered for thumb in run.thumbs}),
        silent=None,
    )
    if facts.thumbs < requirements.thumbs_min:
        reason = f"{facts.thumbs} thumbs; at least {requirements.thumbs_min} are required"
        return _unfitted_model(facts, requirements, reason)
    selected, refused = columns.columns_of([run.features for run in ordered], unrated)
    selected = [replace(column, controlled=matches_any(requirements.controlled, column.name)) for column in selected]
    facts = replace(facts, refused=tuple(refused))
    if not selected:
        return _unfitted_model(facts, requirements, "no feature differs between runs")
    if all(column.controlled for column in selected):
        return _unfitted_model(facts, requirements, "the agent controls all features (scorer.learned.controlled)")
    table_RD = columns.feature_table(selected, [run.features for run in ordered])
    thumbs, prior_D = crowd.thumbs_of(ordered, requirements.rater_share_max), _prior(selected)
    folds = [_fold(run.trajectory_id) for run in ordered]
    precision, held_out_T = _select_precision(table_RD, thumbs, prior_D, folds)
    auroc, low = _auroc(held_out_T, thumbs.value_T, requirements.confidence)
    facts = replace(facts, auroc=auroc, auroc_low=low, precision=precision)
    if low is None or low <= 0.5:
        return _unfitted_model(facts, requirements, "the features predict held-out thumbs no better than chance")
    crowd_fit = crowd.fit(table_RD, thumbs, prior_D, precision)
    reliabilities = zip(thumbs.raters, crowd_fit.right_A.tolist(), strict=True)
    unheard = tuple(name for name, right in reliabilities if name and right <= 0.5)
    return FittedThumbs(
        replace(facts, crowd_right=crowd_fit.crowd_right, unheard=unheard),
        requirements,
        tuple(selected),
        tuple(crowd_fit.weights_D.tolist()),
        tuple(tuple(line) for line in crowd_fit.covariance_DD.tolist()),
    )


def _unfitted_model(facts: FitFacts, requirements: FitRequirements, reason: str) -> FittedThumbs:
    """Return a reward model that abstains for every run, because `reason` prevented the fit."""
    return FittedThumbs(replace(facts, silent=reason), requirements)


def read(payload: bytes) -> FittedThumbs:
    """Deserialize a fitted model (`RewardModel.read`)."""
    fields = json.loads(payload)
    return FittedThumbs(
        FitFacts(**_with_tuples(fields["facts"])),
        FitRequirements(**_with_tuples(fields["demands"])),
        tuple(Column(**column) for column in fields["columns"]),
        tuple(fields["weights"]),
        tuple(tuple(line) for line in fields["covariance"]),
    )


def _with_tuples(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with tuples in place of the lists that JSON has, because frozen values must be hashable."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}


THUMBS = RewardModel(fit, read)


def _usable_runs(runs: Sequence[ThumbedRun]) -> list[ThumbedRun]:
    """Return the runs with those of their thumbs that are between 0 and 1, sorted by rater.

    Runs without such a thumb are left out.
    """
    usable = []
    for run in runs:
        thumbs = sorted((thumb for thumb in run.thumbs if 0 <= thumb.value <= 1), key=lambda thumb: thumb.rater)
        if thumbs:
            usable.append(ThumbedRun(run.trajectory_id, run.features, tuple(thumbs)))
    return usable


def _fold(trajectory_id: str) -> int:
    return int.from_bytes(hashlib.sha256(trajectory_id.encode()).digest()[:4], "big") % _FOLDS


def _prior(columns: Sequence[Column]) -> Array:
    import numpy as np

    rewards_D = np.array([column.is_reward for column in columns], dtype=np.float64)
    means_D: Array = rewards_D * _PRIOR_REACH / max(1.0, float(rewards_D.sum()))
    return means_D


def _select_precision(table_RD: Array, thumbs: Thumbs, prior_D: Array, fold_R: Sequence[int]) -> tuple[float, Array]:
    """Select the precision of the prior by cross-validation.

    Returns:
        The precision, and for each thumb the log odds of its run under the model that was fitted without it. The log
        odds do not contain the intercept, which differs between folds.
    """
    import numpy as np

    from headrace_scorer.learned import crowd

    fold_T = np.array(fold_R)[thumbs.run_T]
    best: tuple[float, float, Array] | None = None
    for precision in _PRECISIONS:
        score_T, up_T = np.zeros(len(fold_T)), np.full(len(fold_T), 0.5)
        for fold in range(_FOLDS):
            held_out = fold_T == fold
            if not held_out.any() or held_out.all():
                continue
            training = crowd.Thumbs(
                thumbs.run_T[~held_out],
                thumbs.rater_T[~held_out],
                thumbs.value_T[~held_out],
                thumbs.weight_T[~held_out],
                thumbs.raters,
            )
            crowd_fit = crowd.fit(table_RD, training, prior_D, precision)
            score_T[held_out] = (table_RD @ crowd_fit.weights_D[1:])[thumbs.run_T[held_out]]
            good_T = crowd.sigmoid(crowd_fit.weights_D[0] + score_T[held_out])
            up_T[held_out] = crowd.thumb_up_probability(good_T, crowd_fit.right_A[thumbs.rater_T[held_out]])
        value_T = thumbs.value_T
        log_likelihood = float((thumbs.weight_T * (value_T * np.log(up_T) + (1 - value_T) * np.log(1 - up_T))).sum())
        if best is None or log_likelihood > best[0] + _BETTER_BY:
            best = log_likelihood, precision, score_T
    assert best is not None
    return best[1:]


def _auroc(score_T: Array, value_T: Array, confidence: float) -> tuple[float | None, float | None]:
    """Return the area under the ROC curve of thumbs up against thumbs down, and its lower confidence bound.

    The standard error is that of J. A. Hanley and B. J. McNeil, Radiology 143 (1982) 29. Both values are None if there
    are no thumbs up or no thumbs down.
    """
    up, down = score_T[value_T > 0.5], score_T[value_T < 0.5]
    if not len(up) or not len(down):
        return None, None
    area = float(((up[:, None] > down).sum() + 0.5 * (up[:, None] == down).sum()) / (len(up) * len(down)))
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (len(up) - 1) * (first - area**2) + (len(down) - 1) * (second - area**2)
    error = math.sqrt(max(0.0, spread) / (len(up) * len(down)))
    return area, area - NormalDist().inv_cdf(confidence) * error


def _probability(log_odds: float) -> float:
    return 1 / (1 + math.exp(-max(-35.0, min(35.0, log_odds))))
