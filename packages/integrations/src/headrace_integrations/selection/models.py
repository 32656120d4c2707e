"""`select_model`: select the model with which a workflow performs best, fastest, or with the fewest tokens."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.sessions import new_id
from headrace_integrations.practice.chat_models import ChatModel
from headrace_integrations.practice.data_sets import check_schedule, rows_of
from headrace_integrations.stack.connection import ENTERED
from headrace_integrations.tuner.configs import JudgeOutput
from headrace_integrations.tuner.functions import called, check_judge_function, check_workflow_function
from headrace_operations.arguments import score, whole_number


async def select_model(
    *,
    workflow_func: Callable[..., Any],
    judge_func: Callable[..., Any],
    train_dataset: Any,
    candidate_models: Sequence[Any],
    max_threads: int = 2,
) -> tuple[Any, dict[str, float]]:
    """Return the candidate with the best mean reward, and the means of all candidates.

    A sample that fails is excluded from the means, and a candidate without any other sample is never the best.

    Args:
        judge_func: async function that gets {"response", "metrics"} as the response; the metrics are `execution_time`,
            `input_tokens`, `output_tokens` and `total_tokens`.
        candidate_models: chat models, or names of models or versions at the gateway of the entered stack.
        max_threads: number of concurrent samples.

    Raises:
        UsageError: every sample failed.
    """
    check_workflow_function(workflow_func)
    check_judge_function(judge_func)
    if len(candidate_models) < 2:
        raise UsageError(f"candidate_models: has {len(candidate_models)} models; must have at least 2 to compare")
    for number, candidate in enumerate(candidate_models):
        if not (isinstance(candidate, str) or callable(candidate)):
            kind = type(candidate).__name__
            raise UsageError(
                f"candidate_models[{number}]: is a {kind}; must be a chat model, or the name of a served model"
            )
    check_schedule(train_dataset, "train_dataset")
    max_threads = whole_number("max_threads", max_threads)
    rows, slots, results = rows_of(train_dataset), asyncio.Semaphore(max_threads), {}
    for number, candidate in enumerate(candidate_models):
        name = candidate if isinstance(candidate, str) else f"{number}:{getattr(candidate, 'model_name', number)}"
        rewards = await asyncio.gather(*(_sample(workflow_func, judge_func, row, candidate, slots) for row in rows))
        scored = [reward for reward in rewards if reward is not None]
        mean = math.fsum(scored) / len(scored) if scored else -math.inf
        results[name] = (candidate, mean, len(rewards) - len(scored))
    best, best_mean, _ = max(results.values(), key=lambda result: result[1])
    if best_mean == -math.inf:
        raise UsageError(f"every sample of all {len(results)} candidates failed")
    means = {f"{name}/reward": mean for name, (_, mean, _) in results.items() if mean > -math.inf}
    failures = {f"{name}/failed": float(count) for name, (_, _, count) in results.items()}
    return best, {**means, **failures, "best_reward": best_mean}


async def avg_time_judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """Judge that prefers short execution times."""
    return JudgeOutput(reward=-score("execution_time", response["metrics"]["execution_time"]))


async def avg_token_consumption_judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """Judge that prefers few tokens."""
    return JudgeOutput(reward=-score("total_tokens", response["metrics"]["total_tokens"]))


async def _sample(
    workflow: Callable[..., Any],
    judge: Callable[..., Any],
    task: Mapping[str, Any],
    candidate: Any,
    slots: asyncio.Semaphore,
) -> float | None:
    async with slots:
        began = time.monotonic()
        try:
            model, used = _with_token_counts(candidate)
            output = await called(workflow, None, task=task, model=model)
            metrics = {"execution_time": time.monotonic() - began, **used, **dict(output.metrics or {})}
            judgement = await called(judge, None, task=task, response={"response": output.response, "metrics": metrics})
        except Exception:  # noqa: BLE001 (a user's functions may raise anything; the sample is counted as failed)
            return None
        try:
            return score("reward", judgement.reward)
        except UsageError:
            return None


def _with_token_counts(candidate: Any) -> tuple[Any, dict[str, float]]:
    """Return the model with a wrapper that counts tokens, and the counts, which its calls update."""
    token_counts = {"input_tokens": 0.0, "output_tokens": 0.0, "total_tokens": 0.0}
    model = _served_model(candidate) if isinstance(candidate, str) else candidate

    async def counting(*args: Any, **options: Any) -> Any:
        answer = await model(*args, **options)
        usage = getattr(answer, "usage", None)
        for name, openai_name in (("input_tokens", "prompt_tokens"), ("output_tokens", "completion_tokens")):
            token_counts[name] += score(name, getattr(usage, name, None) or getattr(usage, openai_name, None) or 0)
        token_counts["total_tokens"] = token_counts["input_tokens"] + token_counts["output_tokens"]
        return answer

    return counting, token_counts


def _served_model(name: str) -> ChatModel:
    stack = ENTERED.get()
    if stack is None:
        raise UsageError(f"candidate {name!r} is a name: enter the stack whose gateway serves it")
    headers = {"X-Session-Id": new_id(), "X-Headrace-Purpose": "eval"}
    return ChatModel(stack.openai(headers), name)
