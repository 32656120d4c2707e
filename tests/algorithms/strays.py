"""One reward in another unit among usual ones: how much of its speed learning loses, for each kind of advantage.

A stream of runs goes through the trainer's own preparation of batches, once as it is and once with a stray value in a
single run. Compared are two sums over the next 500 runs: of |advantage|, and of the advantage with the sign that the
answer deserves, which also counts right answers that are pushed down. With `ppo` the trainer's critic makes the
advantages of tokens.
"""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, cast

import torch
from torch import Tensor

from headrace_runtime.settings.sections import complete
from headrace_schemas import Experience, RewardPart
from headrace_schemas.events.trajectory import TurnReward
from headrace_trainer.algorithms.baselines import Decay
from headrace_trainer.algorithms.settings import AdvantageSettings, CriticSettings
from headrace_trainer.batches.prepare import prepare
from headrace_trainer.experiences.admission import CORRECTION_MIN, AdmissionLimits
from headrace_trainer.experiences.examples import CorrectionRules
from headrace_trainer.experiences.state import LineageState
from headrace_trainer.settings import MemorySettings
from headrace_trainer.torch_learner.token_advantages import Critic
from tests.unit.trainer.test_history import chain, name
from tests.unit.trainer.world import START, experience

Settings = complete(AdvantageSettings)
DECAY = Decay(task=0.9, model=0.99, tasks_max=100)
BATCH, GROUP, TASKS, WARM, RUNS = 32, 4, 12, 192, 500
STRAYS = (10.0, 100.0, 1e4, 1e6)
LOSS_MAX = 0.1
ADAPTED_MAX = 128.0
"""Runs after which a source in another unit is learned from as fast as before."""
FLATTENED_MAX = 0.005
"""Share of honest rewards that may be winsorised, however heavy their tails are."""
SEED_OF_GROUPS = 0
"""Seed of a stream in which the stray's group has right answers."""
PLAIN: dict[str, Any] = {"stray_factor": 0.0}
"""Settings of the planted fault: no winsorised rewards, and the plain deviation."""
ESTIMATORS: dict[str, dict[str, Any]] = {
    "reinforce++": {},
    "reinforce++, scale none": {"scale": "none"},
    "grpo": {"kind": "grpo"},
    "dr_grpo": {"kind": "grpo", "scale": "none"},
    "rloo": {"kind": "rloo"},
    "opmd, mean": {"kind": "opmd"},
    "opmd, logavgexp": {"kind": "opmd", "opmd": {"baseline": "logavgexp", "tau": 0.5}},
    "step_wise_grpo": {"kind": "step_wise_grpo"},
    "ppo": {"kind": "ppo"},
}
"""Settings of `[trainer.advantage]` by line; `ppo` is the kind of advantage that goes to the critic."""


@dataclass(frozen=True)
class Run:
    """One run of the stream."""

    task: int
    reward: float
    source: str = "feedback"


@dataclass
class Trained:
    """Result of training on a stream."""

    advantages: list[float] = field(default_factory=list)
    """Mean advantage of each run over its tokens or turns."""
    rewards: list[float] = field(default_factory=list)
    """Rewards as they were compared."""
    digests: list[str] = field(default_factory=list)
    state: LineageState | None = None


def binary(seed: int, share: float, count: int = WARM + RUNS + BATCH) -> list[Run]:
    """Return runs in groups of four of one task, with rewards of 0 and 1."""
    draw = random.Random(seed)
    return [Run(number // GROUP % TASKS, float(draw.random() < share)) for number in range(count)]


def replaced(runs: Sequence[Run], position: int, value: float) -> list[Run]:
    """Return `runs` with another reward in one place."""
    return [Run(run.task, value, run.source) if number == position else run for number, run in enumerate(runs)]


def train(runs: Sequence[Run], batch: int = BATCH, **settings: Any) -> Trained:
    """Train a stream in batches, as a lineage does."""
    chosen = Settings.model_validate({**settings, "kind": settings.get("kind", "reinforce++")})
    critic = _StandInCritic() if chosen.kind == "ppo" else None
    terms = CorrectionRules(chosen.limit, CORRECTION_MIN, credit=_credit(chosen))
    limits = AdmissionLimits(320, 99, 2, 1e6, chosen.limit, CORRECTION_MIN, correction_rules=terms,
                             ranges=chosen.range_limits)  # fmt: skip
    trained = Trained(state=LineageState(chain(0), limits, MemorySettings()))
    state = trained.state
    assert state is not None
    for first in range(0, len(runs), batch):
        for number, run in enumerate(runs[first : first + batch], first):
            state.admit(event(number, run), (0, number), START)
        prepared = prepare(state.waiting, state, chosen, DECAY)
        trained.digests.append(prepared.batch.digest())
        rows = {item.waiting.experience.experience_id: item for item in prepared.trained}
        values = [rows[f"e{number}"] for number in range(first, first + len(rows))]
        trained.rewards += [item.waiting.experience.reward or 0.0 for item in values]
        if critic is not None:
            trained.advantages += critic.step([item.advantage for item in values])
        else:
            trained.advantages += [fmean(item.turns) if item.turns else item.advantage for item in values]
        state.record_step(prepared.trained, prepared.baselines)
    return trained


def event(number: int, run: Run) -> Experience:
    """Return the experience of a run. Its source is named, and its only turn has the same reward."""
    plain = experience(number, name(0), run.reward, task=f"task {run.task}", run=f"r{number}")
    part = RewardPart(source=run.source, value=run.reward, weight=1.0)
    turns = tuple(TurnReward(turn_id=turn_id, value=run.reward) for turn_id in plain.turn_ids)
    return plain.model_copy(update={"parts": (part,), "turn_rewards": turns})


def speed_lost(label: str, stray: float, seed: int, share: float, position: int = WARM + 5, **more: Any) -> float:
    """Return the share of its speed that learning loses over the 500 runs after the stray, by the worse of the two
    sums."""
    runs = binary(seed, share)
    settings = {**ESTIMATORS[label], **more}
    usual, disturbed = train(runs, **settings), train(replaced(runs, position, stray), **settings)
    after = range(position + 1, position + 1 + RUNS)
    sides = [1.0 if run.reward > 0.5 else -1.0 for run in runs]
    sizes = [math.fsum(abs(outcome.advantages[number]) for number in after) for outcome in (usual, disturbed)]
    signed = [
        math.fsum(outcome.advantages[number] * sides[number] for number in after) for outcome in (usual, disturbed)
    ]
    return max(1 - now / before for before, now in (sizes, signed))


def pushed_down(label: str, stray: float, seed: int, position: int = WARM + 5, **more: Any) -> float:
    """Return how many right answers of the stray's batch have a negative advantage with the stray, but not without."""
    runs = binary(seed, 0.5)[: (position // BATCH + 1) * BATCH]
    settings = {**ESTIMATORS[label], **more}
    usual, disturbed = train(runs, **settings).advantages, train(replaced(runs, position, stray), **settings).advantages
    return float(
        sum(
            disturbed[number] < -1e-9 <= usual[number]
            for number in range(position // BATCH * BATCH, len(runs))
            if number != position and runs[number].reward > 0.5
        )
    )


def every(seeds: Sequence[int], strays: Sequence[float] = STRAYS, **more: Any) -> Iterator[tuple[str, float]]:
    """Yield the largest loss of speed for each estimator, over values, seeds and shares of right answers."""
    for label in ESTIMATORS:
        shares = (0.5, 0.2, 0.85)
        yield (
            label,
            max(
                speed_lost(label, stray, seed, shares[seed % len(shares)], **more) for stray in strays for seed in seeds
            ),
        )


def unnamed(seed: int) -> int:
    """Return how many strays the trainer does not report with their source and value."""
    missing = 0
    for stray in STRAYS:
        trained = train(replaced(binary(seed, 0.5), WARM + 5, stray))
        assert trained.state is not None
        text = "; ".join(map(str, trained.state.baselines.ranges.strays))
        missing += "feedback = " + f"{stray:g}:" not in text
    return missing


def runs_to_adapt(seed: int, before: float, after: float) -> int:
    """Return after how many runs of a source in another unit the mean |advantage| stays within 25 % of that of a
    stream that always used this unit. Means are over 64 runs."""
    runs = binary(seed, 0.5, WARM + 640)
    changed = [Run(run.task, run.reward * (before if number < WARM else after)) for number, run in enumerate(runs)]
    always = [Run(run.task, run.reward * after) for run in runs]
    changed_advantages, constant_advantages = train(changed).advantages[WARM:], train(always).advantages[WARM:]
    wrong = [
        start
        for start in range(len(changed_advantages) - 64)
        if not 0.75
        <= sum(map(abs, changed_advantages[start : start + 64]))
        / sum(map(abs, constant_advantages[start : start + 64]))
        <= 1.25
    ]
    return wrong[-1] + 1 if wrong else 0


HEAVY: dict[str, Callable[[random.Random], float]] = {
    "normal": lambda draw: draw.gauss(0, 1),
    "lognormal": lambda draw: draw.lognormvariate(0, 1),
    "Pareto, index 2": lambda draw: draw.paretovariate(2),
    "Student, 3 degrees of freedom": lambda draw: draw.gauss(0, 1) / math.sqrt(draw.gammavariate(1.5, 2) / 3),
    "Laplace": lambda draw: draw.expovariate(1) - draw.expovariate(1),
    "1 in 100": lambda draw: float(draw.random() < 0.01),
    "99 in 100": lambda draw: float(draw.random() < 0.99),
    "0, 1 and seldom 5": lambda draw: 5.0 if draw.random() < 0.1 else float(draw.random() < 0.5),
    "scores of 60 to 100": lambda draw: float(draw.randint(60, 100)),
}
"""Honest rewards by the name of their distribution."""


def flattened(kind: str, seed: int, count: int = 4000, **settings: Any) -> float:
    """Return the share of honest rewards that were winsorised."""
    draw = random.Random(seed)
    runs = [Run(number % TASKS, HEAVY[kind](draw)) for number in range(count)]
    return sum(reward != run.reward for reward, run in zip(train(runs, **settings).rewards, runs, strict=True)) / count


@dataclass(frozen=True)
class _Tokens:
    """The parts of a pack that the critic reads."""

    names: tuple[str, ...]
    row_N: Tensor  # noqa: N815
    advantage_N: Tensor  # noqa: N815
    targets_N: Tensor  # noqa: N815
    hidden_NH: Tensor  # noqa: N815


class _StandInCritic:
    """The trainer's critic, on hidden states that are drawn at random for four tokens of each run."""

    _TOKENS, _WIDTH = 4, 8

    def __init__(self) -> None:
        self._critic = Critic(self._WIDTH, CriticSettings(), torch.device("cpu"))
        self._draw = torch.Generator().manual_seed(0)

    def step(self, rewards: Sequence[float]) -> list[float]:
        """Return the mean advantage of each run's tokens; then the critic learns from the batch."""
        tokens = self._TOKENS * len(rewards)
        rewards_N = torch.tensor([value for value in rewards for _ in range(self._TOKENS)], dtype=torch.float64)
        pack = _Tokens(
            names=tuple(map(str, range(len(rewards)))),
            row_N=torch.arange(tokens) // self._TOKENS,
            advantage_N=rewards_N,
            targets_N=torch.zeros(tokens, dtype=torch.long),
            hidden_NH=torch.randn(tokens, self._WIDTH, generator=self._draw),
        )
        ((values,), _) = self._critic.estimate(cast(Any, _HiddenStates()), cast(Any, [pack]), [], threading.Event())
        self._critic.learn()
        return [float(value) for value in values.advantage_N.reshape(len(rewards), self._TOKENS).mean(1)]


class _HiddenStates:
    """Policy whose hidden states are in the pack."""

    def hidden_states(self, pack: _Tokens) -> Tensor:
        return pack.hidden_NH


def _credit(settings: AdvantageSettings) -> Any:
    credit = settings.estimator.credit
    return None if credit is None else lambda example, turns, base, scale: credit(example, turns, base, scale, settings)
