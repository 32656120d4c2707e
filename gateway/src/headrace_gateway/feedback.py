"""Feedback as events, one for each session that it touches. Whether the ids exist is found out later (P10)."""

from __future__ import annotations

from headrace_gateway.access import Caller
from headrace_gateway.feedback_request import FeedbackRequest, TrinityFeedback
from headrace_runtime.clock import Clock
from headrace_schemas import Feedback, ids


def events_of(request: FeedbackRequest, caller: Caller, clock: Clock) -> list[Feedback]:
    """Each event carries the whole list of ids: its collector needs to know what else belonged to the run."""
    targets = request.targets
    now = clock.now()
    feedback_id = request.feedback_id or ids.uuid7().hex
    return [
        Feedback(
            time=now,
            feedback_id=feedback_id,
            session_key=key,
            session_id=request.session_id,
            tenant=caller.tenant,
            msg_ids=targets,
            task_id=request.task_id,
            run_id=request.run_id,
            source=request.source,
            value=request.value,
            withdrawn=request.withdrawn,
            ends_session=request.ends_session,
            comment=request.comment,
            context=request.context,
        )
        for key in session_keys(caller.tenant, request.session_id, targets)
    ]


def from_trinity(request: TrinityFeedback) -> FeedbackRequest:
    """Trinity's reward in our words. The run stays open until its `/commit`, or until it is idle."""
    return FeedbackRequest(
        msg_ids=request.msg_ids, value=request.reward, task_id=request.task_id, run_id=request.run_id
    )


def session_keys(tenant: str, session_id: str | None, targets: tuple[str, ...]) -> list[str]:
    """The partitions' keys, in order of first mention.

    An id that is not one of ours is nobody's turn yet: alone it gets a key of its own, so that it is kept and counted.
    """
    found = [key for target in targets if (key := ids.key_of_response(target)) is not None]
    if session_id is not None:
        found.insert(0, ids.session_key(tenant, session_id))
    return list(dict.fromkeys(found)) or [ids.session_key(tenant, f"unknown-{targets[0]}")]
