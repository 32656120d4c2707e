"""Arms and results of the training runs of `benchmarks.signals`, without heavy imports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from headrace_statistics.clustered_means import Score

ROUND = 64
"""Sessions with one version before the next version is trained."""


@dataclass(frozen=True)
class Arm:
    """A kind of run: the users' feedback, the scorer's rewards, and the trainer's algorithm."""

    name: str
    users: str
    """Name of the users in `_gains_run.USERS`."""
    scorer: Mapping[str, object] = field(default_factory=dict)
    trainer: Mapping[str, object] = field(default_factory=dict)
    """Trainer settings that differ from those of the demo."""
    rounds: int = 0
    """Number of rounds. With 0, the base is scored and nothing is trained."""
    before: int = 0
    """Sessions of the base that only the reward model sees."""
    judged: bool = False
    """Whether a judge that is often wrong also scores each run."""
    traced: int = 0
    """Interval, in rounds, between scored versions. With 0, only the last version is scored."""
    edits_max: int | None = None
    """Number of trained edits after which training ends with the round."""
    sessions: int = ROUND
    """Sessions of a round."""
    lesson: str = "demo"
    """Warm-up of the base, a name of `_gains_run.LESSONS`."""
    held_back: str | None = None
    """Kind of question that is excluded from traffic and used as the guard, whose score must not fall."""
    more_seeds: bool = False
    """Whether further seeds are run (`seeds_of`), because the result is a number of rounds."""
    times: int = 1
    """Multiple of the usual number of plays with which the last version is scored; with 0 it is not scored."""


@dataclass
class Gain:
    """Result of a run."""

    arm: str
    seed: int
    scores: list[Score]
    """Scores of the last version."""
    trace: list[tuple[int, list[Score]]] = field(default_factory=list)
    """Number of trained sessions of a version, with its plays."""
    sessions: int = 0
    """Number of sessions that training used."""
    edits: int = 0
    steps: int = 0
    accepted: list[float] = field(default_factory=list)
    """Share of accepted answers of each round."""
    judged: list[tuple[bool, float]] = field(default_factory=list)
    """Whether a run was accepted, with the reward that the reward model gave it."""
    ordered: list[tuple[bool, float]] = field(default_factory=list)
    """Whether a run was accepted, with the reward model's estimate, for all runs including those for which it
    abstained."""
    measured: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of the algorithm for each step."""
    health: str | None = None
    seconds: float = 0.0

    def report(self) -> dict[str, object]:
        return asdict(self)
