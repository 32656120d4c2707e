"""Algorithms that imitate: written answers (`sft`, `mix`), the model's own good answers (`rft`), a teacher
(`on_policy_distill`).

`sft`: supervised fine-tuning on written experiences of people or data sets, and on edits.

    L = - 1/N sum_n log pi(n)        over the N tokens of demonstrations

Needs demonstrations: experiences with `origin = "written"`, and edits. The loss is the one of a policy gradient with an
advantage of 1 and without ratios, so it is linear: a withdrawn demonstration is trained once more with an advantage of
-1, and a revised edit with -1 for its old tokens and with 1 for its new ones.

`rft`: reward-filtered fine-tuning, also called rejection sampling or RAFT (arXiv:2304.06767).

    L = - 1/N sum_n 1[r >= reward_min] log pi(n)

Needs rewards. An experience below `reward_min` is not trained (`no_signal`). A revision that crosses the bound trains
the experience with an advantage of 1, or reverses it with -1: the loss is linear in it.

`mix`: reinforcement and demonstrations in one loss (Trinity-RFT's `mix`; CHORD, arXiv:2508.11408, with a fixed mu).

    L = (1 - mu) 1/N sum over sampled tokens of the clipped loss  +  mu 1/M sum over written tokens of - log pi

N sampled and M written tokens of the batch (`token-mean-by-origin`). The advantage of sampled runs is `reinforce++`, or
any other kind that `advantage.kind` names; that of demonstrations is 1. Needs demonstrations, and logprobs of sampled
tokens. Both parts are linear in the advantage, and revisions are trained as in `reinforce++` and `sft`.

`on_policy_distill`: a teacher grades each token that the student sampled (arXiv:2306.13649; Trinity-RFT's algorithm
of this name).

    A_n = coefficient (log pi_teacher(n) - log mu(n)),        mu: the engine that sampled it
    L   = - 1/N sum_n min(rho A, clip(rho) A)

Needs a teacher and logprobs, and no reward: every sampled branch is trained. `[trainer.teacher]` names the teacher: a
model's folder with the same vocabulary, which the learner loads, or an endpoint that returns the logprobs of a prompt.
A revision of the reward changes nothing, because the advantage does not depend on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, JsonValue

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.losses import CLIPPED, Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import Algorithm, Needs, Signals

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import AdvantageSettings, LossSettings


LATE: Mapping[str, JsonValue] = {"max_staleness": 64} | {"health.effective_sample_min": 0.0}
"""Defaults of losses without ratios, which do not depend on the sampling version: late feedback is trained as well."""

demonstrations = estimator(Needs(demonstrations=True), signals=Signals(rewards=False, written=True, edits=True))(
    reward_as_advantage
)
SFT = Algorithm("demonstrations", "likelihood", LATE)


class RftSettings(Section):
    """Settings of rejection sampling fine-tuning, section `[trainer.advantage.rft]`."""

    reward_min: float = 0.5
    """Runs with a lower reward are not trained."""


def _worth_rft(reward: float, settings: AdvantageSettings) -> float:
    section = settings.of("rft")
    assert isinstance(section, RftSettings)
    return float(reward >= section.reward_min)


filtered = estimator(settings=RftSettings, worth=_worth_rft)(reward_as_advantage)
RFT = Algorithm("rft", "likelihood", LATE)


class MixSettings(Section):
    """Settings of the loss that mixes demonstrations with sampled answers, section `[trainer.loss.mix]`."""

    mu: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Weight of demonstrations; the policy gradient has the rest."""


def _load_mix() -> Compute:
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


MIX_LOSS = Loss(_load_mix, Needs(logprobs=True, demonstrations=True), MixSettings, by_token=True, origins=True)
MIX = Algorithm("reinforce++", "mix", {"advantage.demonstrations": True, "loss.agg_mode": "token-mean-by-origin"})


taught = estimator(Needs(teacher=True, logprobs=True), signals=Signals(rewards=False, branches=True))(
    reward_as_advantage
)
ON_POLICY_DISTILL = Algorithm("on_policy_distill")
