"""The control experiments. Each changes the rewards or a setting and has an expected result. Pure functions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace_schemas import Experience

Change = Callable[[Sequence[Experience], random.Random], list[Experience]]
"""Function that returns the experiences to train in place of the recorded ones, which are in order."""
Expected = Literal["better", "same", "not better", "worse", "open"]
"""Expected change of the held-out score, compared with the model before training."""
ZERO_RATE = 1e-300
"""Learning rate that is 0 as a float32, so that not even a zero weight changes; settings must be positive."""


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """A control experiment and its expected result."""

    name: str
    shows: str
    """Purpose of the control, in one line."""
    expected: Expected
    otherwise: str
    """Explanation of another result than the expected one."""
    change: Change
    settings: Mapping[str, object] = field(default_factory=dict)
    """Changed settings of the trainer."""


def _keep_rewards(experiences: Sequence[Experience], _chance: random.Random) -> list[Experience]:
    return list(experiences)


def _shuffle_rewards(experiences: Sequence[Experience], chance: random.Random) -> list[Experience]:
    """Return the experiences with their rewards exchanged at random among the runs."""
    rewards = [experience.reward for experience in experiences]
    return _replace_rewards(experiences, chance.sample(rewards, len(rewards)))


def _flip_rewards(experiences: Sequence[Experience], _chance: random.Random) -> list[Experience]:
    """Return the experiences with rewards mirrored within their range, so that the best run becomes the worst."""
    rewards = [experience.reward for experience in experiences if experience.reward is not None]
    ends = min(rewards, default=0.0) + max(rewards, default=0.0)
    return _replace_rewards(experiences, [ends - reward for reward in rewards])


def _draw_rewards(experiences: Sequence[Experience], chance: random.Random) -> list[Experience]:
    """Return the experiences with the reward of each replaced by a random one of all rewards, without information."""
    rewards = [experience.reward for experience in experiences]
    return _replace_rewards(experiences, [chance.choice(rewards) for _ in rewards])


def _replace_rewards(experiences: Sequence[Experience], rewards: Iterable[float | None]) -> list[Experience]:
    pairs = zip(experiences, rewards, strict=True)
    return [experience.model_copy(update={"reward": reward}) for experience, reward in pairs]


TRUE = Control(
    "true",
    "the unchanged rewards: what training can learn",
    "better",
    "the true reward does not raise the score: it may not mean what the score measures, the recording may be too "
    "short, or the learning rate wrong",
    _keep_rewards,
)
SHUFFLED = Control(
    "shuffled",
    "the same rewards, given to other runs: only their distribution remains",
    "not better",
    "the reward does not cause the learning: given to other runs it raises the score as well. Look for another cause "
    "of a rising score: training tasks that are also held out, a score that depends on the order of versions, or steps "
    "so large that their noise makes a model surer (then the base scores as high at temperature 0, and a lower "
    "trainer.optimizer.learning_rate helps)",
    _shuffle_rewards,
)
FLIPPED = Control(
    "flipped",
    "the best run gets the worst reward: training that follows the reward must lower the score",
    "worse",
    "the mirrored reward does not lower the score: training follows something else, or the reward has no direction",
    _flip_rewards,
)
RANDOM = Control(
    "random",
    "rewards drawn at random from the same distribution",
    "not better",
    "the reward does not cause the learning: random rewards raise the score as well. Look for a score that rises by "
    "itself",
    _draw_rewards,
)
STILL = Control(
    "learning rate 0",
    "the same steps without an effect: the variation of the measurement",
    "same",
    "the score changes although the weights do not: the measurement is not repeatable; use the seed of each play",
    _keep_rewards,
    {"trainer.optimizer.learning_rate": ZERO_RATE},
)
CONTROLS = (TRUE, SHUFFLED, FLIPPED, RANDOM, STILL)


def only_source(source: str) -> Control:
    """Return the control experiment that trains with the rewards of one source.

    Runs without its reward are left out.
    """

    def change(experiences: Sequence[Experience], _chance: random.Random) -> list[Experience]:
        scored = ((experience, _source_reward(experience, source)) for experience in experiences)
        return [experience.model_copy(update={"reward": value}) for experience, value in scored if value is not None]

    return Control(
        f"{source} alone",
        f"training with {source} alone",
        "open",
        f"{source} alone lowers the score: it pays for behaviour that the score does not value. Lower its weight, or "
        "correct it",
        change,
    )


def reward_sources(experiences: Iterable[Experience]) -> list[str]:
    """Return the names of all sources that contributed to the rewards of the experiences, sorted."""
    return sorted({part.source for experience in experiences for part in experience.parts})


def _source_reward(experience: Experience, source: str) -> float | None:
    return next((part.value for part in experience.parts if part.source == source), None)
