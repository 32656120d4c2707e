"""Arms, results and acceptance lines of `benchmarks.algorithms`, without heavy imports or side effects.

Each algorithm has an arm with its signal and control arms; some arms are compared with each other. Acceptance lines are
computed from run results, so that tests can use constructed results. Learning rates and batch sizes were chosen on seed
100, which is not one of the five reported seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from benchmarks._algorithms_users import shuffle_edits, shuffle_preference_sides
from headrace_operations.controls import kinds
from headrace_operations.controls.kinds import TRUE, Change
from headrace_statistics import intervals
from headrace_statistics.intervals import Score, difference, mean
from headrace_trainer.algorithms.presets import ALGORITHMS, Algorithm

EPISODES = 64
"""Number of episodes that a version plays at a time."""


@dataclass(frozen=True)
class Stage:
    """Training steps with one algorithm and one signal."""

    algorithm: str
    signal: str
    """Name of the signal in `benchmarks._algorithms_users` or `benchmarks._algorithms_run`."""
    settings: Mapping[str, object] = field(default_factory=dict)
    """Trainer settings by dotted name that differ from those of the demo."""
    change: Change = TRUE.change
    """Change of the experiences by a control."""
    share: float = 1.0
    """Share of the steps of a run that this stage takes."""


@dataclass(frozen=True)
class Arm:
    """A kind of run: stages, each of which continues from the version of the stage before."""

    name: str
    stages: tuple[Stage, ...]
    lesson: str = "e-mail"
    """Name of the task, whose base model is warmed up for it."""
    teacher: str = ""
    """Arm whose last version is the teacher."""
    control_of: str = ""
    """Arm whose signal is randomized in this arm."""
    promised: bool = True
    """Whether the arm is required to learn; otherwise its result is only reported."""


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
    """Reason for which training stopped itself, or None."""
    seconds: float = 0.0

    def report(self) -> dict[str, object]:
        return asdict(self)


_RATE, _BATCH = "optimizer.learning_rate", "batch_experiences"
_SLOW: Mapping[str, object] = {_RATE: 1e-4}
"""Half of the demo's learning rate. With it, a random signal leaves the model roughly unchanged instead of degrading
it."""
_HALF: Mapping[str, object] = {**_SLOW, _BATCH: 32}
"""Settings for signals that only some of the runs provide."""
STAGES: Mapping[str, Stage] = {
    "reinforce++": Stage("reinforce++", "rewards", _SLOW),
    "ppo": Stage("ppo", "rewards", _SLOW),
    "rft": Stage("rft", "rewards", _HALF),
    "grpo": Stage("grpo", "groups", _SLOW),
    "dr_grpo": Stage("dr_grpo", "groups", _SLOW),
    "rloo": Stage("rloo", "groups", _SLOW),
    "dapo": Stage("dapo", "groups", _SLOW),
    "gspo": Stage("gspo", "groups", _SLOW),
    "cispo": Stage("cispo", "groups", _SLOW),
    "opmd": Stage("opmd", "groups", _SLOW),
    "multi_step_grpo": Stage("multi_step_grpo", "turns", _SLOW),
    "sft": Stage("sft", "edits", _HALF),
    "dpo": Stage("dpo", "pairs", _HALF),
    "kto": Stage("kto", "labels", _SLOW),
    "mix": Stage("mix", "edits and rewards", _SLOW),
    "hindsight": Stage("hindsight", "corrections", _SLOW),
    "on_policy_distill": Stage("on_policy_distill", "nothing", _SLOW),
}
"""Stages by algorithm name. A second name of an algorithm needs no stage of its own."""
CORRECTED, CORRIDOR, WEAK = "e-mail with corrections", "corridor", "e-mail, weak base"
_LESSON_OF: Mapping[str, str] = {"hindsight": CORRECTED}
_TEACHER_OF: Mapping[str, str] = {"on_policy_distill": "reinforce++"}
SFT_RL, RL_ALONE = "weak base, sft and then reinforce++", "weak base, reinforce++ alone"
RL_TWICE = "weak base, reinforce++ alone, twice the steps"
FOLLOWED = "hindsight, replies of others that the model follows"
PER_TURN, TERMINAL = "corridor, rewards of turns", "corridor, reward of the run alone"


def algorithms(registry: Mapping[str, Algorithm] | None = None) -> list[Arm]:
    """Return an arm for each registered algorithm. Raises `LookupError` for an algorithm without a stage."""
    announced = ALGORITHMS.all() if registry is None else registry
    covered = [announced[name] for name in STAGES if name in announced]
    lost = sorted(name for name, algorithm in announced.items() if not any(algorithm is other for other in covered))
    stale = sorted(set(STAGES) - set(announced))
    if lost or stale:
        raise LookupError(
            f"algorithms without a stage: {', '.join(lost) or 'none'}; stages without an algorithm: "
            f"{', '.join(stale) or 'none'}; update STAGES in benchmarks/_algorithms_lines.py"
        )
    return [_arm(name, stage) for name, stage in STAGES.items()]


def _arm(name: str, stage: Stage) -> Arm:
    return Arm(name, (stage,), _LESSON_OF.get(name, "e-mail"), _TEACHER_OF.get(name, ""))


def _control(name: str, change: kinds.Change = kinds.TRUE.change, signal: str = "") -> Arm:
    """Return a control arm: the same algorithm with another signal, or with its own signal changed by `change`."""
    stage = replace(STAGES[name], change=change, signal=signal or STAGES[name].signal)
    return Arm(f"{name}, shuffled", (stage,), _LESSON_OF.get(name, "e-mail"), control_of=name)


CONTROLS = (
    _control("reinforce++", kinds.SHUFFLED.change),
    _control("grpo", kinds.SHUFFLED.change),
    _control("kto", kinds.SHUFFLED.change),
    _control("dpo", shuffle_preference_sides),
    _control("sft", shuffle_edits),
    _control("hindsight", signal="corrections of others"),
)
_WITHOUT_DECAY: Mapping[str, object] = {**_SLOW, "advantage.step_wise_grpo.turn_decay": 0.0}
"""Settings without reward decay over turns, because a door does not influence whether later doors are right."""
COMPARED = (
    Arm(SFT_RL, (STAGES["sft"], STAGES["reinforce++"]), WEAK),
    Arm(RL_ALONE, (STAGES["reinforce++"],), WEAK),
    Arm(RL_TWICE, (replace(STAGES["reinforce++"], share=2.0),), WEAK, promised=False),
    Arm(PER_TURN, (Stage("multi_step_grpo", "ends and doors", _WITHOUT_DECAY),), CORRIDOR),
    Arm(TERMINAL, (Stage("multi_step_grpo", "ends", _SLOW),), CORRIDOR, promised=False),
    Arm(FOLLOWED, (replace(STAGES["hindsight"], signal="corrections of others, followed"),), CORRECTED, promised=False),
)
"""Arms that are compared with each other.

After SFT, RL takes as many steps as it does alone. `RL_TWICE`, with as many steps in total, is reported without a
required result. In the corridor both arms take equally many steps. `FOLLOWED` is reported as well: its replies belong
to other runs but were shown to the model, which follows them, so they have a gap.
"""


def base(lesson: str) -> Arm:
    """Return the arm that only scores a base model, without training."""
    return Arm(f"base, {lesson}", (Stage("reinforce++", "rewards", share=0.0),), lesson)


def arms() -> list[Arm]:
    """Return all arms, base models first. Raises `LookupError`."""
    trained_arms = [*algorithms(), *CONTROLS, *COMPARED]
    return [*(base(lesson) for lesson in dict.fromkeys(arm.lesson for arm in trained_arms)), *trained_arms]


@dataclass(frozen=True, slots=True)
class Interval:
    """Mean over seeds with its 95 % interval of Student's t, with one degree of freedom less than seeds."""

    value: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    @classmethod
    def of(cls, by_seed: Sequence[float]) -> Interval:
        """Return the interval of one value per seed. Raises `ValueError` for fewer than 2 seeds."""
        if len(by_seed) < 2:
            raise ValueError(f"{len(by_seed)} seeds: an interval needs 2 or more")
        value = statistics.fmean(by_seed)
        half = intervals.mean_margin(by_seed, 0.975)
        return cls(value, value - half, value + half, tuple(by_seed))

    def report(self) -> dict[str, object]:
        rounded = {name: round(getattr(self, name), 4) for name in ("value", "low", "high")}
        return {**rounded, "by_seed": [round(value, 4) for value in self.by_seed]}


@dataclass(frozen=True, slots=True)
class Line:
    """Acceptance line. `rises` requires the whole interval to be above 0, `rises not` requires the opposite."""

    name: str
    needs: Literal["rises", "rises not"]
    interval: Interval

    @property
    def holds(self) -> bool:
        return (self.interval.low > 0) == (self.needs == "rises")

    def report(self) -> dict[str, object]:
        return {"name": self.name, "needs": self.needs, **self.interval.report(), "holds": self.holds}

    def text(self) -> str:
        interval = self.interval
        return (
            f"{'holds' if self.holds else 'FAILS'}  {interval.value:+7.1%} in {interval.low:+.1%} .. "
            f"{interval.high:+.1%}"
            f"  {self.name}"
        )


class Table:
    """Run results by arm. All arms have the same seeds, in the same order, and the base of each lesson is among the
    arms."""

    def __init__(self, arms: Iterable[Arm], runs: Iterable[RunResult]) -> None:
        self.runs: dict[str, list[RunResult]] = {}
        for result in sorted(runs, key=lambda run: run.seed):
            self.runs.setdefault(result.arm, []).append(result)
        self.arms = [arm for arm in arms if arm.name in self.runs]

    def score(self, arm: str) -> tuple[float, ...]:
        return mean([run.scores for run in self.runs[arm]]).by_seed

    def compare(self, arm: str, other: str) -> Interval:
        """Return by how much `arm` is better than `other` on the same plays, as an interval over seeds."""
        scores, other_scores = ([run.scores for run in self.runs[name]] for name in (arm, other))
        return Interval.of(difference(scores, other_scores).by_seed)

    def gain(self, arm: Arm) -> Interval:
        return self.compare(arm.name, base(arm.lesson).name)

    def rows(self) -> list[dict[str, object]]:
        return [
            {
                "arm": arm.name,
                "stages": [f"{stage.algorithm} from {stage.signal}" for stage in arm.stages if stage.share],
                "score": round(statistics.fmean(self.score(arm.name)), 4),
                "gain": self.gain(arm).report(),
                **self._costs(arm.name),
            }
            for arm in self.arms
        ]

    def _costs(self, arm: str) -> dict[str, object]:
        runs = self.runs[arm]
        return {
            "steps": [run.steps for run in runs],
            "episodes": [run.episodes for run in runs],
            "experiences": [run.experiences for run in runs],
            "stopped": [run.health for run in runs if run.health],
        }


def lines(table: Table) -> list[Line]:
    """Return all lines of the arms that were run."""
    return [*_gain_lines(table), *_control_lines(table), *_comparison_lines(table)]


def _gain_lines(table: Table) -> Iterator[Line]:
    for arm in table.arms:
        if arm.name != base(arm.lesson).name and arm.promised and not arm.control_of:
            yield Line(f"{arm.name}: gain over the base", "rises", table.gain(arm))


def _control_lines(table: Table) -> Iterator[Line]:
    for arm in table.arms:
        if not arm.control_of:
            continue
        yield Line(f"{arm.name}: gain over the base", "rises not", table.gain(arm))
        if arm.control_of in table.runs:
            compare = table.compare(arm.control_of, arm.name)
            yield Line(f"{arm.control_of}: what its signal gains beside one dealt out by lot", "rises", compare)


def _comparison_lines(table: Table) -> Iterator[Line]:
    for name, arm, other in (
        ("sft and then reinforce++: gain over reinforce++ alone, with as many steps of it", SFT_RL, RL_ALONE),
        ("rewards of turns: gain over the reward of the run alone", PER_TURN, TERMINAL),
    ):
        if arm in table.runs and other in table.runs:
            yield Line(name, "rises", table.compare(arm, other))


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """Return the table of docs/evidence.md."""
    text = ["| run | what it learns from | held-out score | gain over the base |", "|---|---|---|---|"]
    for row in rows:
        gain, stages = row["gain"], row["stages"]
        assert isinstance(gain, Mapping)
        assert isinstance(stages, list)
        gain_text = f"{gain['value']:+.1%} ({gain['low']:+.1%} to {gain['high']:+.1%})" if stages else ""
        text.append(f"| {row['arm']} | {', then '.join(stages)} | {row['score']:.1%} | {gain_text} |")
    return "\n".join(text).replace("%", " %")
