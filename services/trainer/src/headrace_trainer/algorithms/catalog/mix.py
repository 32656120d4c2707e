"""`mix`: reinforcement and demonstrations in one loss (Trinity-RFT's `mix`; CHORD, arXiv:2508.11408, with a fixed mu).

    L = (1 - mu) 1/N sum over sampled tokens of the clipped loss  +  mu 1/M sum over written tokens of - log pi

N sampled and M written tokens of the batch (`token-mean-by-origin`). The advantage of sampled runs is `reinforce++`, or
any other kind that `advantage.kind` names; that of demonstrations is 1. Needs demonstrations, and logprobs of sampled
tokens. Both parts are linear in the advantage, and revisions are trained as in `reinforce++` and `sft`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.losses import CLIPPED, Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import Algorithm, Needs

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import LossSettings


class MixSettings(Section):
    """`[trainer.loss.mix]`."""

    mu: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Weight of demonstrations; the policy gradient has the rest."""


def _load() -> Compute:
    from torch import where

    clipped = CLIPPED.load()

    def mix(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
        options = settings.of("mix")
        assert isinstance(options, MixSettings)
        policy_loss = clipped(sampled, settings)
        if sampled.written_N is None:
            return replace(policy_loss, loss_N=(1 - options.mu) * policy_loss.loss_N)
        written_N = sampled.written_N
        likelihood_N = -sampled.advantage_N * sampled.current_N
        return replace(
            policy_loss,
            loss_N=where(written_N, options.mu * likelihood_N, (1 - options.mu) * policy_loss.loss_N),
            masked_N=policy_loss.masked_N & ~written_N,
            clipped_N=policy_loss.clipped_N & ~written_N,
        )

    return mix


LOSS = Loss(_load, Needs(logprobs=True, demonstrations=True), MixSettings, by_token=True, origins=True)
MIX = Algorithm("reinforce++", "mix", {"advantage.demonstrations": True, "loss.agg_mode": "token-mean-by-origin"})
