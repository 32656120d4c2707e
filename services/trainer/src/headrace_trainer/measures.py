"""The standing measurements of a step: how far engine and trainer are apart, what was clipped, how sure the
policy is."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace_trainer.batch import Batch
from headrace_trainer.forward import Pack
from headrace_trainer.loss import LOG_RATIO_MAX, TokenLoss, k3


@dataclass
class Measures:
    """Collects observations pass by pass and update by update. Tensors are `_N`, tokens of the loss."""

    drift: list[Tensor] = field(default_factory=list)
    """Logprob at the start of the step minus the engine's."""
    fresh: list[Tensor] = field(default_factory=list)
    entropy: list[Tensor] = field(default_factory=list)
    weight: list[Tensor] = field(default_factory=list)
    truncated: list[Tensor] = field(default_factory=list)
    masked: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    idle: list[Tensor] = field(default_factory=list)
    """Tokens through which no gradient of the objective flows."""
    left_out: set[str] = field(default_factory=set)
    """Experiences that have no part in the loss."""
    base: list[Tensor] = field(default_factory=list)
    """k3 from the base model, when it was asked."""
    losses: list[Tensor] = field(default_factory=list)

    def observe(self, one: Pack, start_N: Tensor, entropy_N: Tensor, tokens: TokenLoss, loss_N: Tensor) -> None:
        """One pass of one update."""
        self.drift.append((start_N - one.behaviour_N).cpu())
        self.fresh.append(one.fresh_N.cpu())
        self.entropy.append(entropy_N.cpu())
        self.weight.append(tokens.weight_N.cpu())
        self.truncated.append(tokens.truncated_N.cpu())
        self.masked.append(tokens.masked_N.cpu())
        self.clipped.append(tokens.clipped_N.cpu())
        self.idle.append(((one.advantage_N == 0) | tokens.masked_N | tokens.clipped_N).cpu())
        self.losses.append(loss_N.cpu())

    def values(self, batch: Batch) -> dict[str, float]:
        """Means over tokens and updates. `mismatch_*` is there only when the batch holds tokens sampled by the very
        weights of this step."""
        drift_N, fresh_N = torch.cat(self.drift), torch.cat(self.fresh)
        advantages_B = torch.tensor([float(row.advantage) for row in batch.rows])
        found = {
            "loss": _mean(torch.cat(self.losses)),
            "loss_tokens": float(batch.loss_tokens),
            "kl_behaviour": _mean(k3(torch.zeros_like(drift_N), drift_N)),
            "entropy": _mean(torch.cat(self.entropy)),
            "weight_mean": _mean(torch.cat(self.weight)),
            "effective_sample_size": effective_sample_size(drift_N),
            "truncated_fraction": _mean(torch.cat(self.truncated)),
            "masked_fraction": _mean(torch.cat(self.masked)),
            "sequence_masked_fraction": len(self.left_out) / len(batch.rows),
            "clip_fraction": _mean(torch.cat(self.clipped)),
            "zero_gradient_fraction": _mean(torch.cat(self.idle)),
            "advantage_mean": _mean(advantages_B),
            "advantage_std": float(advantages_B.std(correction=0)),
            "advantage_min": float(advantages_B.min()),
            "advantage_max": float(advantages_B.max()),
        }
        if self.base:
            found["kl_base"] = _mean(torch.cat(self.base))
        if fresh_N.any():
            mismatch_N = drift_N[fresh_N].abs()
            found["mismatch_mean"] = _mean(mismatch_N)
            found["mismatch_p99"] = float(mismatch_N.sort().values[int(0.99 * (len(mismatch_N) - 1))])
            found["mismatch_tokens"] = float(len(mismatch_N))
        return found


def effective_sample_size(log_ratio_N: Tensor) -> float:
    """Kish's, of importance weights, as a share of their number: (sum w)^2 / (n sum w^2). 1: all are equal; 1/n: one
    outweighs the rest."""
    weight_N = log_ratio_N.double().clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    return float(weight_N.sum() ** 2 / (len(weight_N) * (weight_N**2).sum()))


def _mean(values: Tensor) -> float:
    return float(values.double().mean())
