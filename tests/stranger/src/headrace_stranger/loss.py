"""The loss `slope`: the plain policy gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_trainer.algorithms.losses import Compute, Loss, LossInputs

if TYPE_CHECKING:
    from headrace_trainer.algorithms.loss import TokenLoss
    from headrace_trainer.algorithms.settings import LossSettings


def _load() -> Compute:
    import torch

    from headrace_trainer.algorithms.loss import TokenLoss

    def slope(sampled: LossInputs, _settings: LossSettings) -> TokenLoss:
        none_N = torch.zeros_like(sampled.advantage_N, dtype=torch.bool)
        left_out_N = none_N if sampled.left_out_N is None else sampled.left_out_N
        loss_N = torch.where(left_out_N, 0.0, -sampled.current_N * sampled.advantage_N)
        return TokenLoss(loss_N, torch.ones_like(sampled.advantage_N), none_N, left_out_N, none_N)

    return slope


SLOPE = Loss(_load)
