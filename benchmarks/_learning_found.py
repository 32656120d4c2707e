"""Runs as they are asked for, and what comes of them. Nothing heavy is imported here."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from headrace_cli.controls.kinds import Control
from headrace_cli.controls.statistics import Score


@dataclass(frozen=True)
class Plan:
    """What all runs have in common."""

    steps: int
    learning_rate: float
    plays: int
    """Of audit tasks, by which a run's last version is scored."""
    traced: int
    """Versions of a traced run that are scored on the way, evenly; each with `plays` plays."""


@dataclass(frozen=True)
class Arm:
    """A kind of run. With `lag` k a step trains what the version of k steps before has sampled."""

    control: Control
    lag: int = 0
    traced: bool = False
    tried: bool = False
    """The gate judges the last version against the base."""

    @property
    def name(self) -> str:
        return f"lag {self.lag}" if self.lag else self.control.name


@dataclass
class Found:
    """What came of a run."""

    arm: str
    seed: int
    base: list[Score]
    scores: list[Score]
    trace: list[tuple[int, float, list[Score]]] = field(default_factory=list)
    """Step, mean reward that was trained on since the one before, and the plays."""
    steps: int = 0
    health: str | None = None
    trial: dict[str, object] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    """Mean of the rewards that each step was given."""
    effective_sample: float | None = None
    seconds: float = 0.0

    def report(self) -> dict[str, object]:
        return asdict(self)
