"""`cispo`: clipped importance sampling (arXiv:2506.13585): the weight is clipped, and every token keeps its gradient.

    L = - 1/N sum_n sg(clip(pi/mu, 1 - clip_low, 1 + clip_high)) A log pi        sg: no gradient flows through it

A as in `grpo`; mu is the engine that sampled the token. Needs groups and logprobs. A revision is trained with the
missing advantage.
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


class CispoSettings(Section):
    """`[trainer.loss.cispo]`."""

    clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weights are clipped below at `1 - clip_low`; 1 sets no bound."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Weights are clipped above at `1 + clip_high`."""


def _load() -> Compute:
    from headrace_trainer.algorithms.loss import LOG_RATIO_MAX, plain

    def cispo(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
        options = settings.of("cispo")
        assert isinstance(options, CispoSettings)
        log_ratio_N = (sampled.current_N.detach() - sampled.behaviour_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        weight_N = log_ratio_N.exp().clamp(1 - options.clip_low, 1 + options.clip_high)
        return plain(-weight_N * sampled.advantage_N * sampled.current_N, sampled)

    return cispo


LOSS = Loss(_load, Needs(logprobs=True), CispoSettings, by_token=True)
CISPO = Algorithm("grpo", "cispo")
