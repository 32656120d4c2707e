"""Arms and results of the training runs of `benchmarks.signals`, without heavy imports.

An arm trains a model with one kind of user feedback.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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
    """Trainer settings that differ from the demo's."""
    rounds: int = 0
    """Number of rounds. With 0, the base is scored and nothing is trained."""
    before: int = 0
    """Number of sessions with the base that are used for the reward model alone."""
    judged: bool = False
    """Whether a judge that is often wrong scores each run as well."""
    traced: int = 0
    """Interval, in rounds, between scored versions. With 0, only the last version is scored."""
    edits_max: int | None = None
    """Number of trained edits after which training ends with the round."""
    sessions: int = ROUND
    """Number of sessions in a round."""
    lesson: str = "demo"
    """Warm-up of the base, a name of `_gains_run.LESSONS`."""
    held_back: str | None = None
    """Kind of question that is excluded from traffic; its score is the guard, which must not fall."""
    more_seeds: bool = False
    """Whether further seeds are run (`seeds_of`), for arms whose result is a number of rounds."""
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
    """Number of sessions trained so far, with the scores of that version."""
    sessions: int = 0
    """Number of sessions that training used."""
    edits: int = 0
    steps: int = 0
    accepted: list[float] = field(default_factory=list)
    """Share of accepted answers of each round."""
    judged: list[tuple[bool, float]] = field(default_factory=list)
    """Whether each run was accepted, with the reward from the reward model."""
    ordered: list[tuple[bool, float]] = field(default_factory=list)
    """Whether each run was accepted, with the reward model's estimate, including runs for which it abstained."""
    measured: list[Mapping[str, float]] = field(default_factory=list)
    """Metrics of the algorithm for each step."""
    health: str | None = None
    seconds: float = 0.0

    def report(self) -> dict[str, object]:
        return asdict(self)


BASE, EXPLICIT, SFT, DPO = "base", "explicit feedback", "edits, sft", "edits, dpo"
FEW, POISONED, NATURAL = "few thumbs", "few thumbs, poisoned", "natural signals"
DIRECTED_BASE, TYPED, BINARY = "base that reads replies", "typed corrections", "binary rewards"
BY_TOKEN = "typed corrections, by token"
RIVALS = {BINARY: (32, 8), "binary rewards, batches of 8": (8, 6), "binary rewards, batches of 16": (16, 3)}
"""Arms with binary rewards: batch size and number of batches. Any of them may need the fewest sessions."""
EDITS = 200
GUARD = "mail_count"
"""Kind of question that users do not ask in arms with typed corrections."""
PAPERS = {
    TYPED: "arXiv:2601.20802, abstract: at test time, on hard tasks with a binary reward, as likely to find an answer "
    "as best-of-k and several turns are, with a third of the attempts"
}
"""Comparable published results, which the report shows next to ours."""
_THUMBS = {
    "functions": ["signals"],
    "weights": {"function:*": 0.0, "judge:*": 0.0, "*": 1.0},
    "learned": {"model": "thumbs", "width_max": 1.0},
}
_SIGNALS = {"functions": ["signals"], "weights": {"*": 1.0}}
_EXPLICIT = {"weights": {"*": 1.0}}
_HINDSIGHT = {"algorithm": "hindsight", "batch_experiences": 32}
_CAREFUL = {**_HINDSIGHT, "optimizer": {"learning_rate": 1e-4}, "health": {"guard_drop_max": 0.01}}
"""Lower learning rate and a guard of a hundredth of a nat. With the demo's learning rate, answers are best after a few
steps and then get worse."""
_DISTRIBUTIONS = {
    **_CAREFUL,
    "advantage": {"kind": "hindsight", "hindsight": {"compared": "distributions"}},
    "batch_experiences": 8,
    "loss": {"updates_per_step": 3},
}
"""A teacher's full distribution has little noise, so that several updates of a batch of 8 are enough. While its gap is
not significantly positive, training waits for the next batch."""


def _edits_arm(name: str, algorithm: str) -> Arm:
    trainer = {"algorithm": algorithm, "batch_experiences": 8}
    return Arm(name, "edits", trainer=trainer, rounds=12, sessions=32, edits_max=EDITS, traced=1)


def _converged_arm(
    name: str, users: str, scorer: Mapping[str, object], *, before: int = 0, judged: bool = False
) -> Arm:
    """Return an arm with enough rounds for learning to converge.

    Signals of different noise are compared there: full labels gain most in a third of these rounds, while a noisy
    reward needs more runs to reach the same result.
    """
    return Arm(name, users, scorer, rounds=60, before=before, judged=judged, traced=20, times=3)


def _typed_arm(name: str, users: str, scorer: Mapping[str, object], trainer: Mapping[str, Any], *, rounds: int) -> Arm:
    """Return an arm whose rounds have one batch, so that the number of needed sessions can be counted.

    Small batches decide the comparison, and few seeds would leave it to chance.
    """
    batch = trainer["batch_experiences"]
    return Arm(
        name, users, scorer, trainer, rounds=rounds, sessions=batch, lesson="directed", held_back=GUARD, times=3,
        traced=1, more_seeds=batch < 32,
    )  # fmt: skip


def _gap_arm(base: str, users: str, lesson: str) -> Arm:
    trainer = {**_HINDSIGHT, "batch_experiences": 64}
    return Arm(f"gap, {base}, {users}", users, _SIGNALS, trainer, rounds=1, lesson=lesson, times=0)


HAS_A_GAP = _gap_arm(DIRECTED_BASE, "directions", "directed")
HAS_NONE = (
    _gap_arm(DIRECTED_BASE, "nothing but no", "directed"),
    _gap_arm(BASE, "directions", "demo"),
    _gap_arm(BASE, "nothing but no", "demo"),
)
MISLED = _gap_arm(DIRECTED_BASE, "directions of others", "directed")
"""Arm with replies that belong to other runs. The gap cannot detect it, as docs/algorithms.md states: the model follows
wrong replies. Guard and gate are meant to detect it, so it is reported without a line."""
ARMS = {
    arm.name: arm
    for arm in (
        Arm(BASE, "rewards", times=3),
        _converged_arm(EXPLICIT, "rewards", _EXPLICIT),
        _edits_arm(SFT, "sft"),
        _edits_arm(DPO, "dpo"),
        Arm(NATURAL, "corrections", _SIGNALS, rounds=20),
        _converged_arm(FEW, "few thumbs", _THUMBS, before=2720, judged=True),
        _converged_arm(POISONED, "few thumbs, poisoned", _THUMBS, before=2720, judged=True),
        Arm(DIRECTED_BASE, "rewards", lesson="directed", more_seeds=True, times=3),
        _typed_arm(TYPED, "directions", _SIGNALS, _DISTRIBUTIONS, rounds=6),
        _typed_arm(BY_TOKEN, "directions", _SIGNALS, _CAREFUL, rounds=15),
        *(
            _typed_arm(name, "rewards", _EXPLICIT, {"batch_experiences": size}, rounds=rounds)
            for name, (size, rounds) in RIVALS.items()
        ),
        HAS_A_GAP,
        *HAS_NONE,
        MISLED,
    )
}  # fmt: skip
