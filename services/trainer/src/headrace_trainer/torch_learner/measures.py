"""Measurements of every step: distance between engine and trainer, clipping, entropy of the policy."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from headrace_trainer.algorithms.loss import LOG_RATIO_MAX, TokenLoss, k3
from headrace_trainer.batches.batch import Batch
from headrace_trainer.torch_learner.model.forward import Pack


@dataclass
class Measures:
    """Collector of measurements during a step, pass by pass and update by update.

    Tensors are `_N`, tokens of the loss.
    """

    drift: list[Tensor] = field(default_factory=list)
    """Logprobs at the start of the step minus the engine's."""
    fresh: list[Tensor] = field(default_factory=list)
    restricted: list[Tensor] = field(default_factory=list)
    """Tokens that were sampled from a part of the vocabulary."""
    entropy: list[Tensor] = field(default_factory=list)
    weight: list[Tensor] = field(default_factory=list)
    truncated: list[Tensor] = field(default_factory=list)
    masked: list[Tensor] = field(default_factory=list)
    clipped: list[Tensor] = field(default_factory=list)
    idle: list[Tensor] = field(default_factory=list)
    """Tokens without a gradient of the objective."""
    left_out: dict[tuple[str, ...], Tensor] = field(default_factory=dict)
    """Experiences of a pass that are left out of the loss, by the names of its rows."""
    base: list[Tensor] = field(default_factory=list)
    """k3 from the base model, where it was computed."""
    losses: list[Tensor] = field(default_factory=list)
    slopes: list[tuple[Pack, Tensor]] = field(default_factory=list)
    """Each pass of the first update with the slopes of its rows, which replace 1 in their policy gradients."""

    def observe(self, pack: Pack, start_N: Tensor, entropy_N: Tensor, tokens: TokenLoss, loss_N: Tensor) -> None:
        """Add the observations of one pass of one update. No value is read, so all tensors stay on their device."""
        drift_N = start_N - pack.behaviour_N
        self.drift.append(drift_N if pack.written_N is None else drift_N.where(~pack.written_N, 0.0))
        self.fresh.append(pack.fresh_N)
        self.restricted.append(torch.zeros_like(pack.fresh_N) if pack.sets is None else pack.sets.restricted_N)
        self.entropy.append(entropy_N)
        self.weight.append(tokens.weight_N)
        self.truncated.append(tokens.truncated_N)
        self.masked.append(tokens.masked_N)
        self.clipped.append(tokens.clipped_N)
        self.idle.append((pack.advantage_N == 0) | tokens.masked_N | tokens.clipped_N)
        self.losses.append(loss_N)

    def slopes_by_row(self) -> dict[str, float]:
        """Return by row name the factor of the row's policy gradient, if the loss is not linear in the advantage."""
        return {
            name: value
            for pack, slope_R in self.slopes
            for name, value in zip(pack.names, slope_R.tolist(), strict=True)
        }

    @torch.no_grad()
    def numbers(self) -> Tensor:
        """Return all numbers that `values` needs as a single tensor, so that one read from the device suffices."""
        drift_N, fresh_N = torch.cat(self.drift), torch.cat(self.fresh)
        base = _mean(self.base) if self.base else torch.zeros((), dtype=torch.float64, device=drift_N.device)
        means = [
            _mean(self.losses),
            k3(torch.zeros_like(drift_N), drift_N).double().mean(),
            *(
                _mean(each)
                for each in (self.entropy, self.weight, self.truncated, self.masked, self.clipped, self.idle)
            ),
            effective_sample_size(drift_N),
            base,
            *_mismatch(drift_N.abs(), fresh_N),
            *self._restricted_means(drift_N, fresh_N),
        ]
        return torch.cat([torch.stack(means), *(out_R.double() for out_R in self.left_out.values())])

    def _restricted_means(self, drift_N: Tensor, fresh_N: Tensor) -> list[Tensor]:
        """Return five means of restricted tokens: their share of all tokens, the number of fresh ones among them, and
        their entropy, k3 and mismatch.
        """
        restricted_N = torch.cat(self.restricted)
        count, fresh_count = restricted_N.double().sum(), (restricted_N & fresh_N).double().sum()
        entropy_N, kl_N = torch.cat(self.entropy).double(), k3(torch.zeros_like(drift_N), drift_N).double()
        return [
            count / len(restricted_N),
            fresh_count,
            entropy_N.where(restricted_N, 0.0).sum() / count.clamp(min=1),
            kl_N.where(restricted_N, 0.0).sum() / count.clamp(min=1),
            drift_N.abs().double().where(restricted_N & fresh_N, 0.0).sum() / fresh_count.clamp(min=1),
        ]

    def values(self, batch: Batch, numbers: list[float]) -> tuple[dict[str, float], frozenset[str]]:
        """Return the measurements by name, and the experiences that were left out of the loss.

        `mismatch_*` is set only when the batch has tokens sampled by the very weights of this step, and `restricted_*`
        only when it has restricted tokens.

        Args:
            batch: batch of the step.
            numbers: values of the tensor that the method `numbers` returned.
        """
        loss, kl, entropy, weight, truncated, masked, clipped, idle, effective, base, *rest = numbers
        mismatch_tokens, mismatch_mean, mismatch_p99, *rest = rest
        restricted, restricted_fresh, restricted_entropy, restricted_kl, restricted_mismatch, *out = rest
        names = [name for pack_names in self.left_out for name in pack_names]
        left_out = frozenset(name for name, flag in zip(names, out, strict=True) if flag)
        advantages_B = torch.tensor([float(row.advantage) for row in batch.rows])
        values = {
            "loss": loss,
            "loss_tokens": float(batch.loss_tokens),
            "kl_behaviour": kl,
            "entropy": entropy,
            "weight_mean": weight,
            "effective_sample_size": effective,
            "truncated_fraction": truncated,
            "masked_fraction": masked,
            "sequence_masked_fraction": len(left_out) / len(batch.rows),
            "clip_fraction": clipped,
            "zero_gradient_fraction": idle,
            "advantage_mean": float(advantages_B.double().mean()),
            "advantage_std": float(advantages_B.std(correction=0)),
            "advantage_min": float(advantages_B.min()),
            "advantage_max": float(advantages_B.max()),
        }
        if self.base:
            values["kl_base"] = base
        if mismatch_tokens:
            values["mismatch_mean"] = mismatch_mean
            values["mismatch_p99"] = mismatch_p99
            values["mismatch_tokens"] = mismatch_tokens
        if restricted:
            values["restricted_fraction"] = restricted
            values["restricted_entropy"] = restricted_entropy
            values["restricted_kl_behaviour"] = restricted_kl
            if restricted_fresh:
                values["restricted_mismatch_mean"] = restricted_mismatch
        return values, left_out


def effective_sample_size(log_ratio_N: Tensor) -> Tensor:
    """Return Kish's effective sample size of importance weights, as a share of their number: (sum w)^2 / (n sum w^2).

    1 means that all weights are equal, 1/n that one outweighs the rest.
    """
    weight_N = log_ratio_N.double().clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp()
    return weight_N.sum() ** 2 / (len(weight_N) * (weight_N**2).sum())


def _mismatch(size_N: Tensor, fresh_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the number of fresh tokens, and mean and 99th percentile of their mismatch (undefined for 0 tokens)."""
    count = fresh_N.double().sum()
    mean = size_N.double().where(fresh_N, 0.0).sum() / count
    ordered_N = size_N.where(fresh_N, torch.inf).sort().values
    index = (0.99 * (count - 1)).clamp(min=0).long()
    return count, mean, ordered_N.gather(0, index[None])[0].double()


def _mean(values: list[Tensor]) -> Tensor:
    return torch.cat(values).double().mean()
