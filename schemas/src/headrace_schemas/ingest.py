"""The rules for a trajectory from outside, over HTTP and over Kafka alike. Pure.

Times are compared with each other and with the calendar, never with the clock of the process that checks.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime

from headrace_schemas.events.trajectory import Trajectory
from headrace_schemas.ids import has_tenant_prefix, ingested_trajectory_id, key_of_response, session_key

OWN_END_REASON = "ingest"
_YEARS = range(2000, 2100)


@dataclass(frozen=True, slots=True)
class Known:
    """The known models. Without any, models and versions are not checked: nothing serves or trains yet."""

    versions: Mapping[str, Set[str]] = field(default_factory=dict)
    """Model to all of its versions, past and present."""
    vocabularies: Mapping[str, int] = field(default_factory=dict)
    """Model to how many token ids it has; models whose size is not known are not in it."""


@dataclass(frozen=True, slots=True)
class Objection:
    """`code` is short and stable, `field` is what is at fault, `message` names value and remedy."""

    code: str
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def objection(trajectory: Trajectory, known: Known) -> Objection | None:
    """The first rule that the trajectory breaks; None when it breaks none."""
    return _identity(trajectory) or _times(trajectory) or _tokens(trajectory, known)


def _identity(trajectory: Trajectory) -> Objection | None:
    if trajectory.end_reason != OWN_END_REASON:
        message = f"{trajectory.end_reason!r} is for the collector alone; use {OWN_END_REASON!r} or leave it out"
        return Objection("foreign_end_reason", "end_reason", message)
    if trajectory.session_key != session_key(trajectory.tenant, trajectory.session_id):
        message = "is not that of tenant and session_id; over HTTP leave it out"
        return Objection("foreign_session_key", "session_key", message)
    if not trajectory.branches:
        return Objection("no_branches", "branches", "at least one is needed, with token ids and logprobs")
    if any("\0" in name for name in (trajectory.trajectory_id, *trajectory.turn_ids)):
        return Objection("invalid_id", "trajectory_id", "an id holds a NUL character")
    own_id = ingested_trajectory_id(trajectory.tenant, trajectory.trajectory_id)
    if has_tenant_prefix(trajectory.trajectory_id) and own_id != trajectory.trajectory_id:
        message = "begins with the prefix of another tenant; choose a name that does not begin with `tenant-`"
        return Objection("foreign_trajectory_id", "trajectory_id", message)
    taken = next((turn for turn in trajectory.turn_ids if key_of_response(turn) is not None), None)
    if taken is not None:
        message = f"turn {taken!r} has the id of a call through the gateway, whose trajectory the collector makes"
        return Objection("captured_turn", "branches.spans.turn_id", message)
    return None


def _times(trajectory: Trajectory) -> Objection | None:
    for name in ("time", "started_at"):
        value: datetime = getattr(trajectory, name)
        if value.year not in _YEARS:
            return Objection("impossible_time", name, f"the year {value.year} is out of range")
    if trajectory.time < trajectory.started_at:
        message = f"{trajectory.time.isoformat()} is before started_at, {trajectory.started_at.isoformat()}"
        return Objection("impossible_time", "time", message)
    return None


def _tokens(trajectory: Trajectory, known: Known) -> Objection | None:
    if not known.versions:
        return None
    versions = known.versions.get(trajectory.model)
    if versions is None:
        listed = ", ".join(sorted(known.versions)[:5])
        return Objection("unknown_model", "model", f"{trajectory.model!r} is not a model here; the models are {listed}")
    strange = next((version for version in trajectory.versions if version not in versions), None)
    if strange is not None:
        message = f"{strange!r} is not a version of {trajectory.model}; `headrace models` lists them"
        return Objection("unknown_version", "branches.spans.version", message)
    size = known.vocabularies.get(trajectory.model)
    largest = max(max(branch.token_ids) for branch in trajectory.branches)
    if size is not None and largest >= size:
        message = f"{largest} is beyond the vocabulary of {trajectory.model}, which has {size} ids"
        return Objection("unknown_token", "branches.token_ids", message)
    return None
