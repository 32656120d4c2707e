"""Weights in bfloat16 with float32 masters, which the optimizer moves, and the rounding that loses no small change.

A step of 1e-6 is a hundredth of the resolution of bfloat16 at 0.02, so weights of that type do not learn. Their masters
do, and the weights are the masters as a version stores them, rounded, so the trained model equals the served one.
Gradients of all passes are added up in float32, at the masters. Bytes: 2 for each weight on top of the 4, 4 and 8 of
master, gradient and the optimizer's two. Autocast over float32 weights makes the same copy in each pass.

Rounded to the nearest value, 99 of 100 weights of a version would equal those of its parent until they have moved by
half a unit. So each weight is rounded up with the probability of the part that would be cut off (stochastic rounding,
Gupta et al. 2015, arXiv:1502.02551): on average, over the many weights of a row, a version equals the trained weights.
The random number belongs to the weight and not to the version: a change of a tenth of a unit rounds up one weight in
ten, which then stays so, and unchanged weights keep their value. The same weights always give the same bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

RoundPart = Callable[[Tensor, torch.dtype, Tensor], Tensor]
_CHUNK = 1 << 22
"""Weights that are rounded at a time."""
_BITS = 24
"""Bits of each random number: the precision of float32."""
_MASTER = "headrace_master"


def round_stochastically(
    weights: Tensor, dtype: torch.dtype, name: str, how: RoundPart | None = None, start: int = 0
) -> Tensor:
    """Return float32 `weights` stochastically rounded to `dtype`. The result is deterministic, on every device.

    Args:
        weights: The weights, or a part of a tensor.
        dtype: The type of the result.
        name: The tensor's name, which seeds its random numbers.
        how: Another implementation of `round_part`, for example a compiled one.
        start: The index of the first weight in the whole tensor.
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return weights.to(dtype)
    flat, seed = weights.reshape(-1), zlib.crc32(name.encode())
    chunk = len(flat) if how else _CHUNK
    starts = range(0, len(flat), max(1, chunk))
    parts = [
        (how or round_part)(flat[at : at + chunk], dtype, torch.tensor(start + at + (seed << 20))) for at in starts
    ]
    return torch.cat(parts).reshape(weights.shape) if parts else weights.to(dtype)


def round_part(exact: Tensor, dtype: torch.dtype, offset: Tensor) -> Tensor:
    """Round float32 `exact` stochastically to `dtype`.

    Args:
        offset: position of the first weight in the stream of random numbers.
    """
    draws = _draws(torch.arange(len(exact), dtype=torch.int64, device=exact.device) + offset)
    nearest = exact.to(dtype)
    bits = nearest.view(torch.int16)  # sign and magnitude: one more is the next value away from zero
    size = exact.abs()
    beyond = nearest.float().abs() > size
    below = torch.where(beyond, bits - 1, bits).view(dtype)
    above = torch.where(beyond, bits, bits + 1).view(dtype)
    low, high = below.float().abs(), above.float().abs()
    up = (draws * (high - low) < size - low) & high.isfinite()
    return torch.where(exact.isfinite(), torch.where(up, above, below), nearest)


def _draws(mixed: Tensor) -> Tensor:
    """Return numbers in [0, 1) that depend only on the index: a bit mixer (the last step of MurmurHash3)."""
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * (factor - (1 << 64))
    return ((mixed >> 32) & ((1 << _BITS) - 1)).float() / (1 << _BITS)


@torch.no_grad()
def create(model: nn.Module) -> dict[str, nn.Parameter]:
    """Create a float32 master copy of each trained weight, and round the weights of the model to bfloat16.

    From then on gradients are accumulated at the masters, which the optimizer updates. Returns the masters by name.
    """
    masters: dict[str, nn.Parameter] = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            masters[name] = nn.Parameter(weight.detach())
            weight.data = round_stochastically(masters[name], torch.bfloat16, name)
            setattr(weight, _MASTER, masters[name])
            weight.register_post_accumulate_grad_hook(_add_to_master)  # type: ignore[no-untyped-call]
    return masters


def gradient_owner(weight: Tensor) -> Tensor:
    """Return the tensor in which the gradient of `weight` is accumulated: its float32 master copy, or the weight itself
    if it has none.
    """
    master: Tensor = getattr(weight, _MASTER, weight)
    return master


@torch.no_grad()
def update_weights(model: nn.Module, masters: Mapping[str, Tensor], *, compiled: bool) -> None:
    """Set the weights of `model` to their float32 masters, stochastically rounded."""
    how: RoundPart | None = None
    if compiled:
        from headrace_trainer.torch_learner.model.compiled import (
            compile_for_all_shapes,  # imported here, because it takes seconds
        )

        how = compile_for_all_shapes(round_part)

    for name, weight in model.named_parameters():
        if name in masters:
            weight.copy_(round_stochastically(masters[name].detach(), weight.dtype, name, how))


def _add_to_master(weight: Tensor) -> None:
    """Add the gradient of a weight in one pass to that of its master."""
    if weight.grad is None:
        return
    master = gradient_owner(weight)
    if master.grad is None:
        master.grad = weight.grad.float()
    else:
        master.grad.add_(weight.grad)
    weight.grad = None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left @ right` to `total` in place. If `total` has a wider type, a GPU accumulates the sum in that type."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif total.is_cuda and total.dtype is torch.float32:
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    else:
        total.add_(left @ right)
