"""Weights in bfloat16, and what the optimizer moves: the same in float32, the masters.

A step of 1e-6 is a hundredth of what bfloat16 can tell apart at 0.02, so weights of that type do not learn. Their
masters do, and the weights are the masters as a version has them (`rounding`): what is trained on is what is served.
Gradients of all passes add up in float32, at the masters. Bytes: 2 for each weight on top of the 4, 4 and 8 of master,
gradient and the optimizer's two. Autocast over float32 weights makes the same copy of its own in each pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from headrace_trainer.torch_learner.rounding import RoundPart, round_part, round_stochastically

_MASTER = "headrace_master"


@torch.no_grad()
def of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Masters of the float32 weights that `model` trains, by name; the weights are rounded. From here on their
    gradients arrive at the masters."""
    found: dict[str, nn.Parameter] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            found[name] = nn.Parameter(weight.detach())
            weight.data = round_stochastically(found[name], torch.bfloat16, name)
            setattr(weight, _MASTER, found[name])
            weight.register_post_accumulate_grad_hook(_hand_over)  # type: ignore[no-untyped-call]
    return found


def home(weight: Tensor) -> Tensor:
    """Where the gradient of `weight` is added up."""
    found: Tensor = getattr(weight, _MASTER, weight)
    return found


@torch.no_grad()
def renew(model: nn.Module, masters: Mapping[str, Tensor], *, compiled: bool) -> None:
    """Make the weights of `model` what their masters are by now."""
    how: RoundPart | None = None
    if compiled:
        from headrace_trainer.torch_learner.model.compiled import fused_for_all  # seconds that others need not wait

        how = fused_for_all(round_part)

    for name, weight in model.named_parameters():
        if name in masters:
            weight.copy_(round_stochastically(masters[name].detach(), weight.dtype, name, how))


def _hand_over(weight: Tensor) -> None:
    """What a pass has found, to what the passes before it found."""
    if weight.grad is None:
        return
    master = home(weight)
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad.add_(weight.grad)
    weight.grad = None
