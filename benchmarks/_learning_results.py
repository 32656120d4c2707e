"""Arms and results of `benchmarks.learning`, without heavy imports."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

from headrace_operations.controls.kinds import Control
from headrace_statistics.clustered_means import Score


@dataclass(frozen=True)
class Plan:
    """Settings that all runs share."""

    steps: int
    learning_rate: float
    plays: int
    """Number of audit tasks for each score."""
    traced: int
    """Number of intermediate versions of a traced run that are scored, evenly spaced, each with `plays` plays."""


@dataclass(frozen=True)
class Arm:
    """A kind of run. With `lag` k, a step trains on samples of the version of k steps before."""

    control: Control
    lag: int = 0
    traced: bool = False
    runs_gate: bool = False
    """Whether the gate compares the last version with the base."""

    @property
    def name(self) -> str:
        return f"lag {self.lag}" if self.lag else self.control.name


@dataclass
class RunResult:
    """Result of a run."""

    arm: str
    seed: int
    base: list[Score]
    scores: list[Score]
    trace: list[tuple[int, float, list[Score]]] = field(default_factory=list)
    """Step, mean reward trained on since the previous entry, and the plays."""
    steps: int = 0
    health: str | None = None
    trial: dict[str, object] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    effective_sample: float | None = None
    seconds: float = 0.0

    def report(self) -> dict[str, object]:
        return asdict(self)
