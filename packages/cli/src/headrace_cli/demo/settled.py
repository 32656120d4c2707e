"""Waiting until everything that the agent did so far is trained and serves."""

from __future__ import annotations

import asyncio
import time

from headrace.following import Follower
from headrace.topics import Topics, connected
from headrace_cli.demo.watch import Watch
from headrace_operations.errors import StartFailed
from headrace_schemas import Experience, TrainingMetrics

_POLL_S = 0.5
_QUIET_S = 4.0
"""Without a new experience for this time, collector and scorer have processed all runs that ended."""
_STALLED_S = 20.0
"""Without a report for this time, the remaining experiences are too few for the trainer's smallest batch."""


class TrainingWait:
    """Follows the experiences of a model and their training. `until_settled` can be called repeatedly."""

    def __init__(self, bus: str, model: str) -> None:
        self._bus, self._model = bus, model
        self._follow = Follower(Experience.topic, TrainingMetrics.topic)
        self._untrained: set[str] = set()
        self._version: str | None = None
        """Newest version that the trainer reported."""
        self._changed_s = 0.0

    async def until_settled(self, watch: Watch, timeout_s: float) -> None:
        """Wait until the newest version is promoted or refused and the trainer has nothing more to train.

        Raises:
            StartFailed: this takes longer than `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        self._changed_s = time.monotonic()
        async with connected(self._bus) as topics:
            await self._read(topics)
            while not self._is_settled(watch):
                if time.monotonic() > deadline:
                    raise StartFailed(
                        f"after {timeout_s:g} s {len(self._untrained)} experiences are not trained, and the newest "
                        f"version is {self._version}; see `headrace logs trainer` and `headrace logs registry`"
                    )
                await asyncio.sleep(_POLL_S)
                await self._read(topics)

    def _is_settled(self, watch: Watch) -> bool:
        quiet_s = time.monotonic() - self._changed_s
        decided = self._version is None or self._version in watch.champions or self._version in watch.rejected
        return decided and quiet_s > (_STALLED_S if self._untrained else _QUIET_S)

    async def _read(self, topics: Topics) -> None:
        async for experience in self._follow.events(topics, Experience):
            if experience.model == self._model:
                self._untrained.add(experience.experience_id)
                self._changed_s = time.monotonic()
        async for report in self._follow.events(topics, TrainingMetrics):
            if report.model == self._model:
                self._add(report)

    def _add(self, report: TrainingMetrics) -> None:
        self._changed_s = time.monotonic()
        self._version = report.version or self._version
        self._untrained -= {outcome.experience_id for outcome in report.verdicts}
        self._untrained |= {outcome.experience_id for outcome in report.undone if outcome.queued}
        self._untrained -= {outcome.experience_id for outcome in report.restored}
