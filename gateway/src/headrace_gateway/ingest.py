"""Trajectories of other runtimes: whoever has token ids and logprobs can train on Headrace without its gateway."""

from __future__ import annotations

from datetime import datetime

from pydantic import JsonValue, TypeAdapter, ValidationError

from headrace_gateway.refusals import ApiError
from headrace_gateway.requests import refusal_of
from headrace_schemas import Trajectory, ids

_OBJECT: TypeAdapter[dict[str, JsonValue]] = TypeAdapter(dict[str, JsonValue])


def trajectory_of(body: bytes, tenant: str, now: datetime) -> Trajectory:
    """One `Trajectory` in JSON. What the caller cannot know better than we is filled in: tenant, session key, time.

    Raises `ApiError`: 400 for what is not JSON, 403 for somebody else's tenant, 422 with the field at fault.
    """
    try:
        fields = _OBJECT.validate_json(body)
    except ValidationError as error:
        raise refusal_of(error, Trajectory, 422) from None
    session_id = fields.get("session_id")
    defaults: dict[str, JsonValue] = {"tenant": tenant, "end_reason": "ingest", "time": now.isoformat()}
    if isinstance(session_id, str):
        defaults["session_key"] = ids.session_key(tenant, session_id)
    fields = {**defaults, **fields}
    try:
        trajectory = Trajectory.model_validate(fields)
    except ValidationError as error:
        raise refusal_of(error, Trajectory, 422) from None
    _check(trajectory, tenant)
    return trajectory


def _check(trajectory: Trajectory, tenant: str) -> None:
    if trajectory.tenant != tenant:
        raise ApiError(403, "wrong_tenant", f"tenant: this API key writes for {tenant!r} only", "tenant")
    if trajectory.session_key != ids.session_key(tenant, trajectory.session_id):
        message = "session_key: is not that of tenant and session_id; leave it out"
        raise ApiError(422, "invalid_value", message, "session_key")
    if not trajectory.branches:
        raise ApiError(
            422, "invalid_value", "branches: at least one is needed, with token ids and logprobs", "branches"
        )
    if any("\0" in name for name in (trajectory.trajectory_id, *trajectory.turn_ids)):
        raise ApiError(422, "invalid_value", "an id holds a NUL character", "trajectory_id")
