"""Runs of `make bench-algorithms` as they are asked for, and what comes of them. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from random import Random

from headrace_cli.controls.statistics import Score
from headrace_schemas import Experience

EPISODES = 64
"""Played at a time, by one version."""
Change = Callable[[Sequence[Experience], Random], list[Experience]]
"""What users said to what is trained in its place."""


def as_said(experiences: Sequence[Experience], _chance: Random) -> list[Experience]:
    """Nothing is changed."""
    return list(experiences)


@dataclass(frozen=True)
class Stage:
    """Steps of one algorithm from one signal."""

    algorithm: str
    signal: str
    """What users say, by its name in `benchmarks._algorithms_users` or `benchmarks._algorithms_corridor`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the trainer, by their dotted names, beside those of the demo."""
    change: Change = as_said
    """What a control makes of the experiences."""
    share: float = 1.0
    """Of the steps of a run."""


@dataclass(frozen=True)
class Arm:
    """A kind of run: one stage after the other, each from what the one before has made."""

    name: str
    stages: tuple[Stage, ...]
    lesson: str = "e-mail"
    """What its base was taught, and what is played."""
    teacher: str = ""
    """The arm whose last version teaches."""
    control_of: str = ""
    """The arm whose signal is dealt out by lot here."""
    promised: bool = True
    """Whether it has to learn; without, it is shown beside others."""


@dataclass(frozen=True)
class Plan:
    """What all runs have in common."""

    steps: int
    plays: int
    """Of audit tasks, by which the base and a run's last version are scored."""


@dataclass
class Found:
    """What came of a run."""

    arm: str
    seed: int
    scores: list[Score]
    steps: int = 0
    episodes: int = 0
    experiences: int = 0
    """That were trained."""
    health: str | None = None
    """Why training has stopped itself."""
    seconds: float = 0.0

    def report(self) -> dict[str, object]:
        return asdict(self)
