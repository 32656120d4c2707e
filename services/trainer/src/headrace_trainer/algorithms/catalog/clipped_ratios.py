"""Algorithms with a clipped importance ratio: `ppo`, `dapo`, `gspo` and `cispo`.

`ppo`: proximal policy optimization with a critic (arXiv:1707.06347), and its advantages (GAE, arXiv:1506.02438).

    d_t = r_t + gamma V_(t+1) - V_t,      A_t = d_t + gamma lam A_(t+1)        over the sampled tokens of a branch
    L   = - 1/N sum_n min(rho A, clip(rho, 1 - 0.2, 1 + 0.2) A),  and where A < 0 no more than 3 |A|
    L_V = 1/N sum_n (V_t - (A_t + V_t before the step))^2 / 2

r_t is the run's reward at the last sampled token, and 0 before it. Needs a critic and logprobs; single runs are enough.
V is a linear map of the policy's last hidden states, with an optimizer of its own; no gradient of it reaches the
policy. `[trainer.critic]` has gamma, lam and its learning rate.

Advantages are not whitened over the batch as in Trinity-RFT: that would confuse the difficulty of tasks with quality,
and turn the rounding errors of a good critic into full advantages. The reward enters A_t as (gamma lam)^(T - t) r, so a
revision is trained with that times the missing reward, exactly, whatever V was. For a withdrawal the learner reports
the critic's expectation of each row: it is reversed in the sum over the row's tokens, and evenly among them. The critic
keeps its own training.

`dapo`: decoupled clip and dynamic sampling (arXiv:2503.14476), on the groups of `grpo`.

    A = (r - mean of the group) / (standard deviation of the group + 1e-6)
    L = - 1/N sum_n min(rho A, clip(rho, 1 - 0.2, 1 + 0.28) A)       over the N tokens of the batch

Needs groups. A group whose runs all have the same reward is dropped with `equal_rewards`, and other groups fill the
batch. There is no divergence from the base. The paper's penalty for length belongs into the reward. A revision is
trained with the missing advantage.

`gspo`: group sequence policy optimization (arXiv:2507.18071): one ratio for a whole sequence.

    s = exp(1/T sum_t (log pi - log mu))        mu: the engine that sampled it
    L = - mean over sequences of min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

A as in `grpo`. Needs groups and logprobs. Each token's share is s with the token's own gradient, and each sequence
counts by the mean of its tokens (`seq-mean-token-mean`). A revision is trained with the missing advantage.

`cispo`: clipped importance sampling (arXiv:2506.13585): the weight is clipped, and every token keeps its gradient.

    L = - 1/N sum_n sg(clip(pi/mu, 1 - clip_low, 1 + clip_high)) A log pi        sg: no gradient flows through it

A as in `grpo`; mu is the engine that sampled the token. Needs groups and logprobs. A revision is trained with the
missing advantage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field

from headrace_runtime.settings.sections import Section
from headrace_trainer.algorithms.estimators import estimator, reward_as_advantage
from headrace_trainer.algorithms.losses import Compute, Loss, LossInputs
from headrace_trainer.algorithms.presets import Algorithm, Needs

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import LossSettings


rewards = estimator(Needs(critic=True))(reward_as_advantage)
"""The reward itself, from which the learner computes the advantage of each token."""
PPO = Algorithm("ppo", "clipped", {"loss.clip_low": 0.2, "loss.clip_high": 0.2, "loss.clip_dual": 3.0})


DAPO = Algorithm(
    "grpo",
    "clipped",
    {
        "advantage.equal_groups": "drop",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "loss.agg_mode": "token-mean",
        "loss.kl": 0.0,
    },
)


class GspoSettings(Section):
    """Constants of the loss of GSPO (group sequence policy optimization), from the paper."""

    PARAMETERS: ClassVar = ("clip_high", "clip_low")

    clip_low: Annotated[float, Field(gt=0, lt=1)] = 3e-4
    """A sequence's ratio is clipped below at `1 - clip_low`."""
    clip_high: Annotated[float, Field(gt=0)] = 4e-4
    """A sequence's ratio is clipped above at `1 + clip_high`."""


def _load_gspo() -> Compute:
    from torch import minimum

    from headrace_trainer.algorithms.loss import LOG_RATIO_MAX, row_counts, row_sums, unweighted_loss

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
        return unweighted_loss(-objective_N, sampled, clipped_ratio_N * advantage_N < ratio_N * advantage_N)

    return gspo


GSPO_LOSS = Loss(_load_gspo, Needs(logprobs=True), GspoSettings)
GSPO = Algorithm("grpo", "gspo", {"loss.agg_mode": "seq-mean-token-mean"})


class CispoSettings(Section):
    """Constants of the loss of CISPO (clipped importance sampling): no lower bound, as in the paper, and the upper one
    of `loss.clip_high`."""

    PARAMETERS: ClassVar = ("clip_high", "clip_low")

    clip_low: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Weights are clipped below at `1 - clip_low`; 1 sets no bound."""
    clip_high: Annotated[float, Field(ge=0)] = 0.28
    """Weights are clipped above at `1 + clip_high`."""


def _load_cispo() -> Compute:
    from headrace_trainer.algorithms.loss import LOG_RATIO_MAX, unweighted_loss

    def cispo(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
        options = settings.of("cispo")
        assert isinstance(options, CispoSettings)
        log_ratio_N = (sampled.current_N.detach() - sampled.behaviour_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
        weight_N = log_ratio_N.exp().clamp(1 - options.clip_low, 1 + options.clip_high)
        return unweighted_loss(-weight_N * sampled.advantage_N * sampled.current_N, sampled)

    return cispo


CISPO_LOSS = Loss(_load_cispo, Needs(logprobs=True), CispoSettings, by_token=True)
CISPO = Algorithm("grpo", "cispo")
