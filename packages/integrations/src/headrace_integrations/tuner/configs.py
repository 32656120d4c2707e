"""Configuration objects of the tuner, and the checks of the signatures of workflows and judges before a training."""

from __future__ import annotations

import inspect
import json
import logging
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace_integrations.practice.data_sets import rows_of
from headrace_schemas.values.text import plain_number, plain_value

_OPTIONAL = ("auxiliary_models", "logger")


@dataclass(frozen=True, kw_only=True)
class TunerModelConfig:
    """The model to train. The workflow calls it with `temperature`, `top_p` and `max_tokens`."""

    model_path: str
    max_model_len: int | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int = 8192
    enable_thinking: bool | None = None
    tensor_parallel_size: int = 1
    inference_engine_num: int = 1
    tool_call_parser: str = "hermes"
    reasoning_parser: str = "deepseek_r1"
    tinker_config: Any = None


@dataclass(frozen=True, kw_only=True)
class TinkerConfig:
    """Configuration of the training service Tinker, which Headrace refuses."""

    rank: int = 16
    seed: int | None = None
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True
    base_url: str | None = None


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Algorithm and size of the training steps. Each step trains on `batch_size` tasks with `group_size` runs of each
    task.
    """

    algorithm_type: str = "multi_step_grpo"
    learning_rate: float = 1e-6
    group_size: int = 8
    batch_size: int = 32
    save_interval_steps: int = 100
    eval_interval_steps: int = 100


@dataclass(frozen=True, kw_only=True)
class DatasetConfig:
    """A data set: a folder with `<split>.jsonl`, a file of rows, or a name that the package datasets loads."""

    path: str
    name: str | None = None
    split: str | None = "train"
    total_epochs: int = 1
    total_steps: int | None = None

    def preview(self, n: int = 5) -> list[dict[str, Any]]:
        """Print the first `n` rows as a JSON list and return them."""
        rows = rows_of(self)[:n]
        sys.stdout.write(json.dumps(rows, indent=2, ensure_ascii=False, default=str) + "\n")
        return rows


@dataclass(frozen=True, kw_only=True)
class WorkflowOutput:
    """Result of a workflow: a response for the judge to score, or the reward itself."""

    reward: float | None = None
    response: Any = None
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class JudgeOutput:
    """Result of a judge: the reward of a run, and metrics that are only reported."""

    reward: float
    metrics: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class PromptTuneConfig:
    """Settings of the search in `tune_prompt`. `lm_model_name` is litellm's name of the model that proposes prompts."""

    lm_model_name: str = "dashscope/qwen-plus"
    optimization_level: str = "light"
    eval_display_progress: bool = True
    eval_display_table: int = 5
    eval_num_threads: int = 16
    compare_performance: bool = True


def check_workflow_function(function: Callable[..., Any]) -> None:
    """Check the signature of a user's workflow function.

    Raises:
        UsageError: the function is not async, lacks the parameter `task` or `model`, or has parameters other than
            these, `auxiliary_models` and `logger`.
    """
    _check(function, "workflow function", ("task", "model"))


def check_judge_function(function: Callable[..., Any]) -> None:
    """Check the signature of a user's judge function.

    Raises:
        UsageError: the function is not async, lacks the parameter `task` or `response`, or has parameters other than
            these, `auxiliary_models` and `logger`.
    """
    _check(function, "judge function", ("task", "response"))


def check_prompt_workflow(function: Callable[..., Any]) -> None:
    """Check the signature of a workflow for prompt tuning.

    Raises:
        UsageError: the function is not async, or its parameters are not `task` and `system_prompt`.
    """
    _check(function, "workflow function", ("task", "system_prompt"), ())


async def call_function(function: Callable[..., Any], auxiliary: Mapping[str, Any] | None, **arguments: Any) -> Any:
    """Call a workflow or a judge with `arguments`, and with auxiliary models and a logger if it has these
    parameters.
    """
    parameters = inspect.signature(function).parameters
    if "auxiliary_models" in parameters:
        arguments["auxiliary_models"] = dict(auxiliary or {})
    if "logger" in parameters:
        arguments["logger"] = logging.getLogger("headrace.tuner")
    return await function(**arguments)


async def run_and_judge(
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    auxiliary: Mapping[str, Any] | None,
    task: Mapping[str, Any],
    model: Any,
) -> tuple[float, dict[str, float]]:
    """Run a workflow and its judge on a task, and return the reward and the metrics.

    The judge's reward replaces that of the workflow.

    Raises:
        UsageError: there is no finite reward. This is never counted as a reward of 0.
        Exception: as raised by workflow or judge.
    """
    output = await call_function(workflow, auxiliary, task=task, model=model)
    metrics = dict(output.metrics or {})
    reward = output.reward
    if judge is not None:
        judgement = await call_function(judge, auxiliary, task=task, response=output.response)
        reward, metrics = judgement.reward, metrics | dict(judgement.metrics or {})
    try:
        if reward is None or isinstance(plain_value(reward), bool):
            raise TypeError(f"{type(reward).__name__} is not a number; return a number")
        return plain_number(reward), metrics
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"reward = {reprlib.repr(reward)}: judge or workflow must return a finite number: {error}"
        ) from None


def _check(
    function: Callable[..., Any], role: str, required: tuple[str, ...], optional: tuple[str, ...] = _OPTIONAL
) -> None:
    if not inspect.iscoroutinefunction(function):
        raise UsageError(f"the {role} must be async: async def {getattr(function, '__name__', 'it')}(...)")
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name not in (*required, *optional):
            raise UsageError(
                f"the {role} has a parameter {name!r}; it may have only {', '.join((*required, *optional))}"
            )
    missing = [name for name in required if name not in inspect.signature(function).parameters]
    if missing:
        raise UsageError(f"the {role} must have a parameter {missing[0]!r}")
