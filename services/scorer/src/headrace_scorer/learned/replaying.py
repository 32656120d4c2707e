"""Reward model of a replay, which is fitted once to all thumbs and then scores all runs.

The features of a run are known only after its reward functions were called. So a replay with a reward model passes over
the runs twice: first to compute features, then, from a temporary file, to write experiences.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from headrace_schemas import Trajectory
from headrace_scorer.feedback_entries import EntryKey
from headrace_scorer.learned.models import Features, FittedModel, Thumb, ThumbedRun
from headrace_scorer.learned.settings import THUMBS_MAX, UNRATED_RUNS_MAX
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.reward_policy import SourceReward

_IN_MEMORY_BYTES = 16 << 20


@dataclass(slots=True)
class _Tenant:
    """Newest runs of one tenant, in the order of the trajectories."""

    rated: deque[ThumbedRun]
    unrated: deque[Features]


@dataclass(slots=True)
class LearnedReplay:
    """Reward model of a replay. Call `add_run` for every run, then `fit`, then `reward` for each run."""

    source: LearnedSource
    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    _fitted: dict[str, FittedModel] = field(default_factory=dict)

    def add_run(self, trajectory: Trajectory, features: Features, rater_values: Mapping[str, float]) -> None:
        """Add a run with the value of each rater; without any it is an unrated run."""
        empty = _Tenant(deque(maxlen=THUMBS_MAX), deque(maxlen=UNRATED_RUNS_MAX))
        runs = self._tenants.setdefault(trajectory.tenant, empty)
        if rater_values:
            thumbs = tuple(Thumb(rater, value) for rater, value in sorted(rater_values.items()))
            runs.rated.append(ThumbedRun(trajectory.trajectory_id, features, thumbs))
        else:
            runs.unrated.append(features)

    async def fit(self) -> None:
        """Fit the model of each tenant, on a thread."""
        fit, requirements = self.source.model.fit, self.source.settings.requirements
        for tenant, runs in sorted(self._tenants.items()):
            if runs.rated:
                self._fitted[tenant] = await asyncio.to_thread(fit, list(runs.rated), list(runs.unrated), requirements)

    def reward(self, trajectory: Trajectory, features: Features) -> dict[EntryKey, SourceReward]:
        """Return the reward that the stream would give to the run after it has seen all thumbs."""
        fitted = self._fitted.get(trajectory.tenant)
        likely = None if fitted is None else fitted.judge(features)
        outcome, value = ("abstained", None) if likely is None else ("scored", likely.paid)
        name = self.source.name
        return {EntryKey.reward(name): SourceReward(name, None, outcome, value)}  # type: ignore[arg-type]


class TemporaryLines:
    """Lines that are first written and then read. They are in memory while they are few, else in a temporary file."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 (`close`)

    def write(self, *lines: bytes) -> None:
        """Write lines, which must not contain line breaks."""
        self._file.writelines(line + b"\n" for line in lines)

    def read(self, count: int) -> Iterator[list[bytes]]:
        """Yield all lines from the beginning, `count` at a time."""
        self._file.seek(0)
        while first := self._file.readline():
            yield [first[:-1], *(self._file.readline()[:-1] for _ in range(count - 1))]

    def close(self) -> None:
        """Delete the lines."""
        self._file.close()
