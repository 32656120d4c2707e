"""Records of conversations, built from captured trajectories, and their rewards, sent as feedback."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.sessions import Purpose
from headrace_integrations.practice.runs import call_agent, plugged
from headrace_integrations.practice.training import OutcomeWatch
from headrace_integrations.stack import Stack, current
from headrace_operations.arguments import check_names, real_number, score
from headrace_schemas import Trajectory

Rate = Callable[[dict[str, Any]], Mapping[str, float] | float | None]
"""Function that returns the rewards of a record by name, or one number, or None to leave the reward to the services'
sources."""
RATING_MAX = 5
_CLOSED_S = 60.0


def run_and_collect(agent: Any, user_input: str, **options: Any) -> dict[str, Any]:
    """Run the agent once on the entered stack, and return the record of the run. For `options` see `collect_run`."""
    return collect_run(agent, user_input, **options)[0]


def collect_run(
    agent: Any,
    user_input: str,
    *,
    reward_function: Rate | None = None,
    user_feedback: Mapping[str, Any] | None = None,
    purpose: Purpose = "train",
    model: str | None = None,
    task_id: str | None = None,
) -> tuple[dict[str, Any], Any]:
    """Run the agent once, send the rewards of the run, and return its record and the agent's answer.

    Rewards of evaluations are not sent.

    Args:
        agent: the agent.
        user_input: the text to which the agent answers.
        reward_function: function that computes rewards from the record.
        user_feedback: {"rating": 1 to 5, "comment": ...}.
        purpose: `"eval"` excludes the run from training.
        model: model or version to call; by default the stack's model.
        task_id: task of the run. Runs of one task are compared with each other. Runs without a task, as in most real
            traffic, are compared with all other runs.
    """
    feedback = user_feedback or {}
    check_names("user_feedback", feedback, ("rating", "comment"))
    rating, comment = feedback.get("rating"), str(feedback.get("comment") or "")
    if rating is not None:
        rating = real_number("user_feedback.rating", rating)
        if not 1 <= rating <= RATING_MAX:
            raise ValueError(f"rating = {rating:g}: must be from 1 to {RATING_MAX}")
    if comment and rating is None and reward_function is None:
        raise UsageError(
            "user_feedback.comment: needs a reward; add a rating or a reward_function, or leave the comment out"
        )
    if feedback and purpose != "train":
        raise UsageError(f"user_feedback: has no effect with purpose = {purpose!r}; leave it out")
    stack = current()
    record, answer = blocking(_record_run(stack, agent, user_input, purpose, model or stack.model, task_id))
    rewards = dict(_rewards_by_name(reward_function(record)) if reward_function else {})
    if rating is not None:
        rewards["user_satisfaction"] = rating / RATING_MAX
    record |= {"rewards": rewards, "total_reward": math.fsum(rewards.values()) if rewards else None}
    if purpose == "train":
        send_reward(stack, record, comment)
    return record, answer


def send_reward(stack: Stack, record: Mapping[str, Any], comment: str = "") -> None:
    """Send the record's total reward as feedback about its session.

    For a record without rewards nothing is sent. The same total counts once, even if it is sent repeatedly.
    """
    total = record.get("total_reward")
    if total is not None:
        total = score("total_reward", total)
        session = str(record["conversation_id"])
        context = {"parts": dict(record.get("rewards") or {})}
        send = partial(stack.client.feedback, session_id=session, value=total, feedback_id=f"{session}:{total!r}")
        send(context=context, comment=comment) if comment else send(context=context)


def record_of(trajectory: Trajectory) -> dict[str, Any]:
    """Return the record of a trajectory without its rewards.

    `thoughts` contains the model's texts before its last message, and its reasoning.
    """
    results = {message.tool_call_id: message.text for message in trajectory.messages if message.role == "tool"}
    answers = [message for message in trajectory.messages if message.role == "assistant"]
    thoughts = [message.reasoning_content or (message.text if message.tool_calls else "") for message in answers]
    calls = [call for message in answers for call in message.tool_calls or ()]
    return {
        "conversation_id": trajectory.session_id,
        "messages": [{"role": message.role, "content": message.text} for message in trajectory.messages],
        "thoughts": [{"step": number, "content": text} for number, text in enumerate(filter(None, thoughts), 1)],
        "tool_calls": [
            {
                "tool": call.function.name,
                "args": _parse_arguments(call.function.arguments),
                "result": results.get(call.id),
            }
            for call in calls
        ],
    }


async def _record_run(
    stack: Stack, agent: Any, text: str, purpose: Purpose, model: str, task_id: str | None
) -> tuple[dict[str, Any], Any]:
    watch = OutcomeWatch(stack)
    await watch.begin()
    async with stack.async_client() as client:
        session = client.session(task_id=task_id, purpose=purpose)
        async with session:
            with plugged(agent, stack.base_url, session.headers, model, stack.api_key):
                answer = await call_agent(agent, text)
    trajectory = await watch.until_closed(session.session_id, _CLOSED_S)
    if trajectory is None:
        raise UsageError(
            f"the agent made no call to the model for {text!r}, so there is no record; "
            "check that it uses its OpenAI client"
        )
    return record_of(trajectory), answer


def _rewards_by_name(rewards: Mapping[str, float] | float | None) -> Mapping[str, float]:
    """Return the rewards by name as floats, whatever library their numbers are from."""
    if rewards is None:
        return {}
    named = rewards if isinstance(rewards, Mapping) else {"reward": rewards}
    return {str(name): score(f"reward {name}", value) for name, value in named.items()}


def _parse_arguments(text: str) -> Any:
    """Return the arguments of a tool call parsed from JSON, or the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
