"""`Workflow`, and training with one: its runs, the reward of its experiences, the services' step."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from headrace.errors import UsageError
from headrace.practice.arguments import score
from headrace.practice.practising import practise
from headrace.practice.runs import Run, task_id_of
from headrace.practice.steps import Step
from headrace.stack import Stack
from headrace.trinity.wrappers import FormatArgs, ModelWrapper, TrinityTask


class Workflow:
    """What a workflow of yours derives from. `auxiliary_models` become OpenAI clients, the wrappers are in
    `auxiliary_model_wrappers`. Override `run`, or `run_async` with `is_async = True`."""

    is_async = False
    can_reset = False
    can_repeat = False

    def __init__(
        self, *, task: TrinityTask, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        self.task = task
        self.model = model
        self.auxiliary_model_wrappers = list(auxiliary_models or ())
        clients = (
            one.get_openai_async_client if self.is_async else one.get_openai_client for one in auxiliary_models or ()
        )
        self.auxiliary_models = [client() for client in clients]

    def run(self) -> list[Any]:
        """Experiences with their reward."""
        raise NotImplementedError

    async def run_async(self) -> list[Any]:
        raise NotImplementedError


async def run_workflow(
    stack: Stack,
    workflow: Any,
    rows: Sequence[Mapping[str, Any] | TrinityTask],
    *,
    format_args: FormatArgs | None = None,
    auxiliary_models: Sequence[str] = (),
    repeat_times: int = 8,
    batch_size: int = 8,
    steps: int = 1,
    enable_history: bool = True,
) -> AsyncIterator[Step]:
    """Steps of `batch_size` tasks, `repeat_times` runs each. `workflow` is a class (or a function) of task, model and
    auxiliary models, which are named as the gateway calls them.

    The reward of a run is that of its experiences, which have to agree. A workflow that raises, or gives no reward, is
    an error of that run.
    """
    for row in rows:
        if isinstance(row, TrinityTask):
            _check_task(row, workflow, repeat_times, format_args)
    tasks = [row if isinstance(row, TrinityTask) else _task(row, format_args) for row in rows]

    async def play(task: Any, run: Run) -> None:
        model = ModelWrapper(run, enable_history=enable_history)
        others = [ModelWrapper(run, f"auxiliary-{at}", model=name) for at, name in enumerate(auxiliary_models)]
        made = workflow(task=task, model=model, auxiliary_models=others or None)
        found = await _experiences(made)
        run.result = found
        run.reward(reward_of(found), role="agent", metrics=metrics_of(found))

    sizes = {"group_size": repeat_times, "tasks_per_step": min(batch_size, len(tasks)), "steps": steps}
    async for step in practise(stack, tasks, play, **sizes):
        yield step


def reward_of(experiences: Sequence[Any]) -> float:
    """The one reward of a run. Raises `UsageError` where there is none, or where its calls have different ones: turns
    with rewards of their own are told by feedback about the turn."""
    rewards = {None if one.reward is None else score("reward", one.reward) for one in experiences}
    if not rewards or None in rewards:
        raise UsageError(f"the workflow returned {len(experiences)} experiences, and not all of them have a reward")
    if len(rewards) > 1:
        raise UsageError(f"the experiences of one run have the rewards {sorted(map(str, rewards))}; a run has one")
    (reward,) = rewards
    assert reward is not None
    return reward


def metrics_of(experiences: Sequence[Any]) -> dict[str, float]:
    """Of all experiences; the last one's count where several say something."""
    found: dict[str, float] = {}
    for one in experiences:
        found |= {name: score(f"metrics.{name}", value) for name, value in (one.metrics or {}).items()}
    return found


async def _experiences(made: Any) -> list[Any]:
    if getattr(made, "is_async", False) or "run_async" in type(made).__dict__:
        return list(await made.run_async())
    if inspect.isawaitable(made):
        return list(await made)
    return list(await asyncio.to_thread(made.run))


def _check_task(task: TrinityTask, workflow: Any, repeat_times: int, format_args: FormatArgs | None) -> None:
    """Raise `UsageError` for what a task says of its runs and `run_workflow` does otherwise."""
    if task.workflow is not None and task.workflow is not workflow:
        raise UsageError(f"workflow = {task.workflow!r}: run_workflow plays {workflow!r}; leave one of them out")
    if task.repeat_times is not None and task.repeat_times != repeat_times:
        raise UsageError(
            f"repeat_times = {task.repeat_times}: run_workflow plays each task {repeat_times} times; leave it out"
        )
    if task.is_eval:
        raise UsageError("is_eval = True: run_workflow trains; play it with headrace.evaluation.evaluate")
    if format_args is not None:
        raise UsageError("format_args: the rows are tasks, which have their own; leave it out")


def _task(row: Mapping[str, Any], format_args: FormatArgs | None) -> TrinityTask:
    return TrinityTask(row, format_args or FormatArgs(), task_id=task_id_of(row))
