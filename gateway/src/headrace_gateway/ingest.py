"""Trajectories of other runtimes: any runtime with token ids and logprobs can train on Headrace without its gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime

from pydantic import ValidationError
from pydantic_core import from_json

from headrace_gateway.refusals import ApiError
from headrace_gateway.requests import refusal_of
from headrace_schemas import Trajectory
from headrace_schemas.rules.ingest import KnownModels, find_objection
from headrace_schemas.values import ids

_PLAIN = frozenset({"foreign_session_key", "foreign_trajectory_id", "no_branches", "invalid_id"})
"""Objections that are about one value alone."""

Lookup = Callable[[str], Awaitable[KnownModels]]
"""Returns the known models, with the vocabulary of the named one."""


def trajectory_of(body: bytes, tenant: str, now: datetime) -> Trajectory:
    """Return the `Trajectory` of a JSON body. The gateway sets tenant, session key and time. The function may run in
    any thread.

    Raises:
        ApiError: 400 for a body that is no JSON, 403 for the tenant of another caller, 422 with the field at fault.
    """
    try:
        fields = from_json(body)
    except ValueError as error:
        raise ApiError(400, "invalid_json", f"the body is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ApiError(422, "invalid_value", "the body must be a JSON object: one trajectory")
    session_id = fields.get("session_id")
    defaults: dict[str, object] = {"tenant": tenant, "end_reason": "ingest", "time": now.isoformat()}
    if isinstance(session_id, str):
        defaults["session_key"] = ids.session_key(tenant, session_id)
    names = set(fields)
    fields = {**defaults, **fields}
    try:
        trajectory = Trajectory.model_validate(fields)
    except ValidationError as error:
        raise refusal_of(error, Trajectory, 422) from None
    if trajectory.tenant != tenant:
        raise ApiError(403, "wrong_tenant", f"tenant: this API key writes for {tenant!r} only", "tenant")
    own_id = ids.ingested_trajectory_id(tenant, trajectory.trajectory_id)
    trajectory = trajectory.model_copy(update={"trajectory_id": own_id})
    if "time" not in names and trajectory.started_at > trajectory.time:  # a clock that is ahead of ours is no error
        trajectory = trajectory.model_copy(update={"time": trajectory.started_at})
    return trajectory


def check(trajectory: Trajectory, models: KnownModels) -> None:
    """Raises `ApiError` 422 for a trajectory that must not come from outside, or of an unknown model or version."""
    objection = find_objection(trajectory, models)
    if objection is not None:
        code = "invalid_value" if objection.code in _PLAIN else objection.code
        raise ApiError(422, code, str(objection), objection.field)


async def nothing_known(_model: str) -> KnownModels:
    """For a gateway that follows no topics."""
    return KnownModels()
