"""`dpo`: direct preference optimization (arXiv:2305.18290), on compared answers and on edits.

    m = beta ((log pi(y+) - log pi_base(y+)) - (log pi(y-) - log pi_base(y-)))
    L = - mean over pairs of (1 - e) log sigmoid(m) + e log sigmoid(-m)

where log pi(y) is the sum over the answer's tokens, and e is `label_smoothing`.

Needs pairs and a reference. Both answers of a pair are rows of one pass: the chosen one with an advantage of 1, the
rejected one with -1. An edit is a pair of its own: the edited answer over the original one.

The loss is not linear in the advantage. Its gradient is that of the policy gradient with the slope
2 beta ((1 - e) sigmoid(-m) - e sigmoid(m)) in place of 1, the same for all tokens of both rows. That slope is
remembered with the weight of the row's tokens, and a withdrawn preference is trained once more as a policy gradient
with it and the opposite sign; the two sides need not be in one batch for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.catalog.sft import LATE
from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.losses import LIKELIHOOD, Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import Algorithm, Needs, Signals

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import LossSettings


class DpoSettings(Section):
    """`[trainer.loss.dpo]`."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """Weight of a nat of difference from the base; the smaller, the further training moves away from it."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """The share of preferences that are assumed to be reversed (conservative DPO)."""


def _load() -> Compute:
    from torch.nn.functional import logsigmoid

    from headrace_trainer.algorithms.loss import plain, row_counts, row_sums

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
        return plain((losses_R / counts_R)[sampled.row_N], sampled)

    return dpo


preferences = estimator(
    Needs(pairs=True), signals=Signals(rewards=False, edits=True, replaced=True, preferences=True, paired=True)
)(reward_as_advantage)
LOSS = Loss(_load, Needs(pairs=True, reference=True), DpoSettings, correction=LIKELIHOOD.load)
DPO = Algorithm("preferences", "dpo", {**LATE, "loss.agg_mode": "seq-mean-token-sum"})
