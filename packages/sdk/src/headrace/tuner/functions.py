"""Workflows and judges: their signatures are checked before anything starts, and called with what they ask for."""

from __future__ import annotations

import inspect
import logging
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import UsageError
from headrace_schemas.plain_values import plain_number, plain_value

_OPTIONAL = ("auxiliary_models", "logger")


def check_workflow_function(function: Callable[..., Any]) -> None:
    """An async function of `task` and `model`, and if it likes `auxiliary_models` and `logger`. Raises `UsageError`."""
    _check(function, "workflow function", ("task", "model"))


def check_judge_function(function: Callable[..., Any]) -> None:
    """An async function of `task` and `response`, and if it likes `auxiliary_models` and `logger`. Raises
    `UsageError`."""
    _check(function, "judge function", ("task", "response"))


def check_prompt_workflow(function: Callable[..., Any]) -> None:
    """An async function of `task` and `system_prompt`. Raises `UsageError`."""
    _check(function, "workflow function", ("task", "system_prompt"), ())


async def called(function: Callable[..., Any], auxiliary: Mapping[str, Any] | None, **given: Any) -> Any:
    """The function's output."""
    wanted = inspect.signature(function).parameters
    if "auxiliary_models" in wanted:
        given["auxiliary_models"] = dict(auxiliary or {})
    if "logger" in wanted:
        given["logger"] = logging.getLogger("headrace.tuner")
    return await function(**given)


async def outcome(
    workflow: Callable[..., Any],
    judge: Callable[..., Any] | None,
    auxiliary: Mapping[str, Any] | None,
    task: Mapping[str, Any],
    model: Any,
) -> tuple[float, dict[str, float]]:
    """Reward and metrics of one run. The judge's reward counts, else the workflow's. Raises what they raise, and
    `UsageError` where there is no number: a run without a reward is an error, and never a 0."""
    output = await called(workflow, auxiliary, task=task, model=model)
    metrics = dict(output.metrics or {})
    reward = output.reward
    if judge is not None:
        said = await called(judge, auxiliary, task=task, response=output.response)
        reward, metrics = said.reward, metrics | dict(said.metrics or {})
    try:
        if reward is None or isinstance(plain_value(reward), bool):
            raise TypeError(f"{type(reward).__name__} is no number; return a number")
        return plain_number(reward), metrics
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the reward is {reprlib.repr(reward)}; a finite number is wanted, of the judge or of the workflow: {error}"
        ) from None


def _check(
    function: Callable[..., Any], what: str, required: tuple[str, ...], optional: tuple[str, ...] = _OPTIONAL
) -> None:
    if not inspect.iscoroutinefunction(function):
        raise UsageError(f"the {what} is async: async def {getattr(function, '__name__', 'it')}(...)")
    for name, one in inspect.signature(function).parameters.items():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD) or name not in (*required, *optional):
            raise UsageError(f"the {what} takes {', '.join((*required, *optional))}, and not {name!r}")
    missing = [name for name in required if name not in inspect.signature(function).parameters]
    if missing:
        raise UsageError(f"the {what} has no parameter {missing[0]!r}")
