"""Faults inside a call: armed by the plan of faults, taken by the next call of their kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Literal

from headrace_runtime.errors import Unavailable
from tests.simulation.process import CURRENT, Killed, Process

AtCommit = Literal["refused", "unanswered", "die_before", "die_after"]
"""Faults of a commit: not done, done with a lost answer, or death of the process before or after it."""


USUAL_COMMIT_S = 2e-3


class Mishaps:
    """Each armed mishap happens once."""

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._commits: dict[str, list[AtCommit]] = {}
        self._blob_deaths: Counter[str] = Counter()
        self.blobs_away = False
        self.commit_s = USUAL_COMMIT_S
        """How long a commit may take."""

    def arm_commit(self, service: str, mishap: AtCommit, times: int = 1) -> None:
        self._commits.setdefault(service, []).extend([mishap] * times)

    def at_commit(self, process: Process) -> AtCommit | None:
        armed = self._commits.get(process.service)
        if not armed:
            return None
        mishap = armed.pop(0)
        self._count(f"commit_{mishap}")
        return mishap

    def arm_blob_death(self, service: str, after: int) -> None:
        """The service's process dies before its `after`-th change of the blob store from now."""
        self._blob_deaths[service] = after

    def at_blob_change(self) -> None:
        """Before a blob or a pointer changes. Raises `Unavailable` while the store is away."""
        process = CURRENT.get()
        if process is None:
            return
        if process.dead:
            raise Killed(process.name)
        if self.blobs_away:
            raise Unavailable("the blob store is away")
        left = self._blob_deaths.get(process.service, 0)
        if left == 1:
            self._count("death_while_saving")
            process.die()
            del self._blob_deaths[process.service]
            raise Killed(process.name)
        if left:
            self._blob_deaths[process.service] = left - 1

    def heal(self) -> None:
        self._commits.clear()
        self._blob_deaths.clear()
        self.blobs_away = False
        self.commit_s = USUAL_COMMIT_S
