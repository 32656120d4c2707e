"""Runs of `benchmarks.signals` that train a model, as they are asked for, and what comes of them. Light to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from headrace_cli.controls.statistics import Score

ROUND = 64
"""Sessions that the users of one version have, before there is another one."""


@dataclass(frozen=True)
class Arm:
    """A kind of run: what users say, who makes a reward of it, and how the trainer learns from that."""

    name: str
    users: str
    """A name of `_gains_run.USERS`."""
    scorer: Mapping[str, object] = field(default_factory=dict)
    trainer: Mapping[str, object] = field(default_factory=dict)
    """On top of what the demo says."""
    rounds: int = 0
    """None: the base is scored, and nothing is trained."""
    before: int = 0
    """Sessions of the base that nobody trains on, but that a reward model has seen."""
    judged: bool = False
    """A judge that is often wrong speaks of each run."""
    traced: int = 0
    """The version after so many rounds is scored, and each so many rounds later. 0: only the last."""
    edits_max: int | None = None
    """Training ends with the round in which so many edits were trained."""
    sessions: int = ROUND
    """Of a round."""
    lesson: str = "demo"
    """What the base was taught, a name of `_gains_run.LESSONS`."""
    held_back: str | None = None
    """Nobody asks questions of this kind, and they are the guard: nothing may be lost there."""
    more_seeds: bool = False
    """It is counted in rounds of how many sessions one needs: `seeds_of` says with which other seeds, too."""
    times: int = 1
    """How often as many plays as usual score the last version; none: it is not scored."""


@dataclass
class Gain:
    """What came of a run."""

    arm: str
    seed: int
    scores: list[Score]
    """Of the last version."""
    trace: list[tuple[int, list[Score]]] = field(default_factory=list)
    """Sessions that a version had learned from, and its plays."""
    sessions: int = 0
    """With which training had to do."""
    edits: int = 0
    steps: int = 0
    accepted: list[float] = field(default_factory=list)
    """Share of the answers that the users of each round accepted."""
    judged: list[tuple[bool, float]] = field(default_factory=list)
    """Whether a run was accepted, and the reward that a reward model gave it."""
    ordered: list[tuple[bool, float]] = field(default_factory=list)
    """Whether a run was accepted, and what the reward model believed of it, of every run: of those also of which it was
    not sure and said nothing."""
    measured: list[Mapping[str, float]] = field(default_factory=list)
    """Of each step, what its algorithm measures."""
    health: str | None = None
    seconds: float = 0.0

    def report(self) -> dict[str, object]:
        return asdict(self)
