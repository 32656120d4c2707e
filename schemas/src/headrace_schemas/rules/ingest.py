"""Validation of ingested trajectories, for HTTP and Kafka alike. The functions are pure.

Times are compared with each other and with a range of years, never with the clock of the checking process.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from datetime import datetime

from headrace_schemas.events.trajectory import Trajectory
from headrace_schemas.values.ids import has_tenant_prefix, ingested_trajectory_id, key_of_response, session_key

OWN_END_REASON = "ingest"
_YEARS = range(2000, 2100)


@dataclass(frozen=True, slots=True)
class KnownModels:
    """Models and versions that ingested trajectories may name. If it is empty, models and versions are not checked."""

    versions: Mapping[str, Set[str]] = field(default_factory=dict)
    """All versions of each model, past and present."""
    vocabularies: Mapping[str, int] = field(default_factory=dict)
    """Vocabulary size of each model whose size is known."""


@dataclass(frozen=True, slots=True)
class Objection:
    """Reason why an ingested trajectory is invalid: the rule that it breaks, the field and an explanation."""

    code: str
    """A short, stable name of the rule."""
    field: str
    """The path of the invalid field."""
    message: str
    """The value, the problem and the remedy."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


def find_objection(trajectory: Trajectory, known_models: KnownModels) -> Objection | None:
    """Return the first rule that the trajectory breaks, or None if it is valid."""
    return _check_identity(trajectory) or _check_times(trajectory) or _check_versions(trajectory, known_models)


def _check_identity(trajectory: Trajectory) -> Objection | None:
    if trajectory.end_reason != OWN_END_REASON:
        message = f"{trajectory.end_reason!r} is reserved for the collector; use {OWN_END_REASON!r} or omit the field"
        return Objection("foreign_end_reason", "end_reason", message)
    if trajectory.session_key != session_key(trajectory.tenant, trajectory.session_id):
        message = "does not belong to tenant and session_id; omit the field over HTTP"
        return Objection("foreign_session_key", "session_key", message)
    if not trajectory.branches:
        return Objection("no_branches", "branches", "is empty; send at least one branch with token ids and logprobs")
    if any("\0" in name for name in (trajectory.trajectory_id, *trajectory.turn_ids)):
        return Objection("invalid_id", "trajectory_id", "or a turn id contains a NUL character; remove it")
    own_id = ingested_trajectory_id(trajectory.tenant, trajectory.trajectory_id)
    if has_tenant_prefix(trajectory.trajectory_id) and own_id != trajectory.trajectory_id:
        message = "begins with the prefix of another tenant; choose a name that does not begin with `tenant-`"
        return Objection("foreign_trajectory_id", "trajectory_id", message)
    captured_turn = next((turn for turn in trajectory.turn_ids if key_of_response(turn) is not None), None)
    if captured_turn is not None:
        message = (
            f"{captured_turn!r} is the id of a turn that the gateway captured; the collector builds its trajectory, so "
            "do not ingest it"
        )
        return Objection("captured_turn", "branches.spans.turn_id", message)
    return None


def _check_times(trajectory: Trajectory) -> Objection | None:
    for name in ("time", "started_at"):
        value: datetime = getattr(trajectory, name)
        if value.year not in _YEARS:
            return Objection("impossible_time", name, f"the year {value.year} is not from {_YEARS[0]} to {_YEARS[-1]}")
    if trajectory.time < trajectory.started_at:
        message = f"{trajectory.time.isoformat()} is before started_at, {trajectory.started_at.isoformat()}"
        return Objection("impossible_time", "time", message)
    return None


def _check_versions(trajectory: Trajectory, known_models: KnownModels) -> Objection | None:
    if not known_models.versions:
        return None
    versions = known_models.versions.get(trajectory.model)
    if versions is None:
        names = ", ".join(sorted(known_models.versions)[:5])
        return Objection("unknown_model", "model", f"{trajectory.model!r} is not a model here; the models are {names}")
    # Another server's versions are not known here, and none of its tokens is trained by its logprobs.
    spans = [span for branch in trajectory.branches for span in branch.spans if span.no_logprobs != "foreign"]
    named = [*(span.version for span in spans), *(turn.version for turn in trajectory.left_out if turn.version)]
    unknown_version = next((version for version in named if version not in versions), None)
    if unknown_version is not None:
        message = f"{unknown_version!r} is not a version of {trajectory.model}; `headrace models` lists them"
        return Objection("unknown_version", "branches.spans.version", message)
    size = known_models.vocabularies.get(trajectory.model)
    largest = max(max(branch.token_ids) for branch in trajectory.branches)
    if size is not None and largest >= size:
        message = f"{largest} is outside the vocabulary of {trajectory.model}, which has {size} token ids"
        return Objection("unknown_token", "branches.token_ids", message)
    return None
