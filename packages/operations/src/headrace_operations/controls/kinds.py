"""The controls: each changes the rewards of experiences, or a setting, and says what has to come of it. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from headrace_schemas import Experience

Change = Callable[[Sequence[Experience], random.Random], list[Experience]]
"""Experiences that have a reward, in their order, to what is trained in their place."""
Expected = Literal["better", "same", "not better", "worse", "open"]
"""What the held-out score has to be, beside that of the model that training began with."""
NOTHING = 1e-300
"""A learning rate that is 0 as a float32, so that not even a weight of 0 moves; settings allow no 0."""


@dataclass(frozen=True, slots=True, eq=False)
class Control:
    """One way to train, and what it has to come to."""

    name: str
    shows: str
    """In one line, what it is for."""
    expected: Expected
    otherwise: str
    """What is wrong when it comes out in another way."""
    change: Change
    settings: Mapping[str, object] = field(default_factory=dict)
    """Other settings of the trainer."""


def _true(experiences: Sequence[Experience], _chance: random.Random) -> list[Experience]:
    return list(experiences)


def _shuffled(experiences: Sequence[Experience], chance: random.Random) -> list[Experience]:
    """The very same rewards, each for somebody else's run."""
    rewards = [one.reward for one in experiences]
    return _with(experiences, chance.sample(rewards, len(rewards)))


def _flipped(experiences: Sequence[Experience], _chance: random.Random) -> list[Experience]:
    """The best is the worst; the span of rewards stays."""
    rewards = [one.reward for one in experiences if one.reward is not None]
    ends = min(rewards, default=0.0) + max(rewards, default=0.0)
    return _with(experiences, [ends - reward for reward in rewards])


def _random(experiences: Sequence[Experience], chance: random.Random) -> list[Experience]:
    """Drawn anew for each run from the distribution of all rewards."""
    rewards = [one.reward for one in experiences]
    return _with(experiences, [chance.choice(rewards) for _ in rewards])


def _with(experiences: Sequence[Experience], rewards: Iterable[float | None]) -> list[Experience]:
    pairs = zip(experiences, rewards, strict=True)
    return [one.model_copy(update={"reward": reward}) for one, reward in pairs]


TRUE = Control(
    "true",
    "the rewards as they are: what there is to learn",
    "better",
    "the true reward does not raise the score: it may not mean what the score measures, the recording may be too "
    "short, or the learning rate wrong",
    _true,
)
SHUFFLED = Control(
    "shuffled",
    "the same rewards, dealt to other runs: only their distribution is left",
    "not better",
    "your reward does not carry the learning: dealt to other runs it teaches as well. Look for what else the score "
    "could rise with: tasks in training that are held out too, a score that depends on the order of versions",
    _shuffled,
)
FLIPPED = Control(
    "flipped",
    "the best run is the worst: training that follows the reward has to go down",
    "worse",
    "a reward turned round does not lower the score: training follows something else, or the reward has no sign",
    _flipped,
)
RANDOM = Control(
    "random",
    "rewards drawn by lot from the same distribution",
    "not better",
    "your reward does not carry the learning: rewards drawn by lot teach as well. Look for a score that rises by "
    "itself",
    _random,
)
STILL = Control(
    "learning rate 0",
    "the same steps without an effect: what the measurement itself moves by",
    "same",
    "the score changes though the weights do not: the measurement is not repeatable; use the seed of each play",
    _true,
    {"trainer.optimizer.learning_rate": NOTHING},
)
CONTROLS = (TRUE, SHUFFLED, FLIPPED, RANDOM, STILL)


def alone(source: str) -> Control:
    """What one source of rewards teaches without the others. Runs that it did not score are left out."""

    def change(experiences: Sequence[Experience], _chance: random.Random) -> list[Experience]:
        found = ((one, _part(one, source)) for one in experiences)
        return [one.model_copy(update={"reward": value}) for one, value in found if value is not None]

    return Control(
        f"{source} alone",
        f"what {source} teaches when nothing else is rewarded",
        "open",
        f"{source} alone lowers the score: it pays for something that the score does not value. Lower its weight, or "
        "mend it",
        change,
    )


def sources_of(experiences: Iterable[Experience]) -> list[str]:
    """Who has rewarded them, by name."""
    return sorted({part.source for one in experiences for part in one.parts})


def _part(experience: Experience, source: str) -> float | None:
    return next((part.value for part in experience.parts if part.source == source), None)
