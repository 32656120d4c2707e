"""Sampling of tokens from logits, for a whole batch at once.

A token is drawn by inverting the cumulative distribution at one uniform number, which is a pure function of the
sequence's seed and of the number of tokens drawn so far. So the tokens of a sequence do not depend on the rest of the
batch, and a replica that takes over a seeded sequence draws the same tokens as the first replica would have.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return pseudo-random integers for counters, by the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def uniform(seeds: NDArray[np.uint64], drawn: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return for each seed the number at position `drawn` of its random stream: uniform in [0, 1), with 53 bits."""
    bits = mix(seeds + (drawn + np.uint64(1)) * _GOLDEN)
    scaled: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return scaled


def seed_of(seed: int, choice: int) -> int:
    """Return the seed of one choice, a deterministic function of the request's seed and the choice."""
    with np.errstate(over="ignore"):
        base = np.array([seed % 2**64], dtype=np.uint64)
        return int(mix(mix(base + _GOLDEN) + np.uint64(choice)).item())


def draw(logits_RV: Tensor, temperature_R: Tensor, uniform_R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw a token for each row.

    Temperature 0 selects the most likely token and reports logprobs at temperature 1. A row with NaN logits gets a NaN
    logprob and does not affect other rows.

    Returns:
        Token ids `[R]`, their logprobs `[R]` and all logprobs `[R, V]` in the distribution that was sampled from.
    """
    sampled_R = temperature_R > 0
    logprobs_RV = torch.log_softmax(logits_RV / torch.where(sampled_R, temperature_R, 1.0)[:, None], 1)
    cumulated_RV = logprobs_RV.exp().cumsum(1, dtype=torch.float64)
    total_R = cumulated_RV[:, -1]
    # The target must be below the total after rounding, so that a token of probability zero is never drawn.
    target_R = torch.minimum(uniform_R * total_R, torch.nextafter(total_R, torch.zeros_like(total_R)))
    last = int(logits_RV.shape[1]) - 1  # a Python number, because the tracer would put a tensor on the CPU
    ids_R1 = torch.searchsorted(cumulated_RV, target_R[:, None], right=True).clamp(max=last)
    ids_R1 = torch.where(sampled_R[:, None], ids_R1, logits_RV.argmax(1, keepdim=True))
    return ids_R1.squeeze(1), logprobs_RV.gather(1, ids_R1).squeeze(1), logprobs_RV


def penalise(logits_RV: Tensor, counts_RV: Tensor, presence_R: Tensor, frequency_R: Tensor) -> Tensor:
    """Apply OpenAI's penalties: subtract `frequency` for each earlier occurrence of a token, and `presence` once."""
    penalised: Tensor = logits_RV - frequency_R[:, None] * counts_RV - presence_R[:, None] * (counts_RV > 0)
    return penalised


def mask_forbidden(logits_RV: Tensor, rows_H: Tensor, allowed_HW: Tensor) -> Tensor:
    """Mask in the rows `rows_H`, in place, the tokens whose bit is not set (`headrace_inference.engine.Guide`)."""
    bits = torch.arange(32, dtype=torch.int32, device=logits_RV.device)
    allowed_HV = ((allowed_HW[:, :, None] >> bits) & 1).flatten(1)[:, : logits_RV.shape[1]].bool()
    logits_RV[rows_H] = logits_RV[rows_H].masked_fill(~allowed_HV, float("-inf"))
    return logits_RV


def truncate(logits_RV: Tensor, top_p_R: Tensor, top_k_R: Tensor, min_p_R: Tensor) -> Tensor:
    """Mask the tokens less likely than `min_p` times the most likely one, then all but the `top_k` most likely tokens,
    and of these all but the fewest that reach `top_p`.

    `min_p` 0, `top_k` 0 and `top_p` 1 mask no token. The temperature must be applied to the logits before.
    """
    ordered_RV, order_RV = logits_RV.sort(stable=True, dim=1, descending=True)
    unlikely_RV = ordered_RV < ordered_RV[:, :1] + min_p_R.log()[:, None]  # the logarithm of 0 excludes no token
    ordered_RV = ordered_RV.masked_fill(unlikely_RV, float("-inf"))
    rank_V = torch.arange(logits_RV.shape[1], device=logits_RV.device)
    keep_R = torch.where(top_k_R > 0, top_k_R, logits_RV.shape[1])
    ordered_RV = ordered_RV.masked_fill(rank_V >= keep_R[:, None], float("-inf"))
    before_RV = ordered_RV.softmax(1).cumsum(1).roll(1, 1)
    before_RV[:, 0] = 0.0
    beyond_RV = (before_RV >= top_p_R[:, None]) & (top_p_R[:, None] < 1.0)
    beyond_RV[:, 0] = False  # a `top_p` that float32 rounds to 0 keeps the most likely token, too
    ordered_RV = ordered_RV.masked_fill(beyond_RV, float("-inf"))
    return torch.empty_like(logits_RV).scatter_(1, order_RV, ordered_RV)


def most_likely(logprobs_RV: Tensor, count: int) -> list[list[tuple[int, float]]]:
    """Return the `count` most likely tokens of each row with their logprobs, best first."""
    values, ids = logprobs_RV.topk(min(count, logprobs_RV.shape[1]), dim=1)
    pairs: Any = zip(ids.tolist(), values.tolist(), strict=True)
    return [list(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
