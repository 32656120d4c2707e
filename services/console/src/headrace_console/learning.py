"""Whether a model learns: the audit scores of its versions, and a sentence about them. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from headrace_schemas.http.registry_api import VersionState

_Z95 = 1.96
REFUSED_STATES = frozenset({"rejected", "withdrawn", "skipped"})


@dataclass(frozen=True, slots=True)
class ScoredVersion:
    """A version with its audit score, as the registry measured it last."""

    version: str
    step: int
    state: str
    score: float
    error: float
    """Standard error of the score."""
    plays: int
    measured_at: datetime

    @property
    def lower(self) -> float:
        """Lower end of the 95 % interval, which is not below 0."""
        return max(0.0, self.score - _Z95 * self.error)

    @property
    def upper(self) -> float:
        """Upper end of the 95 % interval, which is not above 1."""
        return min(1.0, self.score + _Z95 * self.error)

    @property
    def is_refused(self) -> bool:
        """Whether the version serves no calls because it was refused."""
        return self.state in REFUSED_STATES


@dataclass(frozen=True, slots=True)
class Learning:
    """How the score of the champion differs from that of the first version, with the 95 % interval."""

    verdict: Literal["learns", "worse", "unclear", "unmeasured"]
    sentence: str
    swapped_at: datetime | None = None
    """Time of the last promotion."""


def scored_versions(versions: Sequence[VersionState]) -> list[ScoredVersion]:
    """Return the versions with an audit score, by step. A standard error has the floor that `guard` uses."""
    scored = []
    for version in versions:
        audits = [event for event in version.decisions if event.decision == "evaluated" and "score" in event.statistics]
        if not audits:
            continue
        numbers = audits[-1].statistics
        plays = numbers.get("tasks", 0.0)
        error = max(numbers.get("score_standard_error", 0.5), 1 / (plays + 2))
        scored.append(
            ScoredVersion(version.id, version.step, version.state, numbers["score"], error, int(plays), audits[-1].time)
        )
    return sorted(scored, key=lambda version: (version.step, version.version))


def describe_learning(model: str, champion: str | None, versions: Sequence[VersionState]) -> Learning:
    """Return whether the champion's audit score is shown to differ from that of the first measured version."""
    promotions = [event.time for version in versions for event in version.decisions if event.decision == "promoted"]
    swapped_at = max(promotions, default=None)
    scored = scored_versions(versions)
    last = next((version for version in scored if version.version == champion), None)
    if last is None or len(scored) < 2 or last == scored[0]:
        reason = "a gate program is not set, or no version after the first was measured"
        number = f" Its score is {last.score:.2f}." if last is not None else ""
        return Learning("unmeasured", f"{model}: no audit score to compare yet ({reason}).{number}", swapped_at)
    first = scored[0]
    difference = last.score - first.score
    width = _Z95 * math.hypot(first.error, last.error)
    lower, upper = difference - width, difference + width
    count = len({version.step for version in scored if first.step <= version.step <= last.step}) - 1
    numbers = (
        f"audit score {first.score:.2f} → {last.score:.2f} in {count} version{'' if count == 1 else 's'} "
        f"(95 %: {lower:+.2f} to {upper:+.2f})"
    )
    if lower > 0:
        return Learning("learns", f"{model} learns: {numbers}.", swapped_at)
    if upper < 0:
        return Learning("worse", f"{model} got worse: {numbers}.", swapped_at)
    return Learning("unclear", f"{model} is not shown to change: {numbers}.", swapped_at)
