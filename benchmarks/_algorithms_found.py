"""Runs of `make bench-algorithms` as they are asked for, and what comes of them. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from headrace_cli.controls.kinds import TRUE, Change
from headrace_cli.controls.statistics import Score

EPISODES = 64
"""Played at a time, by one version."""


@dataclass(frozen=True)
class Stage:
    """Steps of one algorithm from one signal."""

    algorithm: str
    signal: str
    """What users say, by its name in `benchmarks._algorithms_users` or `benchmarks._algorithms_corridor`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Of the trainer, by their dotted names, beside those of the demo."""
    change: Change = TRUE.change
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
