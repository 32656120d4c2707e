"""Weights in bfloat16 with float32 masters, which the optimizer moves.

A step of 1e-6 is a hundredth of the resolution of bfloat16 at 0.02, so weights of that type do not learn. Their masters
do, and the weights are the masters as a version stores them (`rounding`), so the trained model equals the served one.
Gradients of all passes are added up in float32, at the masters. Bytes: 2 for each weight on top of the 4, 4 and 8 of
master, gradient and the optimizer's two. Autocast over float32 weights makes the same copy in each pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace_trainer.torch_learner.rounding import RoundPart, round_part, round_stochastically

_MASTER = "headrace_master"


@torch.no_grad()
def of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return masters of the float32 weights that `model` trains, by name, and round the weights.

    From then on the gradients of the weights arrive at the masters.
    """
    masters: dict[str, nn.Parameter] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            masters[name] = nn.Parameter(weight.detach())
            weight.data = round_stochastically(masters[name], torch.bfloat16, name)
            setattr(weight, _MASTER, masters[name])
            weight.register_post_accumulate_grad_hook(_add_to_master)  # type: ignore[no-untyped-call]
    return masters


def home(weight: Tensor) -> Tensor:
    """Return the tensor at which the gradient of `weight` is added up: its master, or the weight itself."""
    master: Tensor = getattr(weight, _MASTER, weight)
    return master


@torch.no_grad()
def renew(model: nn.Module, masters: Mapping[str, Tensor], *, compiled: bool) -> None:
    """Set the weights of `model` to their rounded masters."""
    how: RoundPart | None = None
    if compiled:
        from headrace_trainer.torch_learner.model.compiled import (
            fused_for_all,  # imported here, because it takes seconds
        )

        how = fused_for_all(round_part)

    for name, weight in model.named_parameters():
        if name in masters:
            weight.copy_(round_stochastically(masters[name].detach(), weight.dtype, name, how))


def _add_to_master(weight: Tensor) -> None:
    """Add the gradient of a pass to that of the earlier passes."""
    if weight.grad is None:
        return
    master = home(weight)
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad.add_(weight.grad)
    weight.grad = None
