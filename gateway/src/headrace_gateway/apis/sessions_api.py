"""Endpoints for feedback, ends of sessions, and trajectories of other runtimes, and Trinity's `/feedback` and
`/commit`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.admission import Admission, AdmittedRequest
from headrace_gateway.capture.recent_turns import RecentTurns
from headrace_gateway.requests.feedback import check_values_of, events_of, from_trinity
from headrace_gateway.requests.feedback_request import FeedbackRequest, TrinityCommit, TrinityFeedback
from headrace_gateway.requests.http_request import check_values, parse, refusal_of
from headrace_gateway.requests.identity import label
from headrace_gateway.routing.placement import StickyVersions
from headrace_runtime.clock import Clock
from headrace_runtime.kafka.topics import catalogue
from headrace_runtime.process.event_loop import WorkerThreads
from headrace_runtime.settings.source_values import SourceValues
from headrace_schemas import Event, Feedback, SessionEnd, Trajectory
from headrace_schemas.rules.ingest import KnownModels, find_objection
from headrace_schemas.values import ids

_PLAIN = frozenset({"foreign_session_key", "foreign_trajectory_id", "no_branches", "invalid_id"})
"""Codes of refusals that concern one value alone. Clients get `invalid_value` instead of them."""

Lookup = Callable[[str], Awaitable[KnownModels]]
"""Function that returns the models and versions known from the bus, with the vocabulary of the named model."""
T = TypeVar("T")
_TRINITY_OK = {"status": "success"}
"""Response body of Trinity's endpoints; its clients need a JSON object with any status 2xx."""
_PARTITIONS = catalogue()[SessionEnd.topic].partitions
"""Number of partitions of `session-ends`. Commits and feedback about a task are sent to each partition."""


def trajectory_of(body: bytes, tenant: str, now: datetime) -> Trajectory:
    """Parse the body of `POST /v1/trajectories`. The gateway sets tenant, session key and time. The function may run in
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
    """Check that a trajectory may be ingested and that its model and version are known. Raises `ApiError` 422."""
    objection = find_objection(trajectory, models)
    if objection is not None:
        code = "invalid_value" if objection.code in _PLAIN else objection.code
        raise ApiError(422, code, str(objection), objection.field)


async def no_known_models(_model: str) -> KnownModels:
    """Return a `KnownModels` without any model or version, for a gateway that reads no topics.

    With it, trajectories of any model and version may be ingested.
    """
    return KnownModels()


@dataclass(frozen=True, slots=True)
class SessionsApi:
    """Endpoints of `/v1/feedback`, `/v1/sessions/{id}/end`, `/v1/trajectories`, and of Trinity.

    They respond once the events are durable. Consumers check later whether the ids exist.
    """

    admission: Admission
    sticky_versions: StickyVersions
    clock: Clock
    workers: WorkerThreads
    recent: RecentTurns
    known_models: Lookup = no_known_models
    values: SourceValues = field(default_factory=SourceValues)

    async def feedback(self, request: Request) -> Response:
        async with self.admission.enter(request.scope, request.receive, "feedback") as admitted:
            events, copies = await self._read(admitted, Feedback, self._feedback)
            size_bytes = len(admitted.body)
            await self.admission.publish_many(admitted.caller, events, size_bytes=size_bytes, copies=copies)
            for event in events:
                if event.ends_session:
                    self.sticky_versions.drop(event.tenant, event.session_key)
            more = {"feedback_id": events[0].feedback_id, **self._effect_fields(events)}
            return _accepted(events if copies == 1 else [], **more)

    async def end(self, request: Request) -> Response:
        async with self.admission.enter(request.scope, request.receive, "feedback") as admitted:
            session_id = label(request.path_params["session_id"], "session_id")
            assert session_id is not None
            admitted.caller.check_session(session_id, "the session in the path")
            key = ids.session_key(admitted.caller.tenant, session_id)
            event = SessionEnd(
                time=self.clock.now(),
                end_id=ids.uuid7().hex,
                session_key=key,
                session_id=session_id,
                tenant=admitted.caller.tenant,
            )
            await self.admission.publish_many(admitted.caller, [event])
            self.sticky_versions.drop(event.tenant, key)
            return _accepted([event], session_id=session_id)

    async def trajectories(self, request: Request) -> Response:
        async with self.admission.enter(request.scope, request.receive, "admin") as admitted:
            now = self.clock.now()
            event = await self._read(
                admitted, Trajectory, lambda request: trajectory_of(request.body, request.caller.tenant, now)
            )
            check(event, await self.known_models(event.model))
            admitted.caller.check_session(event.session_id, "session_id")
            if not admitted.caller.may_use(event.model):
                raise ApiError(
                    403,
                    "wrong_model",
                    f"model: this API key may not send trajectories of {event.model!r}",
                    "model",
                )
            await self.admission.publish_many(admitted.caller, [event], size_bytes=len(admitted.body))
            return _accepted([event], trajectory_id=event.trajectory_id)

    async def trinity_feedback(self, request: Request) -> Response:
        async with self.admission.enter(request.scope, request.receive, "feedback") as admitted:
            events = await self._read(admitted, Feedback, self._trinity_feedback)
            if events:
                await self.admission.publish_many(admitted.caller, events, size_bytes=len(admitted.body))
            teaching = self._effect_fields(events)
            return JSONResponse(_TRINITY_OK if teaching.get("teaches", True) else {**_TRINITY_OK, **teaching})

    async def trinity_commit(self, request: Request) -> Response:
        async with self.admission.enter(request.scope, request.receive, "feedback") as admitted:
            admitted.caller.check_unbound("a commit")
            body = await self._read(admitted, SessionEnd, _commit)
            try:
                before = body.before
            except (ValueError, OverflowError, OSError):
                raise ApiError(
                    400,
                    "invalid_value",
                    "time_threshold: must be a time in seconds or milliseconds since 1970, or in ISO 8601",
                    "time_threshold",
                ) from None
            tenant = admitted.caller.tenant
            now = self.clock.now()
            end = SessionEnd(
                time=now, end_id=ids.uuid7().hex, scope="tenant", tenant=tenant, reason="commit", before=before
            )
            await self.admission.publish_many(admitted.caller, [end], copies=_PARTITIONS)
            return JSONResponse(_TRINITY_OK)

    async def _read(self, admitted: AdmittedRequest, kind: type[Event], read: Callable[[AdmittedRequest], T]) -> T:
        """Parse the body with `read`, in a worker thread if it is large. Raises `ApiError`, for example 413 for more
        JSON values than an event of `kind` may contain."""

        def checked() -> T:
            check_values(admitted.body, kind.values_max, containers_max=kind.containers_max)
            return read(admitted)

        return await self.workers.run(len(admitted.body), checked, admitted.caller.tenant)

    def _feedback(self, admitted: AdmittedRequest) -> tuple[list[Feedback], int]:
        """Return the events of a feedback request, and the number of partitions that each event is sent to."""
        request = parse(FeedbackRequest, admitted.body)
        copies = _PARTITIONS if request.level == "task" else 1
        return self._events(admitted, request, copies), copies

    def _trinity_feedback(self, admitted: AdmittedRequest) -> list[Feedback]:
        request = parse(TrinityFeedback, admitted.body)
        return self._events(admitted, from_trinity(request)) if request.msg_ids else []

    def _effect_fields(self, events: Sequence[Feedback]) -> dict[str, bool | str]:
        """Return the fields `teaches` and `reason` of the response, which report whether the feedback can be trained.

        The result is empty if this is not known.
        """
        teaching = self.recent.training_effect(events) if events else None
        return {} if teaching is None else teaching.fields()

    def _events(self, admitted: AdmittedRequest, request: FeedbackRequest, copies: int = 1) -> list[Feedback]:
        events = events_of(request, admitted.caller, self.clock, len(admitted.body), copies=copies)
        check_values_of(events[0], self.values)
        return events


def _commit(admitted: AdmittedRequest) -> TrinityCommit:
    return parse(TrinityCommit, admitted.body.strip() or b"{}")


def _accepted(events: Sequence[Event], **more: bool | str) -> Response:
    return JSONResponse({"event_ids": [event.event_id for event in events], **more}, 202)
