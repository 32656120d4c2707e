"""The plain output head of a training pass with fused operations; `head` describes the method.

As single operations, a chunk's logits are read and written some twenty times in float32. Here they stay in the type of
the product, and are read three times and written twice: once as logits, once as their gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from headrace_trainer.torch_learner.model import masters
from headrace_trainer.torch_learner.model.compiled import compile_per_shape
from headrace_trainer.torch_learner.model.masters import add_product
from headrace_trainer.torch_learner.model.pack_sets import PackSets

CHUNK_BYTES = 384 << 20
"""Size of one chunk's logits. With smaller chunks the gradient of the weight would be read and written more often."""
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
    sets: PackSets | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute logprobs and gradients as `Head.backward` does."""
    tokens = len(hidden_NH)
    logprobs_N, entropy_N = (hidden_NH.new_empty(tokens, dtype=torch.float32) for _ in range(2))
    of_hidden_NH = torch.empty_like(hidden_NH) if hidden_NH.requires_grad else None
    of_weight_VH, of_bias_V = _gradient_buffer(weight_VH), _gradient_buffer(bias_V)
    with torch.autocast(hidden_NH.device.type, enabled=False):
        matrix_VH, rounded_NH = weight_VH.to(dtype), hidden_NH.to(dtype)
        added_V = None if bias_V is None else bias_V.to(dtype)
        rows = rows_of(tokens, len(weight_VH), dtype)
        for start in range(0, tokens, rows):
            part = slice(start, min(start + rows, tokens))
            # All chunks of a pass have one shape, for which the code is compiled; the padding of the last one has no
            # slope.
            count, missing = part.stop - start, rows - (part.stop - start)
            chunk_NH = functional.pad(rounded_NH[part], (0, 0, 0, missing))
            at_N = functional.pad(targets_N[part], (0, missing))
            heat_N = functional.pad(temperature_N[part], (0, missing), value=1.0)
            logits_NV = functional.linear(chunk_NH, matrix_VH, added_V)
            if sets is not None:
                sets.restrict(logits_NV, part)
            chunk_logprobs_N, chunk_entropy_N, norm_N = compile_per_shape(_read)(logits_NV, at_N, heat_N)
            logprobs_N[part], entropy_N[part] = chunk_logprobs_N[:count], chunk_entropy_N[:count]
            share_N = functional.pad(slope(logprobs_N[part], part), (0, missing)) / heat_N
            gradient_NV = compile_per_shape(_differentiate)(logits_NV, norm_N, at_N, heat_N, share_N)
            if of_bias_V is not None:
                of_bias_V.add_(gradient_NV.sum(0, dtype=torch.float32))
            if of_hidden_NH is not None:
                of_hidden_NH[part] = (gradient_NV @ matrix_VH)[:count]
            if of_weight_VH is not None:
                add_product(of_weight_VH, gradient_NV.T, chunk_NH)
            del logits_NV, gradient_NV  # so that two chunks are never in memory together
    return logprobs_N, entropy_N, of_hidden_NH


def rows_of(tokens: int, vocabulary: int, dtype: torch.dtype) -> int:
    """Return the number of tokens per chunk of logits, for a pass with `tokens` loss tokens.

    It is one of a few sizes, because the code is compiled for each size.
    """
    rows = CHUNK_BYTES // (dtype.itemsize * vocabulary)
    most = max(1, rows - rows % _ROWS if rows > _ROWS else rows)
    return min(most, max(_SMALLEST, 1 << (tokens - 1).bit_length()))


def _gradient_buffer(parameter: Tensor | None) -> Tensor | None:
    """Return the float32 tensor in which the gradient of a parameter is accumulated, created as zeros if there is none.
    None for a parameter that is not trained.
    """
    if parameter is None or not parameter.requires_grad:
        return None
    home = masters.gradient_owner(parameter)
    if home.grad is None:
        home.grad = torch.zeros_like(home)
    return home.grad


def _read(logits_NV: Tensor, targets_N: Tensor, temperature_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logprob and the entropy of each token, and the logarithm of its normalising sum."""
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
    """Replace logits by their gradient, in place.

    Args:
        share_N: gradient of each token's logprob, divided by its temperature.
    """
    shares_NV = (logits_NV.float() / temperature_N[:, None] - norm_N[:, None]).exp()
    is_target_NV = torch.arange(logits_NV.shape[1], device=logits_NV.device)[None] == targets_N[:, None]
    return logits_NV.copy_(share_N[:, None] * (is_target_NV.float() - shares_NV))
