"""`tune_prompt`: the system prompt is tuned in place of the weights, by the search of the package dspy."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from importlib import import_module
from typing import Any

from headrace.errors import UsageError
from headrace.practice.arguments import score, whole_number, yes_or_no
from headrace.practice.blocking import blocking
from headrace.practice.data_sets import check_schedule, rows_of
from headrace.tuner.configs import PromptTuneConfig
from headrace.tuner.functions import called, check_judge_function, check_prompt_workflow
from headrace_schemas.text import printable

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
    """The best system prompt found, and with `compare_performance` the mean rewards before and after on `eval_dataset`
    (or the training rows) and `valset_improvement` in percent. `workflow(task, system_prompt)` is async. The comparison
    plays `eval_num_threads` samples at a time; `eval_display_progress` counts them on standard error, and
    `eval_display_table` prints the rewards of so many rows.

    A sample that fails is in no mean. Raises `UsageError` without dspy, and for a level that there is not.
    """
    check_prompt_workflow(workflow)
    check_judge_function(judge_func)
    options = config or PromptTuneConfig()
    if options.optimization_level not in LEVELS:
        raise UsageError(f"optimization_level = {options.optimization_level!r}: it is one of {', '.join(LEVELS)}")
    try:
        dspy = import_module("dspy")
    except ImportError:
        raise UsageError("tune_prompt needs the package dspy: pip install dspy") from None
    whole_number("eval_num_threads", options.eval_num_threads)
    if yes_or_no("compare_performance", options.compare_performance) is False and eval_dataset is not None:
        raise UsageError(
            "eval_dataset: compare_performance is False, so that nothing is evaluated; leave one of them out"
        )
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
    """dspy tunes the instructions of a module; ours hands them to the workflow as its system prompt."""

    class Prompted(dspy.Module):  # type: ignore[misc]
        """The workflow, with the instructions as its system prompt."""

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
    found = search.compile(Prompted(), trainset=examples)
    return str(found.predict.signature.instructions)


def _mean(reward: Callable[..., float], rows: list[dict[str, Any]], prompt: str, options: Any) -> float:
    """Return the mean reward of a prompt over the rows that have one, displayed as `options` say."""
    counts = yes_or_no("eval_display_progress", options.eval_display_progress)
    shown = whole_number("eval_display_table", options.eval_display_table or 0, least=0)

    def sample(row: dict[str, Any]) -> float | None:
        try:
            return reward(row, prompt)
        except Exception:  # noqa: BLE001 (a user's functions may raise anything; the sample is in no mean)
            return None

    rewards: list[float | None] = []
    contexts = [copy_context() for _ in rows]  # the stack that was entered is the caller's
    with ThreadPoolExecutor(whole_number("eval_num_threads", options.eval_num_threads)) as threads:
        for value in threads.map(lambda context, row: context.run(sample, row), contexts, rows):
            rewards.append(value)
            if counts:
                sys.stderr.write(f"{len(rewards)} of {len(rows)} samples\n")
    for row, value in zip(rows[:shown], rewards, strict=False):
        sys.stdout.write(f"{'failed' if value is None else format(value, '.4g')}  {_line(row)}\n")
    values = [value for value in rewards if value is not None]
    if not values:
        raise UsageError("every sample failed with this prompt")
    return math.fsum(values) / len(values)


def _line(row: dict[str, Any]) -> str:
    return printable(json.dumps(row, ensure_ascii=False, default=str))
