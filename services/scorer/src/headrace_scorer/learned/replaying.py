"""A reward model in a replay: all thumbs are known beforehand, so it learns once, from all, and then speaks of all.

What runs looked like is only known when all have been read. So a replay with a reward model reads them twice: once to
learn, and once, from a file beside, to write experiences.
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
from headrace_scorer.learned.source import LearnedSource
from headrace_scorer.reward_policy import SourceReward

_IN_MEMORY_BYTES = 16 << 20


@dataclass(slots=True)
class _Tenant:
    """What is kept of one tenant's runs: the newest, in the order of the trajectories."""

    runs: deque[ThumbedRun]
    others: deque[Features]


@dataclass(slots=True)
class LearnedReplay:
    """First `know` every run, then `fit`, then ask for the `reward` of each."""

    source: LearnedSource
    _tenants: dict[str, _Tenant] = field(default_factory=dict)
    _fitted: dict[str, FittedModel] = field(default_factory=dict)

    def know(self, trajectory: Trajectory, features: Features, said: Mapping[str, float]) -> None:
        settings = self.source.settings
        bounds = deque[ThumbedRun](maxlen=settings.thumbs_max), deque[Features](maxlen=settings.others_max)
        kept = self._tenants.setdefault(trajectory.tenant, _Tenant(*bounds))
        if said:
            thumbs = tuple(Thumb(rater, value) for rater, value in sorted(said.items()))
            kept.runs.append(ThumbedRun(trajectory.trajectory_id, features, thumbs))
        else:
            kept.others.append(features)

    async def fit(self) -> None:
        """Of each tenant by itself, on a thread."""
        for tenant, kept in sorted(self._tenants.items()):
            if kept.runs:
                demands = self.source.settings.demands
                made = await asyncio.to_thread(self.source.model.fit, list(kept.runs), list(kept.others), demands)
                self._fitted[tenant] = made

    def reward(self, trajectory: Trajectory, features: Features) -> dict[EntryKey, SourceReward]:
        """What the stream would say in the end."""
        fitted = self._fitted.get(trajectory.tenant)
        likely = None if fitted is None else fitted.judge(features)
        outcome, value = ("abstained", None) if likely is None else ("scored", likely.paid)
        name = self.source.name
        return {EntryKey.reward(name): SourceReward(name, None, outcome, value)}  # type: ignore[arg-type]


class TwiceRead:
    """Lines that are written first and read afterwards, in memory while they are few."""

    def __init__(self) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115 (`close`)

    def write(self, *lines: bytes) -> None:
        """None of them has a line break in it."""
        self._file.writelines(line + b"\n" for line in lines)

    def read(self, count: int) -> Iterator[list[bytes]]:
        """`count` lines at a time, from the beginning."""
        self._file.seek(0)
        while first := self._file.readline():
            yield [first[:-1], *(self._file.readline()[:-1] for _ in range(count - 1))]

    def close(self) -> None:
        self._file.close()
