"""Waits until all that the agent did so far is trained and serves."""

from __future__ import annotations

import asyncio
import time

from headrace.stack.following import Follower
from headrace.topics import Topics, connected
from headrace_cli.demo.watch import Watch
from headrace_operations.errors import StartFailed
from headrace_schemas import Experience, TrainingMetrics

_POLL_S = 0.5
_QUIET_S = 4.0
"""No new experience for so long: collector and scorer have nothing left of runs that have ended."""
_STILL_S = 20.0
"""After so long without news what is left is less than the trainer's smallest batch. It waits for the next runs."""


class Settling:
    """Follows experiences of a model and what became of them. `until_settled` as often as needed."""

    def __init__(self, bus: str, model: str) -> None:
        self._bus, self._model = bus, model
        self._follow = Follower(Experience.topic, TrainingMetrics.topic)
        self._open: set[str] = set()
        self._version: str | None = None
        """The newest one."""
        self._changed_s = 0.0

    async def until_settled(self, watch: Watch, timeout_s: float) -> None:
        """Returns once the newest version is promoted or refused, and nothing waits for the trainer that it would take.
        Raises `StartFailed` when that takes longer."""
        deadline = time.monotonic() + timeout_s
        self._changed_s = time.monotonic()
        async with connected(self._bus) as topics:
            await self._read(topics)
            while not self._settled(watch):
                if time.monotonic() > deadline:
                    raise StartFailed(
                        f"after {timeout_s:g} s {len(self._open)} experiences are not trained, and the newest version "
                        f"is {self._version}; see `headrace logs trainer` and `headrace logs registry`"
                    )
                await asyncio.sleep(_POLL_S)
                await self._read(topics)

    def _settled(self, watch: Watch) -> bool:
        still_s = time.monotonic() - self._changed_s
        decided = self._version is None or self._version in watch.champions or self._version in watch.rejected
        return decided and still_s > (_STILL_S if self._open else _QUIET_S)

    async def _read(self, topics: Topics) -> None:
        async for made in self._follow.events(topics, Experience):
            if made.model == self._model:
                self._open.add(made.experience_id)
                self._changed_s = time.monotonic()
        async for report in self._follow.events(topics, TrainingMetrics):
            if report.model == self._model:
                self._add(report)

    def _add(self, report: TrainingMetrics) -> None:
        self._changed_s = time.monotonic()
        self._version = report.version or self._version
        self._open -= {one.experience_id for one in report.verdicts}
        self._open |= {one.experience_id for one in report.undone if one.queued}
        self._open -= {one.experience_id for one in report.restored}
