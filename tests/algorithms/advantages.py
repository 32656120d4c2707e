"""Comparison of our advantages with the oracle's: the largest difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace_runtime.settings.sections import complete
from headrace_trainer.algorithms.baselines import Baselines, Decay
from headrace_trainer.algorithms.estimators import AdvantageInputs
from headrace_trainer.algorithms.settings import AdvantageSettings
from headrace_trainer.torch_learner import critic
from tests.algorithms import oracle

Settings = complete(AdvantageSettings)
DECAY = Decay(task=0.9, model=0.99, tasks_max=100)


def of_groups(kind: str, seed: int, **settings: Any) -> float:
    """Three groups of two to six runs, in mixed order."""
    generator = np.random.default_rng(seed)
    rewards = [list(generator.normal(0, 1, int(generator.integers(2, 7)))) for _ in range(3)]
    positions = [(group, run) for group, several in enumerate(rewards) for run in range(len(several))]
    generator.shuffle(positions)
    batch = _batch(positions, rewards, [() for _ in positions])
    chosen = Settings.model_validate({"kind": kind, **settings})
    advantages, _ = chosen.estimator.compute(batch, Baselines(), DECAY, chosen)
    expected = [_group(kind, several, chosen) for several in rewards]
    pairs = zip(advantages.values_B, positions, strict=True)
    return float(max(abs(value - expected[group][run]) for value, (group, run) in pairs))


def of_turns(seed: int, *, norm: bool = False, weight: float = 1.0, decay: float = 1.0) -> float:
    """One group of four runs with one to five turns, of which some have no reward."""
    generator = np.random.default_rng(seed)
    rewards = list(generator.normal(0, 1, 4))
    turns = [
        [None if generator.random() < 0.3 else float(generator.normal()) for _ in range(int(generator.integers(1, 6)))]
        for _ in rewards
    ]
    turn_settings = {"step_norm": norm, "turn_weight": weight, "turn_decay": decay}
    chosen = Settings.model_validate({"kind": "step_wise_grpo", "step_wise_grpo": turn_settings})
    batch = _batch([(0, run) for run in range(4)], [rewards], turns)
    advantages, _ = chosen.estimator.compute(batch, Baselines(), DECAY, chosen)
    credit = chosen.estimator.credit
    assert credit is not None
    computed = [
        credit(
            advantages.values_B[run],
            turns[run],
            advantages.turn_baselines_B[run],
            advantages.turn_scales_B[run],
            chosen,
        )
        for run in range(4)
    ]
    expected = oracle.step_wise(rewards, turns, norm=norm, weight=weight, decay=decay)
    return max(
        float(np.abs(np.array(values) - expected_values).max())
        for values, expected_values in zip(computed, expected, strict=True)
    )


def of_a_critic(seed: int, gamma: float, lam: float) -> float:
    """Compare GAE with the sum that it stands for."""
    generator = np.random.default_rng(seed)
    values, reward = generator.normal(0, 1, 12), float(generator.normal())
    advantages, returns = critic.gae(values, reward, gamma, lam)
    expected = oracle.gae(values, reward, gamma, lam)
    return float(max(np.abs(advantages - expected).max(), np.abs(returns - expected - values).max()))


def of_a_revised_reward(seed: int, gamma: float, lam: float) -> float:
    """Check that a correction adds the difference of the two advantages, independent of the critic."""
    generator = np.random.default_rng(seed)
    values, old, new = generator.normal(0, 1, 9), 0.25, -1.5
    difference = oracle.gae(values, new, gamma, lam) - oracle.gae(values, old, gamma, lam)
    return float(np.abs(critic.shares(9, gamma, lam) * (new - old) - difference).max())


def _group(kind: str, rewards: Sequence[float], settings: AdvantageSettings) -> oracle.Floats:
    if kind == "rloo":
        return oracle.rloo(rewards)
    if kind == "opmd":
        opmd_settings = settings.of("opmd").model_dump()
        return oracle.opmd_advantages(
            rewards, opmd_settings["tau"] if opmd_settings["baseline"] == "logavgexp" else None
        )
    return oracle.grpo(rewards, settings.scale_min if settings.scale == "std" else None)


def _batch(
    positions: Sequence[tuple[int, int]], rewards: Sequence[Sequence[float]], turns: Sequence[Sequence[float | None]]
) -> AdvantageInputs:
    return AdvantageInputs(
        [rewards[group][run] for group, run in positions],
        [1.0] * len(positions),
        [f"{group}/{run}" for group, run in positions],
        [f"task {group}" for group, _ in positions],
        turns,
    )
