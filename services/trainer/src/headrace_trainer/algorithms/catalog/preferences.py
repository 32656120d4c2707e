"""Algorithms that learn from comparisons and labels of answers: `dpo` and `kto`.

`dpo`: direct preference optimization (arXiv:2305.18290), on compared answers and on edits.

    m = beta ((log pi(y+) - log pi_base(y+)) - (log pi(y-) - log pi_base(y-)))
    L = - mean over pairs of (1 - e) log sigmoid(m) + e log sigmoid(-m)

where log pi(y) is the sum over the answer's tokens, and e is `label_smoothing`.

Needs pairs and a reference. Both answers of a pair are rows of one pass: the chosen one with an advantage of 1, the
rejected one with -1. An edit is a pair of its own: the edited answer over the original one.

The loss is not linear in the advantage. Its gradient is that of the policy gradient with the slope
2 beta ((1 - e) sigmoid(-m) - e sigmoid(m)) in place of 1, the same for all tokens of both rows. That slope is
remembered with the weight of the row's tokens, and a withdrawn preference is trained once more as a policy gradient
with it and the opposite sign; the two sides need not be in one batch for that.

`kto`: Kahneman-Tversky optimization (arXiv:2402.01306), of answers that are labelled good or bad one by one.

    h = log pi(y) - log pi_base(y)                        a sum over the answer's tokens
    L = mean over answers of    l+ (1 - sigmoid(beta (h - z)))    for good ones,
                                l- (1 - sigmoid(beta (z - h)))    for bad ones

Needs a reference, and any of: a reward (a thumb is one), an edit, a side of a preference. The two sides need not be in
one batch. The paper estimates z from answers to other prompts of the batch; here it is a constant, `reference_point`,
so that the effect of one answer does not depend on the others in its batch, and a revision can reverse it. With 0 it
equals TRL's `apo_zero_unpaired`.

Rewards from `good_min` on are good, those up to `bad_max` bad, and rewards in between are not trained (`no_signal`).
Revisions are trained as in `dpo`, by the slope that was remembered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.catalog.imitation import LATE
from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.losses import LIKELIHOOD, Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import Algorithm, Needs, Signals

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings


class DpoSettings(Section):
    """Settings of direct preference optimization, section `[trainer.loss.dpo]`."""

    PARAMETERS: ClassVar = ("label_smoothing",)

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of a nat of difference from the base; the smaller, the further training moves away from it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of preferences that are assumed to be reversed (conservative DPO). 0 as in the paper."""


def _load_dpo() -> Compute:
    from torch.nn.functional import logsigmoid

    from headrace_trainer.algorithms.loss import row_counts, row_sums, unweighted_loss

    def dpo(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
        options = settings.of("dpo")
        assert isinstance(options, DpoSettings)
        assert sampled.reference_N is not None
        assert sampled.pair_R is not None
        rows = len(sampled.pair_R)
        sums_R = row_sums(sampled.current_N - sampled.reference_N, sampled.row_N, rows)
        counts_R = row_counts(sampled.row_N, rows)
        sides_R = row_sums(sampled.advantage_N, sampled.row_N, rows) / counts_R
        margins_R = options.beta * sides_R.sign() * (sums_R - sums_R[sampled.pair_R])
        smoothing = options.label_smoothing
        losses_R = -(1 - smoothing) * logsigmoid(margins_R) - smoothing * logsigmoid(-margins_R)
        return unweighted_loss((losses_R / counts_R)[sampled.row_N], sampled)

    return dpo


preferences = estimator(
    Needs(pairs=True), signals=Signals(rewards=False, edits=True, replaced=True, preferences=True, paired=True)
)(reward_as_advantage)
DPO_LOSS = Loss(_load_dpo, Needs(pairs=True, reference=True), DpoSettings, correction=LIKELIHOOD.load)
DPO = Algorithm("preferences", "dpo", {**LATE, "loss.agg_mode": "seq-mean-token-sum"})


class LabelSettings(Section):
    """Constants for training from good and bad labels: rewards of thumbs are 0 and 1."""

    PARAMETERS: ClassVar = ("bad_max", "good_min")

    good_min: float = 0.5
    """Rewards of at least this are good."""
    bad_max: float = 0.5
    """Rewards of at most this, and below `good_min`, are bad."""


class KtoSettings(Section):
    """Settings of the loss of KTO (Kahneman-Tversky optimization), section `[trainer.loss.kto]`."""

    PARAMETERS: ClassVar = ("bad_weight", "good_weight", "reference_point")

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of a nat of difference from the base."""
    good_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of a good answer. The paper's weights balance the labels of a data set, and a stream has no such
    count."""
    bad_weight: Annotated[float, Field(ge=0)] = 1.0
    """Weight of a bad answer."""
    reference_point: Annotated[float, Field(ge=0)] = 0.0
    """The difference from the base, in nats, that counts as none: 0, because the paper's estimate needs pairs of
    prompts and answers that do not belong together."""


def _worth_kto(reward: float, settings: AdvantageSettings) -> float:
    section = settings.of("labels")
    assert isinstance(section, LabelSettings)
    return 1.0 if reward >= section.good_min else -1.0 if reward <= section.bad_max else 0.0


def _load_kto() -> Compute:
    from torch import where

    from headrace_trainer.algorithms.loss import row_counts, row_sums, unweighted_loss

    def kto(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
        options = settings.of("kto")
        assert isinstance(options, KtoSettings)
        assert sampled.reference_N is not None
        rows = int(sampled.row_N[-1]) + 1
        counts_R = row_counts(sampled.row_N, rows)
        gain_R = row_sums(sampled.current_N - sampled.reference_N, sampled.row_N, rows) - options.reference_point
        label_R = row_sums(sampled.advantage_N, sampled.row_N, rows) / counts_R
        weight_R = where(label_R > 0, options.good_weight, options.bad_weight) * label_R.abs()
        losses_R = weight_R * (1 - (options.beta * label_R.sign() * gain_R).sigmoid())
        return unweighted_loss((losses_R / counts_R)[sampled.row_N], sampled)

    return kto


labels = estimator(
    settings=LabelSettings, signals=Signals(edits=True, replaced=True, preferences=True, written=True), worth=_worth_kto
)(reward_as_advantage)
KTO_LOSS = Loss(_load_kto, Needs(reference=True), KtoSettings, correction=LIKELIHOOD.load)
KTO = Algorithm("labels", "kto", {**LATE, "loss.agg_mode": "seq-mean-token-sum"})
