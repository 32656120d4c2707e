"""`POST /v1/feedback`, `/v1/sessions/{id}/end`, `/v1/trajectories`, and Trinity's `/feedback` and `/commit`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from headrace_gateway.door import Door, Entered
from headrace_gateway.feedback import events_of, from_trinity
from headrace_gateway.feedback_request import FeedbackRequest, TrinityCommit, TrinityFeedback
from headrace_gateway.identity import label
from headrace_gateway.ingest import Lookup, nothing_known, trajectory_of
from headrace_gateway.pins import Pins
from headrace_gateway.refusals import ApiError
from headrace_gateway.requests import parse
from headrace_gateway.settings import FeedbackSettings
from headrace_runtime.clock import Clock
from headrace_runtime.topics import catalogue
from headrace_schemas import Event, Feedback, SessionEnd, ids

_TRINITY_OK = {"status": "success"}
"""What Trinity answers; its clients want a JSON object with any 2xx."""
_PARTITIONS = catalogue()[SessionEnd.topic].partitions
"""A commit is sent to each."""


@dataclass(frozen=True, slots=True)
class SessionsApi:
    """Everything that judges, ends or ingests sessions. Answered once durable; whether ids exist is found out later."""

    door: Door
    pins: Pins
    clock: Clock
    bounds: FeedbackSettings
    known: Lookup = nothing_known

    async def feedback(self, request: Request) -> Response:
        async with self.door.enter(request.scope, request.receive, "feedback") as entered:
            events = self._events(entered, parse(FeedbackRequest, entered.body))
            await self.door.publish_many(entered.caller, events)
            for event in events:
                if event.ends_session:
                    self.pins.drop(event.session_key)
            return _accepted(events, feedback_id=events[0].feedback_id)

    async def end(self, request: Request) -> Response:
        async with self.door.enter(request.scope, request.receive, "feedback") as entered:
            session_id = label(request.path_params["session_id"], "session_id")
            assert session_id is not None
            key = ids.session_key(entered.caller.tenant, session_id)
            event = SessionEnd(
                time=self.clock.now(),
                end_id=ids.uuid7().hex,
                session_key=key,
                session_id=session_id,
                tenant=entered.caller.tenant,
            )
            await self.door.publish(event)
            self.pins.drop(key)
            return _accepted([event], session_id=session_id)

    async def trajectories(self, request: Request) -> Response:
        async with self.door.enter(request.scope, request.receive, "admin") as entered:
            event = await trajectory_of(entered.body, entered.caller.tenant, self.clock.now(), self.known)
            if not entered.caller.may_use(event.model):
                raise ApiError(403, "wrong_model", f"model: this API key does not train {event.model!r}", "model")
            await self.door.publish(event)
            return _accepted([event], trajectory_id=event.trajectory_id)

    async def trinity_feedback(self, request: Request) -> Response:
        async with self.door.enter(request.scope, request.receive, "feedback") as entered:
            body = parse(TrinityFeedback, entered.body)
            if body.msg_ids:
                await self.door.publish_many(entered.caller, self._events(entered, from_trinity(body)))
            return JSONResponse(_TRINITY_OK)

    async def trinity_commit(self, request: Request) -> Response:
        async with self.door.enter(request.scope, request.receive, "feedback") as entered:
            body = parse(TrinityCommit, entered.body.strip() or b"{}")
            try:
                before = body.before
            except (ValueError, OverflowError, OSError):
                raise ApiError(400, "invalid_value", "time_threshold: no time", "time_threshold") from None
            tenant = entered.caller.tenant
            now = self.clock.now()
            end = SessionEnd(
                time=now, end_id=ids.uuid7().hex, scope="tenant", tenant=tenant, reason="commit", before=before
            )
            await self.door.publish_many(entered.caller, [end], copies=_PARTITIONS)
            return JSONResponse(_TRINITY_OK)

    def _events(self, entered: Entered, request: FeedbackRequest) -> list[Feedback]:
        return events_of(request, entered.caller, self.clock, self.bounds, len(entered.body))


def _accepted(events: Sequence[Event], **more: str) -> Response:
    return JSONResponse({"event_ids": [event.event_id for event in events], **more}, 202)
