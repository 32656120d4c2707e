"""`dapo`: decoupled clip and dynamic sampling (arXiv:2503.14476), on the groups of `grpo`.

    A = (r - mean of the group) / (standard deviation of the group + 1e-6)
    L = - 1/N sum_n min(rho A, clip(rho, 1 - 0.2, 1 + 0.28) A)       over the N tokens of the batch

Needs groups. A group whose runs all have the same reward is dropped with `equal_rewards`, and other groups fill the
batch. There is no divergence from the base. The paper's penalty for length belongs into the reward. A revision is
trained with the missing advantage.
"""

from __future__ import annotations

from headrace_trainer.algorithms.presets import Algorithm

DAPO = Algorithm(
    "grpo",
    "clipped",
    {
        "advantage.equal_groups": "drop",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.28,
        "loss.agg_mode": "token-mean",
        "loss.kl": 0.0,
    },
)
