"""`select_model`: which of several models does a workflow best, fastest, or with the fewest tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.practice.arguments import score, whole_number
from headrace.practice.chat_models import ChatModel
from headrace.practice.data_sets import check_schedule, rows_of
from headrace.sessions import new_id
from headrace.stack.connection import ENTERED
from headrace.tuner.configs import JudgeOutput
from headrace.tuner.functions import called, check_judge_function, check_workflow_function


async def select_model(
    *,
    workflow_func: Callable[..., Any],
    judge_func: Callable[..., Any],
    train_dataset: Any,
    candidate_models: Sequence[Any],
    max_threads: int = 2,
) -> tuple[Any, dict[str, float]]:
    """The candidate with the best mean reward, and the means of all. A candidate is a chat model, or the name of a
    model or version that the gateway of the entered stack serves.

    The judge gets {"response", "metrics"} with `execution_time`, `input_tokens`, `output_tokens`, `total_tokens`. A
    sample that fails is in no mean; a candidate without a sample is never the best. Raises `UsageError` when all
    failed.
    """
    check_workflow_function(workflow_func)
    check_judge_function(judge_func)
    if len(candidate_models) < 2:
        raise UsageError(f"candidate_models has {len(candidate_models)}; at least 2 can be compared")
    for at, candidate in enumerate(candidate_models):
        if not (isinstance(candidate, str) or callable(candidate)):
            kind = type(candidate).__name__
            raise UsageError(f"candidate_models[{at}] is a {kind}: name a chat model, or the name of a served model")
    check_schedule(train_dataset, "train_dataset")
    max_threads = whole_number("max_threads", max_threads)
    rows, room, found = rows_of(train_dataset), asyncio.Semaphore(max_threads), {}
    for at, candidate in enumerate(candidate_models):
        name = candidate if isinstance(candidate, str) else f"{at}:{getattr(candidate, 'model_name', at)}"
        rewards = await asyncio.gather(*(_sample(workflow_func, judge_func, row, candidate, room) for row in rows))
        scored = [reward for reward in rewards if reward is not None]
        found[name] = (candidate, math.fsum(scored) / len(scored) if scored else -math.inf, len(rewards) - len(scored))
    best, mean, _ = max(found.values(), key=lambda one: one[1])
    if mean == -math.inf:
        raise UsageError(f"every sample of all {len(found)} candidates failed")
    means = {f"{name}/reward": one[1] for name, one in found.items() if one[1] > -math.inf}
    return best, {**means, **{f"{name}/failed": float(one[2]) for name, one in found.items()}, "best_reward": mean}


async def avg_time_judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """The faster, the better."""
    return JudgeOutput(reward=-score("execution_time", response["metrics"]["execution_time"]))


async def avg_token_consumption_judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """The fewer tokens, the better."""
    return JudgeOutput(reward=-score("total_tokens", response["metrics"]["total_tokens"]))


async def _sample(
    workflow: Callable[..., Any],
    judge: Callable[..., Any],
    task: Mapping[str, Any],
    candidate: Any,
    room: asyncio.Semaphore,
) -> float | None:
    async with room:
        began = time.monotonic()
        try:
            model, used = _counted(candidate)
            output = await called(workflow, None, task=task, model=model)
            metrics = {"execution_time": time.monotonic() - began, **used, **dict(output.metrics or {})}
            said = await called(judge, None, task=task, response={"response": output.response, "metrics": metrics})
        except Exception:  # noqa: BLE001 (a user's functions may raise anything; the sample is counted as failed)
            return None
        try:
            return score("reward", said.reward)
        except UsageError:
            return None


def _counted(candidate: Any) -> tuple[Any, dict[str, float]]:
    """The model, and what its calls will have used."""
    used = {"input_tokens": 0.0, "output_tokens": 0.0, "total_tokens": 0.0}
    model = _named(candidate) if isinstance(candidate, str) else candidate

    async def counting(*args: Any, **options: Any) -> Any:
        answer = await model(*args, **options)
        usage = getattr(answer, "usage", None)
        for name, others in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
            used[name] += score(name, getattr(usage, name, None) or getattr(usage, others, None) or 0)
        used["total_tokens"] = used["input_tokens"] + used["output_tokens"]
        return answer

    return counting, used


def _named(name: str) -> ChatModel:
    stack = ENTERED.get()
    if stack is None:
        raise UsageError(f"candidate {name!r} is a name: enter the stack whose gateway serves it")
    headers = {"X-Session-Id": new_id(), "X-Headrace-Purpose": "eval"}
    return ChatModel(stack.openai(headers), name)
