"""Float32 weights in a type of 16 bits, without losing what training added to them.

A step of 1e-6 is a hundredth of what bfloat16 can tell apart at 0.02. Rounded to the nearest value, 99 of 100 weights
of a version would be those of its parent, and all of them as long as they have not moved by half a unit. So each weight
is rounded up with the probability of what would be cut off (stochastic rounding, Gupta et al. 2015, arXiv:1502.02551):
on average, over the many weights of a row, a version is what was trained. The draw belongs to the weight and not to the
version: what has moved by a tenth of a unit is rounded up in one of ten places, and stays so; what has not moved is
what it was. And the same weights always give the same bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
from torch import Tensor

How = Callable[[Tensor, torch.dtype, Tensor], Tensor]
_CHUNK = 1 << 22
"""Weights at a time."""
_BITS = 24
"""Of each draw; what float32 has."""


def rounded(weights: Tensor, dtype: torch.dtype, name: str, how: How | None = None, start: int = 0) -> Tensor:
    """`weights`, float32, in `dtype`; `name` tells their draws from those of others. Every device rounds alike.
    `how`: `part` in another form. `start`: where these begin in the whole tensor, when they are a part of one."""
    if dtype not in (torch.bfloat16, torch.float16):
        return weights.to(dtype)
    flat, seed = weights.reshape(-1), zlib.crc32(name.encode())
    chunk = len(flat) if how else _CHUNK
    starts = range(0, len(flat), max(1, chunk))
    parts = [(how or part)(flat[at : at + chunk], dtype, torch.tensor(start + at + (seed << 20))) for at in starts]
    return torch.cat(parts).reshape(weights.shape) if parts else weights.to(dtype)


def part(exact: Tensor, dtype: torch.dtype, place: Tensor) -> Tensor:
    """`exact` in `dtype`; `place`, of the first of them, tells the draws."""
    draws = _draws(torch.arange(len(exact), dtype=torch.int64, device=exact.device) + place)
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
    """Numbers in [0, 1) that only depend on the place: a bit mixer (the last step of MurmurHash3) over the index."""
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * (factor - (1 << 64))
    return ((mixed >> 32) & ((1 << _BITS) - 1)).float() / (1 << _BITS)
