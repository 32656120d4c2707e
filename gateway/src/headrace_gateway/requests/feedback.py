"""Conversion of feedback requests to events, one for each session, and reading of the end offsets that order them.

Consumers check the ids later. Each event lists only the turns of its own session, so that all events together are
about as large as the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from aiokafka.partitioner import murmur2
from pydantic import ValidationError

from headrace_gateway.access.keys import Caller
from headrace_gateway.access.refusals import ApiError
from headrace_gateway.requests.feedback_request import FeedbackRequest, TrinityFeedback
from headrace_gateway.requests.http_request import refusal_of
from headrace_runtime.clock import Clock
from headrace_runtime.kafka.consumer import Offsets
from headrace_runtime.settings.source_values import SourceValues
from headrace_schemas import Feedback, Trajectory, Turn
from headrace_schemas.events.feedback import task_key
from headrace_schemas.events.opinion import metric_source, values_of
from headrace_schemas.values import ids
from headrace_schemas.values.text import printable

_SESSIONS_MAX = 64
"""Maximum number of sessions of the turns in one feedback; more are refused with 422. Each session counts as a
request."""
GROWTH_MAX = 9.0
"""Maximum size of the events of a feedback about several sessions, as a multiple of the request's bytes (at least 1
KiB); larger ones are refused with 413."""

_HEADERS_BYTES = 300
"""Estimated bytes that an event's envelope adds in the log."""
_BODY_BYTES_MIN = 1024
TOPICS = (Turn.topic, Trajectory.topic)
Ends = Mapping[str, Mapping[int, int]]


def events_of(
    request: FeedbackRequest,
    caller: Caller,
    clock: Clock,
    body_bytes: int,
    *,
    copies: int = 1,
) -> list[Feedback]:
    """Convert a feedback request to feedback events, one for each session that it is about.

    Args:
        copies: number of partitions that each event is sent to.

    Raises:
        ApiError: 400 for fields that contradict each other, 403 for sessions that the key may not touch, 413 for copies
            that are too large, 422 for too many sessions.
    """
    _check_bound(request, caller)
    if request.level == "task":
        turns: Mapping[str, Sequence[str]] = {task_key(caller.tenant, request.task_id or ""): ()}
    else:
        turns = turns_by_session(caller.tenant, request.session_id or caller.session_id, request.targets)
    if len(turns) > _SESSIONS_MAX:
        message = f"msg_ids: {len(turns)} sessions; send at most {_SESSIONS_MAX} in one feedback"
        raise ApiError(422, "too_many_sessions", message, "msg_ids")
    try:
        events = _events(request, caller, clock, turns)
    except ValidationError as error:
        raise refusal_of(error, FeedbackRequest) from None
    _check_size(events, copies, body_bytes)
    return events


def _check_bound(request: FeedbackRequest, caller: Caller) -> None:
    """Check that a key that is bound to a session sends feedback about that session alone. Raises `ApiError` 403."""
    if caller.session_id is None:
        return
    if request.level == "task":
        caller.check_unbound("feedback about a task")
    caller.check_session(request.session_id, "session_id")
    session_key = ids.session_key(caller.tenant, caller.session_id)
    if any(ids.key_of_response(target) not in (None, session_key) for target in request.targets):
        field = "msg_ids" if request.msg_ids else "preference" if request.preference else "response_id"
        message = f"{field}: names a response of another session than the one that this API key is bound to"
        raise ApiError(403, "wrong_session", message, field)


def _events(
    request: FeedbackRequest, caller: Caller, clock: Clock, turns: Mapping[str, Sequence[str]]
) -> list[Feedback]:
    now = clock.now()
    feedback_id = request.feedback_id or ids.uuid7().hex
    preference = request.compared
    lists_a_run = request.is_value and request.level is None and request.choice is None
    level = "response" if request.is_value and request.level is None and request.choice is not None else request.level
    return [
        Feedback(
            time=now,
            feedback_id=feedback_id,
            session_key=key,
            session_id=request.session_id,
            tenant=caller.tenant,
            msg_ids=tuple(turn_ids),
            sessions=len(turns) if lists_a_run else 1,
            level=level,
            choice=request.choice,
            task_id=request.task_id,
            run_id=request.run_id,
            source=request.source,
            rater=request.rater,
            metric=request.metric,
            value=request.value,
            rating=request.rating,
            scale=request.scale,
            label=request.label,
            parts=request.parts,
            edit=request.edit,
            preference=preference,
            kind=request.kind,
            withdrawn=request.withdrawn,
            ends_session=request.ends_session,
            comment=request.comment,
            context=request.context,
        )
        for key, turn_ids in turns.items()
    ]


def check_values_of(event: Feedback, values: SourceValues) -> None:
    """Check that the values of a feedback event are inside the ranges that the settings declare for their sources. The
    scorer would refuse others later.

    Raises:
        ApiError: 400. The message names the field and the source.
    """
    for source, value in values_of(event, values.labels):
        violation = values.violation(source, value)
        if violation is not None:
            raise ApiError(400, "out_of_range", violation, _field_of(event, source))


def _field_of(event: Feedback, source: str) -> str:
    """Return the name of the request field that contains the value of a reward source.

    It is `parts.NAME` if the source is that of the metric NAME, else `label`, `value` or `rating`.
    """
    part = next((metric for metric in event.parts if metric_source(event.source, metric) == source), None)
    if part is not None:
        return f"parts.{printable(part)}"
    return "label" if event.label is not None else "value" if event.rating is None else "rating"


def _check_size(events: Sequence[Feedback], copies: int, body_bytes: int) -> None:
    if len(events) * copies == 1:
        return
    allowed = round(max(body_bytes, _BODY_BYTES_MIN) * GROWTH_MAX)
    size = copies * sum(len(event.to_json()) + _HEADERS_BYTES for event in events)
    if size > allowed:
        message = (
            f"a copy for each of {len(events) * copies} {'sessions' if copies == 1 else 'partitions'} would be {size} "
            f"bytes, more than the {allowed} allowed; send comment and context in a feedback for each session"
        )
        raise ApiError(413, "feedback_too_large", message, "context")


def from_trinity(request: TrinityFeedback) -> FeedbackRequest:
    """Convert Trinity's reward to a feedback request. The run stays open until Trinity's `/commit`, or until it is
    idle."""
    return FeedbackRequest(
        msg_ids=request.msg_ids, value=request.reward, task_id=request.task_id, run_id=request.run_id
    )


def turns_by_session(tenant: str, session_id: str | None, targets: Sequence[str]) -> dict[str, list[str]]:
    """Group the turns that feedback is about by their sessions, because each session gets an event of its own.

    Args:
        tenant: tenant of the caller.
        session_id: session that the request names, or None.
        targets: ids of the responses that the request names.

    Returns:
        The response ids of each session key, without duplicates and in the order of their first mention. If no response
        is named, the named session has an empty list. An id of unknown format belongs to the named session, else to the
        first of the others; if there is no session at all, it gets a session key of its own, so that the feedback is
        stored.
    """
    named = None if session_id is None else ids.session_key(tenant, session_id)
    turns: dict[str, list[str]] = {} if named is None else {named: []}
    strange: list[str] = []
    for target in dict.fromkeys(targets):
        key = ids.key_of_response(target)
        (strange if key is None else turns.setdefault(key, [])).append(target)
    if strange:
        turns.setdefault(next(iter(turns), None) or ids.session_key(tenant, f"unknown-{strange[0]}"), []).extend(
            strange
        )
    if targets:  # a named session without listed turns is not meant as a whole
        turns = {key: turn_ids for key, turn_ids in turns.items() if turn_ids}
    return turns


class LogEnds:
    """Reader of the present end offsets of `turns` and `trajectories` on the bus.

    Callers that arrive during a request to the bus share the next one, so that no result is older than its call.
    """

    def __init__(self, offsets: Offsets) -> None:
        self._offsets = offsets
        self._pending: asyncio.Task[Ends] | None = None
        self._next: asyncio.Task[Ends] | None = None

    async def start(self) -> None:
        """Connect to the bus. Raises `Unavailable` if the bus does not respond."""
        await self._offsets.start()

    async def stop(self) -> None:
        await self._offsets.stop()

    async def ends(self) -> Ends:
        """Return the present end offset of each partition, by topic. Raises `Unavailable`."""
        if self._next is None:
            self._next = asyncio.create_task(self._read_ends(self._pending))
            self._next.add_done_callback(_retrieve_error)
        return await asyncio.shield(self._next)

    async def _read_ends(self, before: asyncio.Task[Ends] | None) -> Ends:
        if before is not None:
            await asyncio.wait([before])
        self._pending, self._next = self._next, None
        return {topic: await self._offsets.ends(topic) for topic in TOPICS}


def _retrieve_error(task: asyncio.Task[Ends]) -> None:
    """Retrieve the exception of a finished task, so that asyncio does not log it as never retrieved.

    All callers that waited for the task may have been cancelled.
    """
    if not task.cancelled():
        task.exception()


def end_offsets_of(ends: Ends, key: str) -> Mapping[str, int]:
    """Return, by topic, the end offset of the partition that events with `key` are sent to."""
    hashed = murmur2(key.encode()) & 0x7FFFFFFF
    return {topic: offsets[hashed % len(offsets)] for topic, offsets in ends.items() if offsets}
