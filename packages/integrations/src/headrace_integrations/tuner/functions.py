"""Check the signatures of workflows and judges before anything starts, and call them with the parameters they have."""

from __future__ import annotations

import inspect
import logging
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import UsageError
from headrace_schemas.values.plain_values import plain_number, plain_value

_OPTIONAL = ("auxiliary_models", "logger")


def check_workflow_function(function: Callable[..., Any]) -> None:
    """Raise `UsageError` unless `function` is async with `task` and `model`, and optionally `auxiliary_models` and
    `logger`."""
    _check(function, "workflow function", ("task", "model"))


def check_judge_function(function: Callable[..., Any]) -> None:
    """Raise `UsageError` unless `function` is async with `task` and `response`, and optionally `auxiliary_models` and
    `logger`."""
    _check(function, "judge function", ("task", "response"))


def check_prompt_workflow(function: Callable[..., Any]) -> None:
    """Raise `UsageError` unless `function` is async with `task` and `system_prompt`."""
    _check(function, "workflow function", ("task", "system_prompt"), ())


async def called(function: Callable[..., Any], auxiliary: Mapping[str, Any] | None, **arguments: Any) -> Any:
    """Call a workflow or judge with the arguments that its signature has, and return its output."""
    parameters = inspect.signature(function).parameters
    if "auxiliary_models" in parameters:
        arguments["auxiliary_models"] = dict(auxiliary or {})
    if "logger" in parameters:
        arguments["logger"] = logging.getLogger("headrace.tuner")
    return await function(**arguments)


async def outcome(
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    auxiliary: Mapping[str, Any] | None,
    task: Mapping[str, Any],
    model: Any,
) -> tuple[float, dict[str, float]]:
    """Return reward and metrics of one run. The judge's reward replaces the workflow's reward.

    Raises:
        UsageError: there is no finite reward. That is an error, and never a reward of 0.
        Exception: as raised by workflow or judge.
    """
    output = await called(workflow, auxiliary, task=task, model=model)
    metrics = dict(output.metrics or {})
    reward = output.reward
    if judge is not None:
        judgement = await called(judge, auxiliary, task=task, response=output.response)
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
