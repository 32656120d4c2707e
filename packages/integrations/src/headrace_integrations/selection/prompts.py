"""`tune_prompt`: tune the system prompt instead of the weights, with the search of the package dspy."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from importlib import import_module
from typing import Any

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace_integrations.practice.data_sets import check_schedule, rows_of
from headrace_integrations.tuner.configs import PromptTuneConfig
from headrace_integrations.tuner.functions import called, check_judge_function, check_prompt_workflow
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
    """Search for the best system prompt and return it with its comparison to the initial prompt.

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
            judged = await called(judge_func, None, task=task, response=output.response)
            return score("reward", judged.reward)

        return blocking(sample())

    best = _search(dspy, rows, init_system_prompt, reward, options)
    if not options.compare_performance:
        return best, {}
    before, after = (_mean(reward, held_out, prompt, options) for prompt in (init_system_prompt, best))
    gain = 100.0 * (after - before) / abs(before) if before else math.nan
    return best, {"valset_before": before, "valset_after": after, "valset_improvement": gain}


def _search(dspy: Any, rows: list[dict[str, Any]], prompt: str, reward: Callable[..., float], options: Any) -> str:
    """Return the best prompt that dspy finds.

    dspy tunes the instructions of a module. This module passes its instructions to the workflow as the system prompt.
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
