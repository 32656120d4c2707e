"""Our advantages beside the oracle's: how far the furthest one is off."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace_runtime.settings import complete
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
    places = [(group, run) for group, several in enumerate(rewards) for run in range(len(several))]
    generator.shuffle(places)
    batch = _batch(places, rewards, [() for _ in places])
    chosen = Settings.model_validate({"kind": kind, **settings})
    found, _ = chosen.estimator.compute(batch, Baselines(), DECAY, chosen)
    expected = [_group(kind, several, chosen) for several in rewards]
    pairs = zip(found.values_B, places, strict=True)
    return float(max(abs(value - expected[group][run]) for value, (group, run) in pairs))


def of_turns(seed: int, *, norm: bool = False, weight: float = 1.0, decay: float = 1.0) -> float:
    """One group of four runs with one to five turns, of which some have no reward."""
    generator = np.random.default_rng(seed)
    rewards = list(generator.normal(0, 1, 4))
    turns = [
        [None if generator.random() < 0.3 else float(generator.normal()) for _ in range(int(generator.integers(1, 6)))]
        for _ in rewards
    ]
    own = {"step_norm": norm, "turn_weight": weight, "turn_decay": decay}
    chosen = Settings.model_validate({"kind": "step_wise_grpo", "step_wise_grpo": own})
    batch = _batch([(0, run) for run in range(4)], [rewards], turns)
    found, _ = chosen.estimator.compute(batch, Baselines(), DECAY, chosen)
    credit = chosen.estimator.credit
    assert credit is not None
    ours = [
        credit(found.values_B[run], turns[run], found.turn_baselines_B[run], found.turn_scales_B[run], chosen)
        for run in range(4)
    ]
    theirs = oracle.step_wise(rewards, turns, norm=norm, weight=weight, decay=decay)
    return max(float(np.abs(np.array(one) - other).max()) for one, other in zip(ours, theirs, strict=True))


def of_a_critic(seed: int, gamma: float, lam: float) -> float:
    """GAE beside the sum that it stands for."""
    generator = np.random.default_rng(seed)
    values, reward = generator.normal(0, 1, 12), float(generator.normal())
    found, returns = critic.gae(values, reward, gamma, lam)
    expected = oracle.gae(values, reward, gamma, lam)
    return float(max(np.abs(found - expected).max(), np.abs(returns - expected - values).max()))


def of_a_revised_reward(seed: int, gamma: float, lam: float) -> float:
    """What a correction adds is the difference of the two advantages, whatever the critic says."""
    generator = np.random.default_rng(seed)
    values, old, new = generator.normal(0, 1, 9), 0.25, -1.5
    difference = oracle.gae(values, new, gamma, lam) - oracle.gae(values, old, gamma, lam)
    return float(np.abs(critic.shares(9, gamma, lam) * (new - old) - difference).max())


def _group(kind: str, rewards: Sequence[float], settings: AdvantageSettings) -> oracle.Floats:
    if kind == "rloo":
        return oracle.rloo(rewards)
    if kind == "opmd":
        own = settings.of("opmd").model_dump()
        return oracle.opmd_advantages(rewards, own["tau"] if own["baseline"] == "logavgexp" else None)
    return oracle.grpo(rewards, settings.scale_min if settings.scale == "std" else None)


def _batch(
    places: Sequence[tuple[int, int]], rewards: Sequence[Sequence[float]], turns: Sequence[Sequence[float | None]]
) -> AdvantageInputs:
    return AdvantageInputs(
        [rewards[group][run] for group, run in places],
        [1.0] * len(places),
        [f"{group}/{run}" for group, run in places],
        [f"task {group}" for group, _ in places],
        turns,
    )
