"""Estimates of a token's divergence from the base, by the names that Trinity-RFT and verl use for them.

With d = log pi_base - log pi: k1 is -d, k2 is d^2 / 2, k3 is e^d - 1 - d (Schulman 2020), `low_var_kl` is k3 within
plus and minus 10, `abs` is |d|, and `corrected_k3` is k3 times the ratio of pi to the engine that sampled, at most 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from headrace_trainer.algorithms.loss import LOG_RATIO_MAX, k3

_LOW_VAR_MAX, _RATIO_MAX = 10.0, 2.0
Divergence = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Function of the logprobs of the present weights, of the base and of the engine."""


def _corrected(current_N: Tensor, reference_N: Tensor, behaviour_N: Tensor) -> Tensor:
    ratio_N = (current_N - behaviour_N).clamp(-LOG_RATIO_MAX, LOG_RATIO_MAX).exp().clamp(max=_RATIO_MAX)
    return ratio_N * k3(current_N, reference_N)


DIVERGENCES: Mapping[str, Divergence] = {
    "k1": lambda current_N, reference_N, _: current_N - reference_N,
    "k2": lambda current_N, reference_N, _: 0.5 * (current_N - reference_N) ** 2,
    "k3": lambda current_N, reference_N, _: k3(current_N, reference_N),
    "low_var_kl": lambda current_N, reference_N, _: k3(current_N, reference_N).clamp(-_LOW_VAR_MAX, _LOW_VAR_MAX),
    "abs": lambda current_N, reference_N, _: (current_N - reference_N).abs(),
    "corrected_k3": _corrected,
}
