"""What the runs have to show, line by line, from what came of them. No model in here: it can be tested by hand."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from headrace_statistics import student_t

from benchmarks._algorithms_arms import PER_TURN, RL_ALONE, SFT_RL, TERMINAL, base
from benchmarks._algorithms_found import Arm, Found
from headrace_cli.controls.statistics import difference, mean


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean over seeds and its interval of 95 %: Student's, whose degrees of freedom are one less than seeds."""

    value: float
    low: float
    high: float
    by_seed: tuple[float, ...]

    @classmethod
    def of(cls, by_seed: Sequence[float]) -> Interval:
        """Raises `ValueError` for fewer than 2 seeds."""
        if len(by_seed) < 2:
            raise ValueError(f"{len(by_seed)} seeds: an interval needs 2 or more")
        value = statistics.fmean(by_seed)
        half = student_t.mean_margin(by_seed, 0.975)
        return cls(value, value - half, value + half, tuple(by_seed))

    def report(self) -> dict[str, object]:
        rounded = {name: round(getattr(self, name), 4) for name in ("value", "low", "high")}
        return {**rounded, "by_seed": [round(one, 4) for one in self.by_seed]}


@dataclass(frozen=True, slots=True)
class Line:
    """`rises`: the whole interval is above 0. `rises not`: not all of it is."""

    name: str
    needs: Literal["rises", "rises not"]
    found: Interval

    @property
    def holds(self) -> bool:
        return (self.found.low > 0) == (self.needs == "rises")

    def report(self) -> dict[str, object]:
        return {"name": self.name, "needs": self.needs, **self.found.report(), "holds": self.holds}

    def told(self) -> str:
        one = self.found
        return (
            f"{'holds' if self.holds else 'FAILS'}  {one.value:+7.1%} in {one.low:+.1%} .. {one.high:+.1%}  {self.name}"
        )


class Table:
    """Runs by arm; each arm has the same seeds, in order, and its lesson's base among the others."""

    def __init__(self, arms: Iterable[Arm], runs: Iterable[Found]) -> None:
        found: dict[str, list[Found]] = {}
        for one in sorted(runs, key=lambda run: run.seed):
            found.setdefault(one.arm, []).append(one)
        self.arms = [arm for arm in arms if arm.name in found]
        self.runs = found

    def score(self, arm: str) -> tuple[float, ...]:
        return mean([run.scores for run in self.runs[arm]]).by_seed

    def beside(self, arm: str, other: str) -> Interval:
        """How much better on the same plays, seed by seed."""
        ours, theirs = ([run.scores for run in self.runs[name]] for name in (arm, other))
        return Interval.of(difference(ours, theirs).by_seed)

    def gain(self, arm: Arm) -> Interval:
        return self.beside(arm.name, base(arm.lesson).name)

    def rows(self) -> list[dict[str, object]]:
        return [
            {
                "arm": arm.name,
                "stages": [f"{stage.algorithm} from {stage.signal}" for stage in arm.stages if stage.share],
                "score": round(statistics.fmean(self.score(arm.name)), 4),
                "gain": self.gain(arm).report(),
                **self._spent(arm.name),
            }
            for arm in self.arms
        ]

    def _spent(self, arm: str) -> dict[str, object]:
        runs = self.runs[arm]
        return {
            "steps": [run.steps for run in runs],
            "episodes": [run.episodes for run in runs],
            "experiences": [run.experiences for run in runs],
            "stopped": [run.health for run in runs if run.health],
        }


def lines(table: Table) -> list[Line]:
    """All that can be said of the arms that were run."""
    return [*_learned(table), *_controls(table), *_compared(table)]


def _learned(table: Table) -> Iterator[Line]:
    for arm in table.arms:
        if arm.name != base(arm.lesson).name and arm.promised and not arm.control_of:
            yield Line(f"{arm.name}: gain over the base", "rises", table.gain(arm))


def _controls(table: Table) -> Iterator[Line]:
    for arm in table.arms:
        if not arm.control_of:
            continue
        yield Line(f"{arm.name}: gain over the base", "rises not", table.gain(arm))
        if arm.control_of in table.runs:
            beside = table.beside(arm.control_of, arm.name)
            yield Line(f"{arm.control_of}: what its signal gains beside one dealt out by lot", "rises", beside)


def _compared(table: Table) -> Iterator[Line]:
    for name, ours, other in (
        ("sft and then reinforce++: gain over reinforce++ alone, with as many steps of it", SFT_RL, RL_ALONE),
        ("rewards of turns: gain over the reward of the run alone", PER_TURN, TERMINAL),
    ):
        if ours in table.runs and other in table.runs:
            yield Line(name, "rises", table.beside(ours, other))


def markdown(rows: Sequence[Mapping[str, object]]) -> str:
    """The table of docs/evidence.md."""
    text = ["| run | what it learns from | held-out score | gain over the base |", "|---|---|---|---|"]
    for row in rows:
        gain, stages = row["gain"], row["stages"]
        assert isinstance(gain, Mapping)
        assert isinstance(stages, list)
        told = f"{gain['value']:+.1%} ({gain['low']:+.1%} to {gain['high']:+.1%})" if stages else ""
        text.append(f"| {row['arm']} | {', then '.join(stages)} | {row['score']:.1%} | {told} |")
    return "\n".join(text).replace("%", " %")
