"""The plain output head of a training pass where operations can be fused: see `head` for what and why.

Written out, a chunk's logits are read and written some twenty times in float32. Here they stay in the type that the
product is computed in, and are read three times and written twice: once as they come, once as their gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from headrace_trainer.torch_learner.model import masters
from headrace_trainer.torch_learner.model.compiled import fused
from headrace_trainer.torch_learner.model.products import add_product

CHUNK_BYTES = 384 << 20
"""Of one chunk's logits. A smaller chunk waits longer for the gradient of the weight to be read and written, which each
chunk adds to."""
_ROWS = 64
_SMALLEST = 1024
"""Tokens of the smallest chunk, so that short passes do not each have a size of their own."""


def backward(
    weight_VH: Tensor,
    bias_V: Tensor | None,
    hidden_NH: Tensor,
    targets_N: Tensor,
    temperature_N: Tensor,
    slope: Callable[[Tensor, slice], Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As `Head.backward`."""
    tokens = len(hidden_NH)
    logprobs_N, entropy_N = (hidden_NH.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    of_hidden_NH = torch.empty_like(hidden_NH) if hidden_NH.requires_grad else None
    of_weight_VH, of_bias_V = _sum_of(weight_VH), _sum_of(bias_V)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        matrix_VH, rounded_NH = weight_VH.to(dtype), hidden_NH.to(dtype)
        added_V = None if bias_V is None else bias_V.to(dtype)
        rows = rows_of(tokens, len(weight_VH), dtype)
        for start in range(0, tokens, rows):
            part = slice(start, min(start + rows, tokens))
            # All chunks of a pass have one shape, which is compiled for; what fills the last one has no slope.
            count, missing = part.stop - start, rows - (part.stop - start)
            here_NH = functional.pad(rounded_NH[part], (0, 0, 0, missing))
            at_N = functional.pad(targets_N[part], (0, missing))
            heat_N = functional.pad(temperature_N[part], (0, missing), value=1.0)
            logits_NV = functional.linear(here_NH, matrix_VH, added_V)
            found_N, spread_N, norm_N = fused(_read)(logits_NV, at_N, heat_N)
            logprobs_N[part], entropy_N[part] = found_N[:count], spread_N[:count]
            share_N = functional.pad(slope(logprobs_N[part], part), (0, missing)) / heat_N
            gradient_NV = fused(_differentiate)(logits_NV, norm_N, at_N, heat_N, share_N)
            if of_bias_V is not None:
                of_bias_V.add_(gradient_NV.sum(0, dtype=torch.float32))
            if of_hidden_NH is not None:
                of_hidden_NH[part] = (gradient_NV @ matrix_VH)[:count]
            if of_weight_VH is not None:
                add_product(of_weight_VH, gradient_NV.T, here_NH)
            del logits_NV, gradient_NV  # before the next chunk's are there
    return logprobs_N, entropy_N, of_hidden_NH


def rows_of(tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Tokens of a chunk. Where few words leave room for far more than the pass has, it is the next of few sizes: each
    is compiled once, and what fills it up is computed too."""
    rows = CHUNK_BYTES // (dtype.itemsize * vocabulary)
    most = max(1, rows - rows % _ROWS if rows > _ROWS else rows)
    return min(most, max(_SMALLEST, 1 << (tokens - 1).bit_length()))


def _sum_of(parameter: Tensor | None) -> Tensor | None:
    """Where the gradient of `parameter` is added up, in float32: what is there already."""
    if parameter is None or not parameter.requires_grad:
        return None
    home = masters.home(parameter)
    if home.grad is None:
        home.grad = torch.zeros_like(home)
    return home.grad


def _read(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logprob and entropy of each token, and the logarithm of the sum that both are relative to."""
    scaled_NV = logits_NV.float() / temperature_N[:, None]
    top_N = scaled_NV.amax(-1)
    shares_NV = (scaled_NV - top_N[:, None]).exp()
    sums_N = shares_NV.sum(-1)
    norm_N = sums_N.log() + top_N
    chosen_N = scaled_NV.gather(-1, targets_N[:, None]).squeeze(-1)
    return chosen_N - norm_N, norm_N - (shares_NV * scaled_NV).sum(-1) / sums_N, norm_N


def _differentiate(
    logits_NV: Tensor, norm_N: Tensor, targets_N: Tensor, temperature_N: Tensor, share_N: Tensor
) -> Tensor:
    """Logits become their gradient, when that of each token's logprob, over its temperature, is `share_N`."""
    shares_NV = (logits_NV.float() / temperature_N[:, None] - norm_N[:, None]).exp()
    here_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device)[None] == targets_N[:, None]
    return logits_NV.copy_(share_N[:, None] * (here_NV.float() - shares_NV))
