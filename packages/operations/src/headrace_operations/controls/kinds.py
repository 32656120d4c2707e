"""The control experiments. Each changes the rewards or a setting and has an expected result. Pure functions."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import StatisticsError, correlation
from typing import Literal

from headrace_schemas import Experience

Change = Callable[[Sequence[Experience], random.Random], list[Experience]]
"""Function that returns the experiences to train in place of the recorded ones, which are in order."""
Expected = Literal["better", "same", "not better", "worse", "open"]
"""Expected change of the held-out score, compared with the model before training."""
Rewards = list[float | None]
"""Rewards of the experiences, in their order; None for an experience without one."""
ZERO_RATE = 1e-300
"""Learning rate that is 0 as a float32, so that not even a zero weight changes; settings must be positive."""
DRAWS = 64
"""Number of draws from which a control with meaningless rewards takes the one that says least about the runs."""


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
    return _replace_rewards(experiences, _draw_meaningless(experiences, lambda: chance.sample(rewards, len(rewards))))


def _flip_rewards(experiences: Sequence[Experience], _chance: random.Random) -> list[Experience]:
    """Return the experiences with rewards mirrored within their range, so that the best run becomes the worst."""
    rewards = [experience.reward for experience in experiences if experience.reward is not None]
    ends = min(rewards, default=0.0) + max(rewards, default=0.0)
    return _replace_rewards(experiences, [ends - reward for reward in rewards])


def _draw_rewards(experiences: Sequence[Experience], chance: random.Random) -> list[Experience]:
    """Return the experiences with the reward of each replaced by a random one of all rewards."""
    rewards = [experience.reward for experience in experiences]
    return _replace_rewards(
        experiences, _draw_meaningless(experiences, lambda: [chance.choice(rewards) for _ in rewards])
    )


def _draw_meaningless(experiences: Sequence[Experience], draw: Callable[[], Rewards]) -> Rewards:
    """Return the one of `DRAWS` draws of rewards that is least correlated with the runs.

    A single draw for a hundred runs has a correlation of about 0.1 with the true rewards, or with the lengths of the
    answers, by chance. That is enough to teach: AdamW moves the weights as far for a weak gradient as for a strong one.
    Rerandomisation (Morgan and Rubin, 2012, "Rerandomization to improve covariate balance in experiments") removes this
    cause of a difference between controls.
    """
    true_rewards = [experience.reward for experience in experiences]
    lengths = [_log_length(experience) for experience in experiences]
    draws = [draw() for _ in range(DRAWS)]
    return min(
        draws, key=lambda rewards: _correlation(rewards, true_rewards) ** 2 + _correlation(rewards, lengths) ** 2
    )


def _log_length(experience: Experience) -> float | None:
    """Return the logarithm of the number of generated tokens, or None for a withdrawn experience."""
    if experience.branch is None:
        return None
    return math.log(sum(len(span.logprobs) for span in experience.branch.spans))


def _correlation(first: Sequence[float | None], second: Sequence[float | None]) -> float:
    """Return the correlation of two series where both have a value, and 1 where it is undefined.

    A draw of equal rewards would train nothing, so it must not count as the least correlated one.
    """
    pairs = [(x, y) for x, y in zip(first, second, strict=True) if x is not None and y is not None]
    try:
        return correlation([x for x, _ in pairs], [y for _, y in pairs])
    except StatisticsError:
        return 1.0


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
