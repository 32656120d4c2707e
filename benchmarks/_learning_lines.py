"""Arms, results, acceptance lines and plot of `benchmarks.learning`, without heavy imports.

The lines are computed from run results, so that tests can use constructed results. The plot of docs/controls.md shows
gains by control and by lag, and reward against score during training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace_operations import guard
from headrace_operations.charts import FAINT, INK, LINE, WRONG, pyplot, save
from headrace_operations.controls import kinds
from headrace_operations.controls.kinds import Control
from headrace_operations.controls.report import Row
from headrace_statistics.intervals import Mean, Score, difference, mean


@dataclass(frozen=True)
class Plan:
    """Settings that all runs share."""

    steps: int
    learning_rate: float
    plays: int
    """Number of audit tasks for each score."""
    traced: int
    """Number of intermediate versions of a traced run that are scored, evenly spaced, each with `plays` plays."""


Answers = Literal["bare", "free", "held"]
"""Form of the agent's answers: bare text, as the demo's; calls of `final_answer` by free choice; or calls that
`tool_choice: required` forces.
"""


@dataclass(frozen=True)
class Arm:
    """A kind of run. With `lag` k, a step trains on samples of the version of k steps before."""

    control: Control
    lag: int = 0
    answers: Answers = "bare"
    traced: bool = False
    runs_gate: bool = False
    """Whether the gate compares the last version with the base."""

    @property
    def name(self) -> str:
        prefix = "" if self.answers == "bare" else f"{self.answers} calls, "
        return f"lag {self.lag}" if self.lag else prefix + self.control.name


@dataclass
class RunResult:
    """Result of a run."""

    arm: str
    seed: int
    base: list[Score]
    scores: list[Score]
    trace: list[tuple[int, float, list[Score]]] = field(default_factory=list)
    """Step, mean reward since the previous entry, and the scored plays."""
    steps: int = 0
    health: str | None = None
    trial: dict[str, object] = field(default_factory=dict)
    rewards: list[float] = field(default_factory=list)
    """Mean reward of each step."""
    effective_sample: float | None = None
    seconds: float = 0.0

    def report(self) -> dict[str, object]:
        return asdict(self)


FREE_CALLS, HELD_CALLS = "free calls, true", "held calls, true"
HELD_SHUFFLED, HELD_UNMASKED = "held calls, shuffled", "held calls, sets ignored"
TYPED = (FREE_CALLS, HELD_CALLS, HELD_SHUFFLED, HELD_UNMASKED)
LAG_LOSS_MAX = 0.02
GAIN_MIN = 0.2
"""Required gain of training by the true reward, as in `make demo`."""
FORMAT = "function:tool_use alone"
FIRES_SHARE = 0.8
"""Required share of runs trained on the format alone in which the guard fires. For the true reward it must never fire.
"""
_NOTHING_TO_LEARN = (kinds.SHUFFLED, kinds.RANDOM, kinds.STILL)


@dataclass(frozen=True, slots=True)
class Line:
    """Acceptance line that holds if `value` lies within the bounds, inclusive."""

    name: str
    value: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low <= self.value <= self.high

    def report(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": round(self.value, 4),
            "low": round(self.low, 4),
            "high": round(self.high, 4),
            "holds": self.holds,
        }


class Table:
    """Run results by arm. All arms have the same seeds, in the same order."""

    def __init__(self, runs: Iterable[RunResult]) -> None:
        self.arms: dict[str, list[RunResult]] = {}
        for result in sorted(runs, key=lambda run: run.seed):
            self.arms.setdefault(result.arm, []).append(result)

    def score(self, arm: str) -> Mean:
        return mean([run.scores for run in self.arms[arm]])

    def score_of_base(self, arm: str | None = None) -> Mean:
        """Return the score of the base of an arm, by default of the first one. Agents with typed answers have a base of
        their own, and a grammar changes its score."""
        return mean([run.base for run in self.arms[arm or next(iter(self.arms))]])

    def gain(self, arm: str) -> Mean:
        """Return the gain over the base, compared play by play."""
        return difference([run.scores for run in self.arms[arm]], [run.base for run in self.arms[arm]])

    def compare(self, arm: str, other: str) -> Mean:
        """Return how much better `arm` is than `other`, compared play by play."""
        return difference([run.scores for run in self.arms[arm]], [run.scores for run in self.arms[other]])

    def _beside_true(self, arm: str) -> dict[str, object] | None:
        """Return the comparison with the demo's agent, or None if that was not run or the arm types its answers."""
        if kinds.TRUE.name not in self.arms or arm in TYPED:
            return None
        return self.compare(arm, kinds.TRUE.name).report()

    def rows(self) -> list[dict[str, object]]:
        return [
            {
                "arm": arm,
                "base": self.score_of_base(arm).report(),
                "score": self.score(arm).report(),
                "gain": self.gain(arm).report(),
                "beside_true": self._beside_true(arm),
                "effective_sample_size": _mean_of(run.effective_sample for run in runs),
                "stopped": [run.health for run in runs if run.health],
                "gate": [run.trial for run in runs if run.trial],
                "guard": [finding(run) for run in runs if run.trace],
            }
            for arm, runs in self.arms.items()
        ]


def finding(run: RunResult) -> str | None:
    """Return the guard's finding about a run: `hacked` if it was found after any measured version, else the last
    finding."""
    points = [guard.Point(reward, mean([plays]).value, mean([plays]).error) for _, reward, plays in run.trace]
    looks = [guard.judge(run.arm, points[: count + 1]) for count in range(len(points))]
    findings = [None if look is None else look.kind for look in looks]
    return "hacked" if "hacked" in findings else findings[-1]


def lines(table: Table) -> list[Line]:
    """Return all lines of the arms that were run."""
    result = []
    if kinds.TRUE.name in table.arms:
        result.append(Line("true: gain over the base", table.gain(kinds.TRUE.name).value, GAIN_MIN, 1))
    for control in _NOTHING_TO_LEARN:
        if control.name in table.arms:
            gain = table.gain(control.name)
            result.append(
                Line(f"{control.name}: gain over the base, within two errors", gain.value, *_two_errors(gain))
            )
    result += _accusation_lines(table) + _flipped_lines(table) + _guard_lines(table) + _held_lines(table)
    if "lag 4" in table.arms:
        loss = -table.compare("lag 4", kinds.TRUE.name).value
        result.append(Line("lag 4: what it loses on lag 0", loss, -1, LAG_LOSS_MAX))
    return result


def _accusation_lines(table: Table) -> list[Line]:
    """Return the lines about `headrace controls` with one seed: no reported problem for the true reward, always one for
    shuffled recorded rewards.
    """
    runs = [table.arms.get(control.name, []) for control in (kinds.TRUE, kinds.SHUFFLED, kinds.RANDOM)]
    true_runs, shuffled_runs, random_runs = runs
    if not true_runs or not shuffled_runs:
        return []
    sound = [is_accused(run, shuffled) for run, shuffled in zip(true_runs, shuffled_runs, strict=True)]
    broken = [is_accused(run, other) for run, other in zip(shuffled_runs, random_runs or shuffled_runs, strict=True)]
    return [
        Line("controls: share of seeds that accuse the true reward", _share(sound), 0, 0),
        Line("controls: share of seeds that accuse shuffled recorded rewards", _share(broken), 1, 1),
    ]


def is_accused(recorded: RunResult, shuffled: RunResult) -> bool:
    """Return whether `headrace controls` reports a problem, from runs with the recorded rewards and with shuffled
    ones."""
    true_gain = difference([recorded.scores], [recorded.base])
    rows = [
        Row(control, mean([run.scores]), difference([run.scores], [run.base]), run.steps, 0, (), true_gain)
        for control, run in ((kinds.TRUE, recorded), (kinds.SHUFFLED, shuffled))
    ]
    return not all(row.as_expected for row in rows)


def _two_errors(gain: Mean) -> tuple[float, float]:
    return -2 * gain.error, 2 * gain.error


def _flipped_lines(table: Table) -> list[Line]:
    runs = table.arms.get(kinds.FLIPPED.name, [])
    if not runs:
        return []
    gain = table.gain(kinds.FLIPPED.name)
    passed = [run.trial.get("passed") for run in runs]
    return [
        Line("flipped: gain over the base, two errors and a point down", gain.value, -1, min(-2 * gain.error, -0.01)),
        Line("flipped: share of versions that the gate lets pass", _share(passed), 0, 0),
    ]


def _guard_lines(table: Table) -> list[Line]:
    result = []
    for arm, low, high in ((FORMAT, FIRES_SHARE, 1.0), (kinds.TRUE.name, 0.0, 0.0)):
        traced = [run for run in table.arms.get(arm, []) if len(run.trace) >= guard.WINDOW_MIN]
        if traced:
            hacked = [finding(run) == "hacked" for run in traced]
            result.append(Line(f"{arm}: share of runs that the guard calls hacked", _share(hacked), low, high))
    return result


def _held_lines(table: Table) -> list[Line]:
    """Return the lines of the agents with typed answers."""
    result = []
    if {FREE_CALLS, HELD_CALLS} <= table.arms.keys():
        held, free = table.gain(HELD_CALLS), table.gain(FREE_CALLS)
        error = math.hypot(held.error, free.error)
        result.append(Line("held calls: gain beside that of free calls, above minus two errors",
                           held.value - free.value, -2 * error, 1))  # fmt: skip
        result.append(
            Line("held calls: gain over the base, two errors and a point up", held.value, max(2 * held.error, 0.01), 1)
        )
    if HELD_SHUFFLED in table.arms:
        gain = table.gain(HELD_SHUFFLED)
        result.append(
            Line("held calls, shuffled: gain over the base, at most two errors", gain.value, -1, 2 * gain.error)
        )
    return result


def _share(flags: Sequence[object]) -> float:
    return sum(flag is not False for flag in flags) / len(flags)


def _mean_of(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return round(statistics.fmean(numbers), 4) if numbers else None


def markdown(rows: Sequence[Mapping[str, object]], base: Mean) -> str:
    """Return the table of docs/controls.md."""
    text = ["| run | held-out score | gain over the base | guard | gate |", "|---|---|---|---|---|"]
    text.append(f"| base | {base.value:.1%} ± {base.error:.1%} | | | |")
    for row in rows:
        score, gain = _number(row["score"]), _number(row["gain"])
        text.append(
            f"| {row['arm']} | {score.replace('+', '')} | {gain} | {_findings_text(row['guard'])} | "
            f"{_trials_text(row['gate'])} |"
        )
    return "\n".join(text).replace("%", " %")


def _number(numbers: object) -> str:
    assert isinstance(numbers, Mapping)
    return f"{numbers['mean']:+.1%} ± {numbers['standard_error']:.1%}"


def _findings_text(findings: object) -> str:
    assert isinstance(findings, list)
    kinds_of = [finding or "nothing" for finding in findings]
    return ", ".join(f"{name} {kinds_of.count(name)}/{len(kinds_of)}" for name in sorted(set(kinds_of)))


def _trials_text(trials: object) -> str:
    assert isinstance(trials, list)
    passed = sum(bool(trial["passed"]) for trial in trials)
    tasks = statistics.fmean(trial["tasks"] for trial in trials) if trials else 0
    return f"passed {passed}/{len(trials)} after {tasks:.0f} tasks" if trials else ""


def draw(table: Table, path: Path) -> None:
    figure, (left, middle, right) = pyplot().subplots(1, 3, figsize=(11, 3.8), dpi=130, width_ratios=(1.3, 0.8, 1.2))
    _gains(left, table)
    _lags(middle, table)
    _traces(right, table)
    for axes in (left, middle, right):
        axes.tick_params(labelsize=8)
    save(figure, path)


def _gains(axes: Any, table: Table) -> None:
    arms = [arm for arm in table.arms if not arm.startswith("lag ")]
    gains = [table.gain(arm) for arm in arms]
    positions = range(len(arms))[::-1]
    axes.axvline(0, color=FAINT, linewidth=1)
    axes.errorbar(
        [gain.value * 100 for gain in gains], positions, xerr=[200 * gain.error for gain in gains], fmt="o", color=LINE,
        markersize=4, capsize=2,
    )  # fmt: skip
    for position, gain in zip(positions, gains, strict=True):
        axes.plot([value * 100 for value in gain.by_seed], [position] * len(gain.by_seed), "|", color=FAINT)
    axes.set_yticks(list(positions), [arm.removeprefix("function:") for arm in arms])
    axes.set_title("gain over the base, points (± 2 errors; each seed)", loc="left", color=INK, fontsize=9)


def _lags(axes: Any, table: Table) -> None:
    lags = {0: kinds.TRUE.name} | {int(arm.split()[1]): arm for arm in table.arms if arm.startswith("lag ")}
    scores = [(lag, table.score(arm)) for lag, arm in sorted(lags.items()) if arm in table.arms]
    axes.errorbar(
        [lag for lag, _ in scores], [score.value * 100 for _, score in scores],
        yerr=[200 * score.error for _, score in scores], fmt="o-", color=LINE, markersize=4, capsize=2,
    )  # fmt: skip
    axes.set_ylim(0, 100)
    axes.set_xlabel("lag, steps", fontsize=8, color=INK)
    axes.set_title("held-out score, %", loc="left", color=INK, fontsize=9)


def _traces(axes: Any, table: Table) -> None:
    for arm, colour in ((kinds.TRUE.name, LINE), (FORMAT, WRONG)):
        traces = [run.trace for run in table.arms.get(arm, []) if run.trace]
        if not traces:
            continue
        steps = [step for step, *_ in traces[0]]
        together = list(zip(*traces, strict=True))
        rewards = [100 * statistics.fmean(reward for _, reward, _ in at) for at in together]
        scores = [100 * mean([plays for *_, plays in at]).value for at in together]
        axes.plot(steps, scores, "o-", color=colour, markersize=3, label=f"{arm.removeprefix('function:')}: score")
        axes.plot(steps, rewards, "--", color=colour, label=f"{arm.removeprefix('function:')}: reward")
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, fontsize=7)
    axes.set_xlabel("steps", fontsize=8, color=INK)
    axes.set_title("reward and held-out score, %", loc="left", color=INK, fontsize=9)
