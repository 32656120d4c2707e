"""`gspo`: group sequence policy optimization (arXiv:2507.18071): one ratio for a whole sequence.

    s = exp(1/T sum_t (log pi - log mu))        mu: the engine that sampled it
    L = - mean over sequences of min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

A as in `grpo`. Needs groups and logprobs. Each token's share is s with the token's own gradient, and each sequence
counts by the mean of its tokens (`seq-mean-token-mean`). A revision is trained with the missing advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.losses import Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import Algorithm, Needs

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import LossSettings


class GspoSettings(Section):
    """`[trainer.loss.gspo]`."""

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """A sequence's ratio is clipped below at `1 - clip_low`."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """A sequence's ratio is clipped above at `1 + clip_high`."""


def _load() -> Compute:
    from torch import minimum

    from headrace_trainer.algorithms.loss import LOG_RATIO_MAX, plain, row_counts, row_sums

    def gspo(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
        options = settings.of("gspo")
        assert isinstance(options, GspoSettings)
        current_N, advantage_N = sampled.current_N, sampled.advantage_N
        rows = int(sampled.row_N[-1]) + 1
        sums_R = row_sums(current_N.detach() - sampled.behaviour_N, sampled.row_N, rows)
        means_R = sums_R / row_counts(sampled.row_N, rows)
        log_ratio_N = means_R[sampled.row_N] + current_N - current_N.detach()
        ratio_N = log_ratio_N.clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
        clipped_ratio_N = ratio_N.clamp(1 - options.clip_low, 1 + options.clip_high)
        objective_N = minimum(ratio_N * advantage_N, clipped_ratio_N * advantage_N)
        return plain(-objective_N, sampled, clipped_ratio_N * advantage_N < ratio_N * advantage_N)

    return gspo


LOSS = Loss(_load, Needs(logprobs=True), GspoSettings)
GSPO = Algorithm("grpo", "gspo", {"loss.agg_mode": "seq-mean-token-mean"})
