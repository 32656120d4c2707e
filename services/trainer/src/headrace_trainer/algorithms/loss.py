"""The loss of each sampled token, and estimates of its divergence from the base. One entry per token of the loss
(`_N`); formulas and sources in docs/algorithms.md.

Three policies take part: the engine that sampled (`behaviour`, its own logprobs), the weights at the start of the step
(`start`), and the present weights (`current`; equal to `start` in the first update of a step). With `proximal="step"`

    loss = - min(start / behaviour, weight_max) * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)
    r = current / start

that is decoupled PPO (Hilton et al. 2021, arXiv:2110.00641) with truncated importance weights for what separates engine
from trainer: numerics (Yao et al. 2025) and staleness (Espeholt et al. 2018, arXiv:1802.01561). With
`proximal="behaviour"` the ratio is taken against the engine itself and there is no second weight: PPO as in Schulman et
al. 2017, arXiv:1707.06347.

`Experience.weight` must not be part of the loss. Every sampled token of a run lies in exactly one branch, so a sum
over tokens counts a run once however it was split; weighting the branches would make a run count less the
more often it was split. The weight is for statistics over runs: baselines, group means, mean rewards.

With d = log pi_base - log pi: k1 is -d, k2 is d^2 / 2, k3 is e^d - 1 - d (Schulman 2020), `low_var_kl` is k3 within
plus and minus 10, `abs` is |d|, and `corrected_k3` is k3 times the ratio of pi to the engine that sampled, at most 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_trainer.algorithms.losses import LossInputs
from headrace_trainer.algorithms.settings import LossSettings

LOG_RATIO_MAX = 20.0
"""Bound on log ratios before `exp`, so that one extreme token cannot make an infinity."""
_LOW_VAR_MAX, _RATIO_MAX = 10.0, 2.0
Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of the logprobs of the present weights, of the base and of the engine."""


@dataclass(frozen=True)
class TokenLoss:
    """Loss of each token (`loss_N` has a gradient), with importance weights and masks of the same tokens."""

    loss_N: Tensor
    weight_N: Tensor
    """Importance weight of `start` over `behaviour`, truncated."""
    truncated_N: Tensor
    masked_N: Tensor
    """Tokens without a gradient, because they have drifted too far from the sampling policy."""
    clipped_N: Tensor
    """Tokens whose loss is decided by the clip and not by the ratio."""


def clipped_loss(sampled: LossInputs, settings: LossSettings) -> TokenLoss:
    """Compute the loss `clipped` of PPO: the importance ratio is clipped, so that a step cannot move far from the
    sampling policy.
    """
    return token_loss(
        sampled.current_N,
        sampled.start_N,
        sampled.behaviour_N,
        sampled.advantage_N,
        settings,
        sampled.left_out_N,
    )


def token_loss(
    current_N: Tensor,
    start_N: Tensor,
    behaviour_N: Tensor,
    advantage_N: Tensor,
    settings: LossSettings,
    left_out_N: Tensor | None = None,
) -> TokenLoss:
    """Compute the clipped, importance-weighted loss. The first three arguments are logprobs; a gradient flows through
    `current_N` alone. `left_out_N` marks tokens of sequences that are left out of the loss."""
    start_N, behaviour_N = start_N.detach(), behaviour_N.detach()
    drift_N = _ratio(start_N, behaviour_N)
    proximal_N = start_N if settings.proximal == "step" else behaviour_N
    importance_N = _ratio(proximal_N, behaviour_N)
    weight_N = importance_N.clamp(max=settings.weight_max)
    masked_N = (drift_N < settings.mask_low) | (drift_N > settings.mask_high)
    if left_out_N is not None:
        masked_N = masked_N | left_out_N
    ratio_N = _ratio(current_N, proximal_N)
    clipped_ratio_N = ratio_N.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    objective_N = torch.minimum(ratio_N * advantage_N, clipped_ratio_N * advantage_N)
    clipped_N = clipped_ratio_N * advantage_N < ratio_N * advantage_N
    if settings.clip_dual is not None:
        floor_N = settings.clip_dual * advantage_N
        bounded_N = (advantage_N < 0) & (objective_N < floor_N)
        objective_N = torch.where(bounded_N, floor_N, objective_N)
        clipped_N = clipped_N | bounded_N
    loss_N = torch.where(masked_N, 0.0, -weight_N * objective_N)
    return TokenLoss(loss_N, weight_N, importance_N > settings.weight_max, masked_N, clipped_N)


def likelihood(sampled: LossInputs, _settings: LossSettings) -> TokenLoss:
    """Compute the loss -A log pi of each token (advantage times negative logprob), without regard to the sampling
    policy.
    """
    return unweighted_loss(-sampled.advantage_N * sampled.current_N, sampled)


def unweighted_loss(loss_N: Tensor, sampled: LossInputs, clipped_N: Tensor | None = None) -> TokenLoss:
    """Return a `TokenLoss` with importance weights of 1. Tokens in `sampled.left_out_N` get a loss of 0.

    Args:
        loss_N: the loss of each token.
        sampled: the tokens of the loss.
        clipped_N: whether the clip decides the loss of each token; None if nothing is clipped.
    """
    none_N = torch.zeros_like(loss_N, dtype=torch.bool)
    masked_N = none_N if sampled.left_out_N is None else sampled.left_out_N
    clipped_N = none_N if clipped_N is None else clipped_N
    ones_N = torch.ones_like(loss_N.detach())
    return TokenLoss(torch.where(masked_N, 0.0, loss_N), ones_N, none_N, masked_N, clipped_N)


def row_sums(values_N: Tensor, row_N: Tensor, rows: int) -> Tensor:
    """Return the sum of `values_N` over the tokens of each row (`_R`), which is differentiable."""
    return torch.zeros(rows, dtype=values_N.dtype, device=values_N.device).index_add(0, row_N, values_N)


def row_counts(row_N: Tensor, rows: int) -> Tensor:
    """Return the number of tokens of each row."""
    return torch.bincount(row_N, minlength=rows)


def drifted_rows(start_N: Tensor, behaviour_N: Tensor, row_N: Tensor, rows: int, limit: float) -> Tensor:
    """Return for each row (`_R`) whether the absolute mean log ratio of its tokens, weights to engine, exceeds `limit`.

    Args:
        start_N: logprobs of the weights at the start of the step.
        behaviour_N: logprobs of the engine that sampled the tokens.
        row_N: row of each token.
        rows: number of rows.
        limit: the largest absolute mean log ratio, in nats.
    """
    drift_N = (start_N.detach() - behaviour_N).double()
    sums_R = torch.zeros(rows, dtype=torch.float64, device=drift_N.device).index_add_(0, row_N, drift_N)
    return (sums_R / torch.bincount(row_N, minlength=rows)).abs() > limit


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """Return Schulman's k3 estimate of KL(policy of `logprobs_N` || reference) for each token that the policy sampled.

    It is exp(d) - 1 - d with d = reference - logprobs, which is never negative (GRPO, arXiv:2402.03300, equation 4).
    """
    difference_N = (reference_N - logprobs_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX)
    return difference_N.exp() - 1 - difference_N


def _ratio(numerator_N: Tensor, denominator_N: Tensor) -> Tensor:
    return (numerator_N - denominator_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()


def _corrected(current_N: Tensor, reference_N: Tensor, behaviour_N: Tensor) -> Tensor:
    ratio_N = (current_N - behaviour_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp().clamp(max=_RATIO_MAX)
    return ratio_N * k3(current_N, reference_N)


DIVERGENCES: Mapping[str, Divergence] = {
    "k1": lambda current_N, reference_N, _: current_N - reference_N,
    "k2": lambda current_N, reference_N, _: 0.5 * (current_N - reference_N) ** 2,
    "k3": lambda current_N, reference_N, _: k3(current_N, reference_N),
    "low_var_kl": lambda current_N, reference_N, _: k3(current_N, reference_N).clamp(-_LOW_VAR_MAX, _LOW_VAR_MAX),
    "abs": lambda current_N, reference_N, _: (current_N - reference_N).abs(),
    "corrected_k3": _corrected,
}
