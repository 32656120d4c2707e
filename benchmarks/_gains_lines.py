"""Arms, results and acceptance lines of the training runs of `benchmarks.signals`, without heavy imports.

An arm trains a model with one kind of user feedback.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks._learning_lines import Line
from benchmarks._run_processes import auroc
from headrace_statistics import intervals
from headrace_statistics.intervals import Score

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


POINTS_MIN, EDITS_MAX, SESSIONS_MAX = 0.15, EDITS, 500
FEW_SHARE_MIN, NATURAL_SHARE_MIN, POISON_COST_MAX, GUARD_LOSS_MAX = 0.7, 0.5, 0.05, 0.01
OF_BINARY_MAX, RIGHT_SIGN_MIN, AUROC_MIN = 0.5, 0.9, 0.8
_BASES = dict.fromkeys((DIRECTED_BASE, TYPED, BY_TOKEN, *RIVALS), DIRECTED_BASE)


@dataclass(frozen=True, slots=True)
class Figure:
    """Mean over seeds with the 95 % interval of Student's t, which is infinite for one seed."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def reach(self) -> float:
        return intervals.mean_margin(self.values, 0.975)

    def report(self) -> dict[str, object]:
        low, high = (round(bound, 4) for bound in (self.mean - self.reach, self.mean + self.reach))
        by_seed = [round(value, 4) for value in self.values]
        return {"mean": round(self.mean, 4), "low": low, "high": high, "by_seed": by_seed}


class Gains:
    """Run results by arm and seed. Compared runs have played the same audit tasks with the same seeds."""

    def __init__(self, runs: Iterable[Gain]) -> None:
        self.arms: dict[str, list[Gain]] = {}
        for result in sorted(runs, key=lambda run: run.seed):
            self.arms.setdefault(result.arm, []).append(result)

    def has(self, *names: str) -> bool:
        return all(name in self.arms for name in names)

    def score(self, arm: str) -> Figure:
        return Figure(tuple(_mean(run.scores) for run in self.arms[arm]))

    def gain(self, arm: str, kind: str = "") -> Figure:
        """Return the gain over the base, on all tasks or on tasks of one `kind`."""
        return Figure(tuple(_mean_difference(run.scores, base, kind) for run, base in self._with_base(arm)))

    def after(self, arm: str) -> list[tuple[int, Figure]]:
        """Return, for each number of trained sessions that all seeds have reached, the gain over the base."""
        gains = []
        for traced in zip(*([run.trace for run in self.arms[arm]]), strict=False):
            pairs = zip(traced, self._with_base(arm), strict=True)
            gains.append(
                (traced[0][0], Figure(tuple(_mean_difference(plays, base, "") for (_, plays), (_, base) in pairs)))
            )
        return gains

    def sessions_to(self, arm: str, points: float) -> float:
        """Return the number of sessions after which the mean gain reaches `points`, or infinity."""
        return next((float(sessions) for sessions, gain in self.after(arm) if gain.mean >= points), math.inf)

    def aurocs(self, arm: str, *, paid: bool = False) -> Figure:
        """Return the AUROC of the reward model's estimates of all runs, or of the rewards that it gave if `paid`."""
        runs = [run.judged if paid else run.ordered for run in self.arms[arm]]
        return Figure(
            tuple(auroc(np.array([value for _, value in run]), np.array([good for good, _ in run])) for run in runs)
        )

    def _with_base(self, arm: str) -> list[tuple[Gain, Sequence[Score]]]:
        bases = {run.seed: run.scores for run in self.arms[_BASES.get(arm, BASE)]}
        return [(run, bases[run.seed]) for run in self.arms[arm]]


def _mean(plays: Sequence[Score]) -> float:
    return statistics.fmean(value for _, value in plays)


def _mean_difference(plays: Sequence[Score], base: Sequence[Score], kind: str) -> float:
    """Return the mean difference over the plays that both have, because a base may have more."""
    pairs = [(score, other) for score, other in zip(plays, base, strict=False) if score[0].startswith(kind)]
    assert all(score[0] == other[0] for score, other in pairs), "the same tasks in the same order"
    return statistics.fmean(score[1] - other[1] for score, other in pairs)


def lines(gains: Gains) -> list[Line]:
    """Return all lines of the arms that were run."""
    return [*_edit_lines(gains), *_thumb_lines(gains), *_natural_lines(gains), *_typed_lines(gains), *_gap_lines(gains)]


def _edit_lines(gains: Gains) -> list[Line]:
    acceptance_lines = []
    for arm in (SFT, DPO):
        if gains.has(arm, BASE):
            most = max(run.edits for run in gains.arms[arm])
            acceptance_lines.append(Line(f"{arm}: gain", gains.gain(arm).mean, POINTS_MIN, 1))
            acceptance_lines.append(Line(f"{arm}: edits, of the seed with most", most, 1, EDITS_MAX))
    return acceptance_lines


def _thumb_lines(gains: Gains) -> list[Line]:
    if not gains.has(FEW, EXPLICIT, BASE):
        return []
    few, full = gains.gain(FEW).mean, gains.gain(EXPLICIT).mean
    acceptance_lines = [
        Line("few thumbs: AUROC of the reward model on all runs", gains.aurocs(FEW).mean, AUROC_MIN, 1),
        Line("few thumbs: AUROC of the rewards that it paid", gains.aurocs(FEW, paid=True).mean, AUROC_MIN, 1),
        Line("few thumbs: share of the gain with full labels", _share(few, full), FEW_SHARE_MIN, math.inf),
    ]
    if gains.has(POISONED):
        cost = few - gains.gain(POISONED).mean
        acceptance_lines.append(Line("few thumbs: what 2 % poisoners cost", cost, -1, POISON_COST_MAX))
    return acceptance_lines


def _natural_lines(gains: Gains) -> list[Line]:
    if not gains.has(NATURAL, EXPLICIT, BASE):
        return []
    share = _share(gains.gain(NATURAL).mean, gains.gain(EXPLICIT).mean)
    return [Line("natural signals: share of the gain of explicit feedback", share, NATURAL_SHARE_MIN, math.inf)]


def _typed_lines(gains: Gains) -> list[Line]:
    if not gains.has(TYPED, DIRECTED_BASE):
        return []
    sessions = max(run.sessions for run in gains.arms[TYPED])
    acceptance_lines = [
        Line("typed corrections: gain", gains.gain(TYPED).mean, POINTS_MIN, 1),
        Line("typed corrections: sessions", sessions, 1, SESSIONS_MAX),
        Line("typed corrections: what the guard loses", -gains.gain(TYPED, GUARD).mean, -1, GUARD_LOSS_MAX),
    ]
    if gains.has(*RIVALS):
        name = "typed corrections: sessions to 15 points, as a share of those with binary rewards"
        typed = gains.sessions_to(TYPED, POINTS_MIN)
        binary = min(gains.sessions_to(arm, POINTS_MIN) for arm in RIVALS)
        acceptance_lines.append(Line(name, math.inf if math.isinf(typed) else typed / binary, 0, OF_BINARY_MAX))
    return acceptance_lines


def _gap_lines(gains: Gains) -> list[Line]:
    """Return the line about gaps. A setting is right if training began with a gap, and was refused without one."""
    outcomes = [bool(run.steps) for run in gains.arms.get(HAS_A_GAP.name, [])]
    outcomes += [not run.steps for arm in HAS_NONE for run in gains.arms.get(arm.name, [])]
    if not outcomes:
        return []
    return [
        Line(
            "typed corrections: settings whose gap has the right sign",
            _share(sum(outcomes), len(outcomes)),
            RIGHT_SIGN_MIN,
            1,
        )
    ]


def misled(gains: Gains) -> Figure | None:
    """Return 1 for each seed in which training began with misleading users, otherwise 0."""
    runs = gains.arms.get(MISLED.name, [])
    return Figure(tuple(float(bool(run.steps)) for run in runs)) if runs else None


def _share(part: float, total: float) -> float:
    """Return a share, or 0 if there is no gain to share."""
    return part / total if total > 0 else 0.0


def rows(gains: Gains) -> dict[str, Mapping[str, object]]:
    """Return the report of each arm that was scored."""
    return {arm: _row(gains, arm) for arm, runs in gains.arms.items() if runs[0].scores}


def _with_worst(figure: Figure) -> dict[str, object]:
    return {**figure.report(), "worst": round(min(figure.values), 4)}


def _row(gains: Gains, arm: str) -> Mapping[str, object]:
    runs = gains.arms[arm]
    row: dict[str, object] = {"score": gains.score(arm).report()}
    if gains.has(_BASES.get(arm, BASE)):
        row["gain"] = gains.gain(arm).report()
        row["after"] = {str(sessions): round(gain.mean, 4) for sessions, gain in gains.after(arm)}
    if any(run.judged for run in runs):
        row["auroc"] = _with_worst(gains.aurocs(arm))
        row["auroc_paid"] = _with_worst(gains.aurocs(arm, paid=True))
    for name in ("sessions", "edits", "steps"):
        row[name] = [getattr(run, name) for run in runs]
    if arm in PAPERS:
        row["paper"] = PAPERS[arm]
    row["stopped"] = [run.health for run in runs if run.health]
    return row
