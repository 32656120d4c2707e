"""Arms and results of `benchmarks.algorithms`, without heavy imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from headrace_operations.controls.kinds import TRUE, Change
from headrace_statistics.clustered_means import Score

EPISODES = 64
"""Number of episodes that a version plays at a time."""


@dataclass(frozen=True)
class Stage:
    """Training steps with one algorithm and one signal."""

    algorithm: str
    signal: str
    """Name of the signal in `benchmarks._algorithms_users` or `benchmarks._algorithms_corridor`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Trainer settings by dotted name that differ from those of the demo."""
    change: Change = TRUE.change
    """Change of the experiences by a control."""
    share: float = 1.0
    """Share of the steps of a run."""


@dataclass(frozen=True)
class Arm:
    """A kind of run: stages, each of which continues from the version of the stage before."""

    name: str
    stages: tuple[Stage, ...]
    lesson: str = "e-mail"
    """Warm-up of the base, and the task."""
    teacher: str = ""
    """Arm whose last version is the teacher."""
    control_of: str = ""
    """Arm whose signal is randomized in this arm."""
    promised: bool = True
    """Whether the arm must learn; otherwise it is only reported."""


@dataclass(frozen=True)
class Plan:
    """Settings that all runs share."""

    steps: int
    plays: int
    """Number of audit tasks with which the base and a run's last version are scored."""


@dataclass
class RunResult:
    """Result of a run."""

    arm: str
    seed: int
    scores: list[Score]
    steps: int = 0
    episodes: int = 0
    experiences: int = 0
    """Number of trained experiences."""
    health: str | None = None
    """Why training stopped itself."""
    seconds: float = 0.0

    def report(self) -> dict[str, object]:
        return asdict(self)
