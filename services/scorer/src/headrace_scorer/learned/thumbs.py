"""The reward model `thumbs`: few, noisy thumbs over features of runs.

A reward of another source is better when it is higher, so before the first thumb its weight is expected to be positive;
nothing is expected of anything else.

It speaks only where it may be believed. The precision of its prior is another than the usual one where thumbs that it
had not seen are clearly more probable under it. On those, it has to tell good from bad better than chance; else it says
nothing. Of a run whose interval is too wide it says nothing. Values are moderated by what is not known:
D. J. C. MacKay, The Evidence Framework Applied to Classification Networks, Neural Computation 4 (1992) 720.

An agent that is paid for what it controls learns to look good instead of being good. So what it controls is learned
beside the rest and stands at the mean of all runs in what is paid, as the length of answers does in Y. Dubois et al.,
Length-Controlled AlpacaEval, arXiv:2404.04475.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from headrace_schemas.source_patterns import fits_any
from headrace_scorer.learned.column import Column
from headrace_scorer.learned.models import (
    Features,
    FitDemands,
    FittedModel,
    LikelyThumb,
    RewardModel,
    ThumbedRun,
)

if TYPE_CHECKING:
    from headrace_scorer.learned.columns import Array
    from headrace_scorer.learned.crowd import Thumbs

_PRECISIONS = (3.0, 10.0, 30.0)
"""The usual one, and two that keep closer to the prior. With some eighty thumbs, a fifth of them wrong, what unseen
ones say of a precision is mostly luck, so another one has to be better by `_BETTER_BY` in their log-likelihood."""
_BETTER_BY = 2.0
_FOLDS = 5
_PRIOR_REACH = 2.0
"""How much better, in log odds, a run is before anything was learned, when all rewards are one deviation higher."""
_MISFIT = 0.25
"""Deviation, in log odds, between any such model and what is true: no number of thumbs makes an interval narrower."""


@dataclass(frozen=True, slots=True)
class FitFacts:
    """What it was learned from, and how well it does on thumbs that it had not seen."""

    thumbs: int
    runs: int
    raters: int
    silent: str | None
    """Why it says nothing at all; None when it speaks."""
    auroc: float | None = None
    """How often, of two unseen thumbs, one up and one down, it finds the right one. Noise in thumbs lowers it."""
    auroc_low: float | None = None
    crowd_right: float | None = None
    precision: float | None = None
    refused: tuple[str, ...] = ()
    """Features that tell who has a thumb, and were left out."""
    unheard: tuple[str, ...] = ()
    """Raters who are right no more often than chance."""


@dataclass(frozen=True)
class FittedThumbs(FittedModel):
    """`weights_D` with the intercept first; both are empty when it is silent."""

    fit_facts: FitFacts
    demands: FitDemands
    columns: tuple[Column, ...] = ()
    weights_D: tuple[float, ...] = ()
    covariance_DD: tuple[tuple[float, ...], ...] = ()
    model_id: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "model_id", hashlib.sha256(self.to_json()).hexdigest()[:16])

    def judge(self, features: Features) -> LikelyThumb | None:
        if self.fit_facts.silent is not None:
            return None
        row = [1.0, *(column.of(features) for column in self.columns)]
        value, low, high = self._likely(row)
        if high - low > self.demands.width_max:
            return None
        shared = [0.0 if column.controlled else own for column, own in zip(self.columns, row[1:], strict=True)]
        return LikelyThumb(value, low, high, self._likely([1.0, *shared])[0])

    def _likely(self, row: Sequence[float]) -> tuple[float, float, float]:
        """The moderated chance, and its interval. A column at 0 stands at the mean of all runs."""
        middle = math.fsum(weight * value for weight, value in zip(self.weights_D, row, strict=True))
        variance = _MISFIT**2 + math.fsum(
            left * math.fsum(entry * right for entry, right in zip(line, row, strict=True))
            for left, line in zip(row, self.covariance_DD, strict=True)
            if left
        )
        reach = NormalDist().inv_cdf(0.5 + self.demands.confidence / 2) * math.sqrt(max(0.0, variance))
        low, high = _share(middle - reach), _share(middle + reach)
        value = _share(middle / math.sqrt(1 + math.pi * max(0.0, variance) / 8))
        return min(high, max(low, value)), low, high

    def to_json(self) -> bytes:
        made = {
            "facts": asdict(self.fit_facts),
            "demands": asdict(self.demands),
            "columns": [asdict(column) for column in self.columns],
            "weights": self.weights_D,
            "covariance": self.covariance_DD,
        }
        return json.dumps(made, sort_keys=True).encode()

    def facts(self) -> dict[str, object]:
        named = [f"{column.name}{' known' if column.presence else ''}" for column in self.columns]
        return {**asdict(self.fit_facts), "weights": dict(zip(["", *named], self.weights_D, strict=False))}


def fit(runs: Sequence[ThumbedRun], others: Sequence[Features], demands: FitDemands) -> FittedThumbs:
    """`RewardModel.fit`."""
    from headrace_scorer.learned import columns, crowd

    ordered = sorted(_usable(runs), key=lambda run: run.trajectory_id)
    elsewhere = sorted(others, key=lambda one: sorted(one.items()))
    facts = FitFacts(
        thumbs=sum(len(run.thumbs) for run in ordered),
        runs=len(ordered),
        raters=len({thumb.rater for run in ordered for thumb in run.thumbs}),
        silent=None,
    )
    if facts.thumbs < demands.thumbs_min:
        return _silent(facts, demands, f"{facts.thumbs} thumbs, and {demands.thumbs_min} are wanted (thumbs_min)")
    found, refused = columns.columns_of([run.features for run in ordered], elsewhere)
    found = [replace(one, controlled=fits_any(demands.controlled, one.name)) for one in found]
    facts = replace(facts, refused=tuple(refused))
    if not found:
        return _silent(facts, demands, "no feature differs between runs")
    if all(one.controlled for one in found):
        return _silent(facts, demands, "the agent controls all that it sees (controlled)")
    table_RD = columns.table(found, [run.features for run in ordered])
    thumbs, prior_D = crowd.gathered(ordered, demands.rater_share_max), _prior(found)
    precision, unseen_T = _chosen(table_RD, thumbs, prior_D, [_fold(run.trajectory_id) for run in ordered])
    auroc, low = _auroc(unseen_T, thumbs.value_T, demands.confidence)
    facts = replace(facts, auroc=auroc, auroc_low=low, precision=precision)
    if low is None or low <= 0.5:
        return _silent(facts, demands, "unseen thumbs are told apart no better than by chance")
    made = crowd.fit(table_RD, thumbs, prior_D, precision)
    named = zip(thumbs.raters, made.right_A.tolist(), strict=True)
    unheard = tuple(name for name, right in named if name and right <= 0.5)
    return FittedThumbs(
        replace(facts, crowd_right=made.crowd_right, unheard=unheard),
        demands,
        tuple(found),
        tuple(made.weights_D.tolist()),
        tuple(tuple(line) for line in made.covariance_DD.tolist()),
    )


def _silent(facts: FitFacts, demands: FitDemands, why: str) -> FittedThumbs:
    return FittedThumbs(replace(facts, silent=why), demands)


def read(payload: bytes) -> FittedThumbs:
    """`RewardModel.read`."""
    given = json.loads(payload)
    return FittedThumbs(
        FitFacts(**_with_tuples(given["facts"])),
        FitDemands(**_with_tuples(given["demands"])),
        tuple(Column(**one) for one in given["columns"]),
        tuple(given["weights"]),
        tuple(tuple(line) for line in given["covariance"]),
    )


def _with_tuples(given: dict[str, Any]) -> dict[str, Any]:
    """JSON knows lists alone, and what is frozen holds none."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}


THUMBS = RewardModel(fit, read)


def _usable(runs: Sequence[ThumbedRun]) -> list[ThumbedRun]:
    """What is no share says nothing about good or bad."""
    kept = []
    for run in runs:
        said = tuple(thumb for thumb in run.thumbs if 0 <= thumb.value <= 1)
        if said:
            kept.append(ThumbedRun(run.trajectory_id, run.features, tuple(sorted(said, key=lambda one: one.rater))))
    return kept


def _fold(trajectory_id: str) -> int:
    return int.from_bytes(hashlib.sha256(trajectory_id.encode()).digest()[:4], "big") % _FOLDS


def _prior(columns: Sequence[Column]) -> Array:
    import numpy as np

    rewards_D = np.array([column.is_reward for column in columns], dtype=np.float64)
    found: Array = rewards_D * _PRIOR_REACH / max(1.0, float(rewards_D.sum()))
    return found


def _chosen(table_RD: Array, thumbs: Thumbs, prior_D: Array, fold_R: Sequence[int]) -> tuple[float, Array]:
    """The usual precision, or one that unseen thumbs speak for, and the log odds of each of their runs, without the
    intercepts: those differ between folds, and would be compared."""
    import numpy as np

    from headrace_scorer.learned import crowd

    fold_T = np.array(fold_R)[thumbs.run_T]
    best: tuple[float, float, Array] | None = None
    for precision in _PRECISIONS:
        score_T, up_T = np.zeros(len(fold_T)), np.full(len(fold_T), 0.5)
        for fold in range(_FOLDS):
            unseen = fold_T == fold
            if not unseen.any() or unseen.all():
                continue
            known = crowd.Thumbs(
                thumbs.run_T[~unseen],
                thumbs.rater_T[~unseen],
                thumbs.value_T[~unseen],
                thumbs.weight_T[~unseen],
                thumbs.raters,
            )
            made = crowd.fit(table_RD, known, prior_D, precision)
            score_T[unseen] = (table_RD @ made.weights_D[1:])[thumbs.run_T[unseen]]
            good_T = crowd.sigmoid(made.weights_D[0] + score_T[unseen])
            up_T[unseen] = crowd.said_good(good_T, made.right_A[thumbs.rater_T[unseen]])
        value_T = thumbs.value_T
        likely = float((thumbs.weight_T * (value_T * np.log(up_T) + (1 - value_T) * np.log(1 - up_T))).sum())
        if best is None or likely > best[0] + _BETTER_BY:
            best = likely, precision, score_T
    assert best is not None
    return best[1:]


def _auroc(score_T: Array, value_T: Array, confidence: float) -> tuple[float | None, float | None]:
    """The area under the ROC curve for thumbs up against thumbs down, and its lower bound.

    The standard error is that of J. A. Hanley and B. J. McNeil, Radiology 143 (1982) 29. None without both kinds.
    """
    up, down = score_T[value_T > 0.5], score_T[value_T < 0.5]
    if not len(up) or not len(down):
        return None, None
    area = float(((up[:, None] > down).sum() + 0.5 * (up[:, None] == down).sum()) / (len(up) * len(down)))
    first, second = area / (2 - area), 2 * area**2 / (1 + area)
    spread = area * (1 - area) + (len(up) - 1) * (first - area**2) + (len(down) - 1) * (second - area**2)
    error = math.sqrt(max(0.0, spread) / (len(up) * len(down)))
    return area, area - NormalDist().inv_cdf(confidence) * error


def _share(log_odds: float) -> float:
    return 1 / (1 + math.exp(-max(-35.0, min(35.0, log_odds))))
