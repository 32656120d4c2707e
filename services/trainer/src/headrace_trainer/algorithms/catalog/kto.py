"""`kto`: Kahneman-Tversky optimization (arXiv:2402.01306), of answers that somebody called good or bad, each by itself.

    h = log pi(y) - log pi_base(y)                        a sum over the answer's tokens
    L = mean over answers of    l+ (1 - sigmoid(beta (h - z)))    for good ones,
                                l- (1 - sigmoid(beta (z - h)))    for bad ones

Needs a reference, and any of: a reward (a thumb is one), an edit, a side of a preference. Sides need not meet. The
paper estimates z from answers to other prompts of the batch; here it is a constant, `reference_point`, so that what one
answer does to the weights does not depend on those beside it, and a revision can take it back. With 0 it is what TRL
calls `apo_zero_unpaired`.

Rewards from `good_min` on are good, those up to `bad_max` bad, and what lies between says nothing (`no_signal`).
Revisions are trained as in `dpo`, by the slope that was remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from headrace_runtime.settings import Section
from headrace_trainer.algorithms.catalog.sft import LATE
from headrace_trainer.algorithms.estimators import as_they_are, estimator
from headrace_trainer.algorithms.losses import LIKELIHOOD, Compute, Loss, Sampled
from headrace_trainer.algorithms.needs import Needs
from headrace_trainer.algorithms.presets import Algorithm
from headrace_trainer.algorithms.signals import Signals

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings


class LabelSettings(Section):
    """`[trainer.advantage.labels]`."""

    good_min: float = 0.5
    """Rewards from here on are good."""
    bad_max: float = 0.5
    """Rewards up to here, and below `good_min`, are bad."""


class KtoSettings(Section):
    """`[trainer.loss.kto]`."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How much a nat of difference from the base counts."""
    good_weight: Annotated[float, Field(ge=0)] = 1.0
    """What a good answer counts."""
    bad_weight: Annotated[float, Field(ge=0)] = 1.0
    """What a bad answer counts."""
    reference_point: Annotated[float, Field(ge=0)] = 0.0
    """The difference from the base, in nats, that counts as none."""


def _worth(reward: float, settings: AdvantageSettings) -> float:
    own = settings.of("labels")
    assert isinstance(own, LabelSettings)
    return 1.0 if reward >= own.good_min else -1.0 if reward <= own.bad_max else 0.0


def _load() -> Compute:
    from torch import where

    from headrace_trainer.algorithms.loss import plain, row_counts, row_sums

    def kto(sampled: Sampled, settings: LossSettings) -> TokenLoss:
        own = settings.of("kto")
        assert isinstance(own, KtoSettings)
        assert sampled.reference_N is not None
        rows = int(sampled.row_N[-1]) + 1
        counts_R = row_counts(sampled.row_N, rows)
        gain_R = row_sums(sampled.current_N - sampled.reference_N, sampled.row_N, rows) - own.reference_point
        label_R = row_sums(sampled.advantage_N, sampled.row_N, rows) / counts_R
        weight_R = where(label_R > 0, own.good_weight, own.bad_weight) * label_R.abs()
        losses_R = weight_R * (1 - (own.beta * label_R.sign() * gain_R).sigmoid())
        return plain((losses_R / counts_R)[sampled.row_N], sampled)

    return kto


labels = estimator(
    settings=LabelSettings, signals=Signals(edits=True, replaced=True, preferences=True, written=True), worth=_worth
)(as_they_are)
LOSS = Loss(_load, Needs(reference=True), KtoSettings, correction=LIKELIHOOD.load)
KTO = Algorithm("labels", "kto", {**LATE, "loss.agg_mode": "seq-mean-token-sum"})
