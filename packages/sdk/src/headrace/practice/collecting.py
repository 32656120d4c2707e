"""The record of one conversation, made of the trajectory that the services captured, and its reward as feedback."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.errors import UsageError
from headrace.practice.agents import asked, plugged
from headrace.practice.arguments import check_names, real_number, score
from headrace.practice.blocking import blocking
from headrace.practice.outcomes import OutcomeWatch
from headrace.sessions import Purpose
from headrace.stack import Stack, current
from headrace_schemas import Trajectory

Rate = Callable[[dict[str, Any]], Mapping[str, float] | float | None]
"""The rewards of a record by name, or one number. None: the services' own sources of rewards are to say it."""
RATING_MAX = 5
_CLOSED_S = 60.0


def run_and_collect(agent: Any, user_input: str, **options: Any) -> dict[str, Any]:
    """Run the agent once on the stack that was entered, and return the record; `collected` says what `options` are."""
    return collected(agent, user_input, **options)[0]


def collected(
    agent: Any,
    user_input: str,
    *,
    reward_function: Rate | None = None,
    user_feedback: Mapping[str, Any] | None = None,
    purpose: Purpose = "train",
    model: str | None = None,
    task_id: str | None = None,
) -> tuple[dict[str, Any], Any]:
    """The record of one run, and what the agent answered. What has rewards is sent at once, but for evaluations.

    `user_feedback` = {"rating": 1 to 5, "comment": ...}. `model` is another one than the stack's, or a version. Runs
    with one `task_id` are compared with each other; a run without one, as real traffic mostly is, with all others."""
    said = user_feedback or {}
    check_names("user_feedback", said, ("rating", "comment"))
    rating, comment = said.get("rating"), str(said.get("comment") or "")
    if rating is not None:
        rating = real_number("user_feedback.rating", rating)
        if not 1 <= rating <= RATING_MAX:
            raise ValueError(f"rating = {rating:g}: a rating is 1 to {RATING_MAX}")
    if comment and rating is None and reward_function is None:
        raise UsageError(
            "user_feedback.comment: goes with a reward; give a rating or a reward_function, or leave it out"
        )
    if said and purpose != "train":
        raise UsageError(f"user_feedback: nothing is sent with purpose = {purpose!r}; leave it out")
    stack = current()
    record, answer = blocking(_collected(stack, agent, user_input, purpose, model or stack.model, task_id))
    rewards = dict(_named(reward_function(record)) if reward_function else {})
    if rating is not None:
        rewards["user_satisfaction"] = rating / RATING_MAX
    record |= {"rewards": rewards, "total_reward": math.fsum(rewards.values()) if rewards else None}
    if purpose == "train":
        say(stack, record, comment)
    return record, answer


def say(stack: Stack, record: Mapping[str, Any], comment: str = "") -> None:
    """Send the record's total as feedback about its session. Without rewards nothing is sent, and never a 0. The same
    total counts once, however often it is sent."""
    total = record.get("total_reward")
    if total is not None:
        total = score("total_reward", total)
        session = str(record["conversation_id"])
        context = {"parts": dict(record.get("rewards") or {})}
        send = partial(stack.client.feedback, session_id=session, value=total, feedback_id=f"{session}:{total!r}")
        send(context=context, comment=comment) if comment else send(context=context)


def record_of(trajectory: Trajectory) -> dict[str, Any]:
    """The record without its rewards. `thoughts` is what the model said before its last message, or thought aloud."""
    results = {one.tool_call_id: one.text for one in trajectory.messages if one.role == "tool"}
    spoken = [one for one in trajectory.messages if one.role == "assistant"]
    aloud = [one.reasoning_content or (one.text if one.tool_calls else "") for one in spoken]
    calls = [call for one in spoken for call in one.tool_calls or ()]
    return {
        "conversation_id": trajectory.session_id,
        "messages": [{"role": one.role, "content": one.text} for one in trajectory.messages],
        "thoughts": [{"step": at, "content": text} for at, text in enumerate(filter(None, aloud), 1)],
        "tool_calls": [
            {"tool": call.function.name, "args": _json(call.function.arguments), "result": results.get(call.id)}
            for call in calls
        ],
    }


async def _collected(
    stack: Stack, agent: Any, text: str, purpose: Purpose, model: str, task_id: str | None
) -> tuple[dict[str, Any], Any]:
    watch = OutcomeWatch(stack)
    await watch.begin()
    async with stack.async_client() as client:
        session = client.session(task_id=task_id, purpose=purpose)
        async with session:
            with plugged(agent, stack.base_url, session.headers, model, stack.api_key):
                answer = await asked(agent, text)
    trajectory = await watch.until_closed(session.session_id, _CLOSED_S)
    if trajectory is None:
        raise UsageError(f"the agent made no call to the model for {text!r}; nothing is there to be collected")
    return record_of(trajectory), answer


def _named(rewards: Mapping[str, float] | float | None) -> Mapping[str, float]:
    """Return the rewards by name, whatever library made the numbers."""
    if rewards is None:
        return {}
    named = rewards if isinstance(rewards, Mapping) else {"reward": rewards}
    return {str(name): score(f"reward {name}", value) for name, value in named.items()}


def _json(text: str) -> Any:
    """Arguments as the model wrote them where they are no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
