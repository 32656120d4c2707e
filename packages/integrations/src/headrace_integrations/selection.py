"""Improvement of an agent without training: selection of the best model for a workflow, and tuning of its system
prompt.

The prompt is tuned with the search of the package dspy. Both functions are part of `headrace.tuner`.
"""

from __future__ import annotations

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from importlib import import_module
from typing import Any

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.sessions import new_id
from headrace_integrations.practice.chat_models import ChatModel
from headrace_integrations.practice.data_sets import check_schedule, rows_of
from headrace_integrations.stack.connection import ENTERED
from headrace_integrations.tuner.configs import (
    JudgeOutput,
    PromptTuneConfig,
    call_function,
    check_judge_function,
    check_prompt_workflow,
    check_workflow_function,
)
from headrace_operations.arguments import score, whole_number, yes_or_no
from headrace_schemas.values.text import printable

LEVELS = ("light", "medium", "heavy")


def tune_prompt(
    *,
    workflow: Callable[..., Any],
    init_system_prompt: str,
    judge_func: Callable[..., Any],
    train_dataset: Any,
    eval_dataset: Any = None,
    config: Any = None,
) -> tuple[str, dict[str, float]]:
    """Search for the best system prompt, and return it with a comparison of its rewards with those of the initial
    prompt.

    With `compare_performance`, the comparison has the mean rewards before and after on `eval_dataset` (by default the
    training rows), and `valset_improvement` in percent. A sample that fails is excluded from the means.

    Args:
        workflow: async function `workflow(task, system_prompt)`.
        config: a `PromptTuneConfig`. `eval_num_threads` samples are compared concurrently, `eval_display_progress`
            prints their number to standard error, and `eval_display_table` is the number of rows whose rewards are
            printed.

    Raises:
        UsageError: dspy is not installed, or the level is unknown.
    """
    check_prompt_workflow(workflow)
    check_judge_function(judge_func)
    options = config or PromptTuneConfig()
    if options.optimization_level not in LEVELS:
        raise UsageError(f"optimization_level = {options.optimization_level!r}: must be one of {', '.join(LEVELS)}")
    try:
        dspy = import_module("dspy")
    except ImportError:
        raise UsageError("tune_prompt needs the package dspy: pip install dspy") from None
    whole_number("eval_num_threads", options.eval_num_threads)
    if yes_or_no("compare_performance", options.compare_performance) is False and eval_dataset is not None:
        raise UsageError("eval_dataset: has no effect, because compare_performance is False; leave one of them out")
    check_schedule(train_dataset, "train_dataset")
    rows = rows_of(train_dataset)
    held_out = rows
    if eval_dataset is not None:
        check_schedule(eval_dataset, "eval_dataset")
        held_out = rows_of(eval_dataset)

    def reward(task: dict[str, Any], prompt: str) -> float:
        async def sample() -> float:
            output = await workflow(task=task, system_prompt=prompt)
            judged = await call_function(judge_func, None, task=task, response=output.response)
            return score("reward", judged.reward)

        return blocking(sample())

    best = _search(dspy, rows, init_system_prompt, reward, options)
    if not options.compare_performance:
        return best, {}
    before, after = (_mean(reward, held_out, prompt, options) for prompt in (init_system_prompt, best))
    gain = 100.0 * (after - before) / abs(before) if before else math.nan
    return best, {"valset_before": before, "valset_after": after, "valset_improvement": gain}


def _search(dspy: Any, rows: list[dict[str, Any]], prompt: str, reward: Callable[..., float], options: Any) -> str:
    """Return the system prompt with the highest reward that dspy finds.

    dspy tunes the instructions of a module. The module here passes its instructions to the workflow as the system
    prompt.
    """

    class Prompted(dspy.Module):  # type: ignore[misc]
        """dspy module that runs the workflow with the module's instructions as the system prompt."""

        def __init__(self) -> None:
            super().__init__()
            self.predict = dspy.Predict(dspy.Signature("task -> answer", prompt))

        def forward(self, task: Any) -> Any:
            return dspy.Prediction(answer=str(reward(task, str(self.predict.signature.instructions))))

    def metric(_example: Any, prediction: Any, _trace: Any = None) -> float:
        return float(prediction.answer)

    search = dspy.MIPROv2(
        metric=metric,
        auto=options.optimization_level,
        prompt_model=dspy.LM(options.lm_model_name),
        task_model=dspy.LM(options.lm_model_name),
        num_threads=options.eval_num_threads,
        max_bootstrapped_demos=0,
        max_labeled_demos=0,
    )
    examples = [dspy.Example(task=row).with_inputs("task") for row in rows]
    optimized = search.compile(Prompted(), trainset=examples)
    return str(optimized.predict.signature.instructions)


def _mean(reward: Callable[..., float], rows: list[dict[str, Any]], prompt: str, options: Any) -> float:
    """Return the mean reward of a prompt over the rows that have one, and print progress and rows as `options`
    request."""
    prints_progress = yes_or_no("eval_display_progress", options.eval_display_progress)
    rows_to_print = whole_number("eval_display_table", options.eval_display_table or 0, least=0)

    def sample(row: dict[str, Any]) -> float | None:
        try:
            return reward(row, prompt)
        except Exception:  # noqa: BLE001 (a user's functions may raise anything; the sample is excluded from the mean)
            return None

    rewards: list[float | None] = []
    contexts = [copy_context() for _ in rows]  # threads use the stack that the caller entered
    with ThreadPoolExecutor(whole_number("eval_num_threads", options.eval_num_threads)) as threads:
        for value in threads.map(lambda context, row: context.run(sample, row), contexts, rows):
            rewards.append(value)
            if prints_progress:
                sys.stderr.write(f"{len(rewards)} of {len(rows)} samples\n")
    for row, value in zip(rows[:rows_to_print], rewards, strict=False):
        sys.stdout.write(f"{'failed' if value is None else format(value, '.4g')}  {_line(row)}\n")
    values = [value for value in rewards if value is not None]
    if not values:
        raise UsageError("every sample failed with this prompt")
    return math.fsum(values) / len(values)


def _line(row: dict[str, Any]) -> str:
    return printable(json.dumps(row, ensure_ascii=False, default=str))


async def select_model(
    *,
    workflow_func: Callable[..., Any],
    judge_func: Callable[..., Any],
    train_dataset: Any,
    candidate_models: Sequence[Any],
    max_threads: int = 2,
) -> tuple[Any, dict[str, float]]:
    """Return the candidate with the best mean reward, and the means of all candidates.

    A sample that fails is excluded from the means. A candidate whose samples all fail is never selected.

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
    """Return the negative execution time of a response in seconds as its reward, so that fast models win."""
    return JudgeOutput(reward=-score("execution_time", response["metrics"]["execution_time"]))


async def avg_token_consumption_judge(task: Mapping[str, Any], response: Any) -> JudgeOutput:
    """Return the negative number of tokens of a response as its reward, so that models with short answers win."""
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
            output = await call_function(workflow, None, task=task, model=model)
            metrics = {"execution_time": time.monotonic() - began, **used, **dict(output.metrics or {})}
            judgement = await call_function(
                judge, None, task=task, response={"response": output.response, "metrics": metrics}
            )
        except Exception:  # noqa: BLE001 (a user's functions may raise anything; the sample is counted as failed)
            return None
        try:
            return score("reward", judgement.reward)
        except UsageError:
            return None


def _with_token_counts(candidate: Any) -> tuple[Any, dict[str, float]]:
    """Return a wrapper of the model, and token counts that each call of the wrapper updates."""
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
