"""Acceptance lines of `benchmarks.algorithms`, computed from run results. Pure, so that tests can use constructed
results."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from benchmarks._algorithms_arms import PER_TURN, RL_ALONE, SFT_RL, TERMINAL, base
from benchmarks._algorithms_results import Arm, RunResult
from headrace_statistics import student_t
from headrace_statistics.clustered_means import difference, mean


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
        half = student_t.mean_margin(by_seed, 0.975)
        return cls(value, value - half, value + half, tuple(by_seed))

    def report(self) -> dict[str, object]:
        rounded = {name: round(getattr(self, name), 4) for name in ("value", "low", "high")}
        return {**rounded, "by_seed": [round(value, 4) for value in self.by_seed]}


@dataclass(frozen=True, slots=True)
class Line:
    """Acceptance line. `rises` requires that the whole interval is above 0, `rises not` that it is not."""

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
        """Return how much better `arm` is than `other` on the same plays, by seed."""
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
