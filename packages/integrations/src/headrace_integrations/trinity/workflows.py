"""`Workflow`, the base class of workflows, `AgentScopeReActWorkflow`, and `run_workflow`, which trains with one."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from importlib import import_module
from typing import Any

from headrace.errors import UsageError
from headrace_integrations.practice.runs import Run, task_id_of
from headrace_integrations.practice.training import Step, train_on_tasks
from headrace_integrations.stack import Stack
from headrace_integrations.trinity.wrappers import FormatArgs, ModelWrapper, TrinityTask
from headrace_operations.arguments import score


class Workflow:
    """Base class of workflows. Override `run`, or `run_async` with `is_async = True`.

    `auxiliary_models` are OpenAI clients, and `auxiliary_model_wrappers` are their wrappers.
    """

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
            wrapper.get_openai_async_client if self.is_async else wrapper.get_openai_client
            for wrapper in auxiliary_models or ()
        )
        self.auxiliary_models = [client() for client in clients]

    def run(self) -> list[Any]:
        """Return the experiences of a run, with their reward."""
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
    """Train with a workflow and yield each step.

    All experiences of a run must have the same reward. A workflow that raises or returns no reward makes its run fail.

    Args:
        workflow: class or function of task, model and auxiliary models.
        rows: rows or tasks of the data set.
        auxiliary_models: names of models at the gateway.
        repeat_times: runs of each task.
        batch_size: tasks of each step.
    """
    for row in rows:
        if isinstance(row, TrinityTask):
            _check_task(row, workflow, repeat_times, format_args)
    tasks = [row if isinstance(row, TrinityTask) else _task(row, format_args) for row in rows]

    async def play(task: Any, run: Run) -> None:
        model = ModelWrapper(run, enable_history=enable_history)
        wrappers = [
            ModelWrapper(run, f"auxiliary-{number}", model=name) for number, name in enumerate(auxiliary_models)
        ]
        experiences = await _experiences(workflow(task=task, model=model, auxiliary_models=wrappers or None))
        run.result = experiences
        run.reward(reward_of(experiences), role="agent", metrics=metrics_of(experiences))

    sizes = {"group_size": repeat_times, "tasks_per_step": min(batch_size, len(tasks)), "steps": steps}
    async for step in train_on_tasks(stack, tasks, play, **sizes):
        yield step


def reward_of(experiences: Sequence[Any]) -> float:
    """Return the single reward of a run.

    Raises:
        UsageError: an experience has no reward, or the rewards differ. Rewards of single turns are sent as feedback
            about turns.
    """
    rewards = {None if experience.reward is None else score("reward", experience.reward) for experience in experiences}
    if not rewards or None in rewards:
        raise UsageError(
            f"the workflow returned {len(experiences)} experiences, not all of them with a reward; set `reward` on each"
        )
    if len(rewards) > 1:
        raise UsageError(
            f"the experiences of one run have the rewards {sorted(map(str, rewards))}; all must have the same reward"
        )
    (reward,) = rewards
    assert reward is not None
    return reward


def metrics_of(experiences: Sequence[Any]) -> dict[str, float]:
    """Return the metrics of all experiences. For a metric of several experiences, the last value counts."""
    metrics: dict[str, float] = {}
    for experience in experiences:
        metrics |= {name: score(f"metrics.{name}", value) for name, value in (experience.metrics or {}).items()}
    return metrics


async def _experiences(workflow: Any) -> list[Any]:
    """Run a workflow object, or await the result of a workflow function, and return its experiences."""
    if getattr(workflow, "is_async", False) or "run_async" in type(workflow).__dict__:
        return list(await workflow.run_async())
    if inspect.isawaitable(workflow):
        return list(await workflow)
    return list(await asyncio.to_thread(workflow.run))


def _check_task(task: TrinityTask, workflow: Any, repeat_times: int, format_args: FormatArgs | None) -> None:
    """Raise `UsageError` for fields of a task that contradict the arguments of `run_workflow`."""
    if task.workflow is not None and task.workflow is not workflow:
        raise UsageError(f"workflow = {task.workflow!r}: run_workflow plays {workflow!r}; leave one of them out")
    if task.repeat_times is not None and task.repeat_times != repeat_times:
        raise UsageError(
            f"repeat_times = {task.repeat_times}: run_workflow plays each task {repeat_times} times; "
            "leave repeat_times of the task out"
        )
    if task.is_eval:
        raise UsageError("is_eval = True: run_workflow trains; use headrace.evaluation.evaluate")
    if format_args is not None:
        raise UsageError("format_args: the rows are tasks with their own format_args; leave it out")


def _task(row: Mapping[str, Any], format_args: FormatArgs | None) -> TrinityTask:
    return TrinityTask(row, format_args or FormatArgs(), task_id=task_id_of(row))


class AgentScopeReActAgent:
    """ReAct agent whose model calls go through `openai_client`.

    `reply` returns the agent's message, or the fields of its structured answer if `response_structure` is set.
    """

    def __init__(
        self,
        openai_client: Any,
        model_name: str | None = None,
        system_prompt: str = "You are a helpful assistant.",
        generate_kwargs: Mapping[str, Any] | None = None,
        response_structure: Any = None,
        max_iters: int = 10,
        toolkit: Any = None,
    ) -> None:
        agents, models = import_module("agentscope.agent"), import_module("agentscope.model")
        formatter = import_module("agentscope.formatter").OpenAIChatFormatter()
        name = model_name or openai_client.model_path
        model = models.OpenAIChatModel(
            api_key="EMPTY", model_name=name, generate_kwargs=dict(generate_kwargs or {}), stream=False
        )
        model.client = openai_client
        more = {"toolkit": toolkit} if toolkit is not None else {}
        self.agent = agents.ReActAgent(
            name="react_agent", sys_prompt=system_prompt, model=model, formatter=formatter, max_iters=max_iters, **more
        )
        self._structure = response_structure

    async def reply(self, query: str) -> Any:
        message = import_module("agentscope.message").Msg("user", query, role="user")
        if self._structure is None:
            return await self.agent.reply(message)
        return (await self.agent.reply(message, structured_model=self._structure)).metadata or {}


class AgentScopeReActWorkflow(Workflow):
    """Workflow with a ReAct agent. Override `calculate_reward`, and optionally `make_agent`."""

    is_async = True

    def __init__(
        self, *, task: TrinityTask, model: ModelWrapper, auxiliary_models: Sequence[ModelWrapper] | None = None
    ) -> None:
        super().__init__(task=task, model=model, auxiliary_models=auxiliary_models)
        self.agent = self.make_agent(model.get_openai_async_client())

    def make_agent(self, client: Any) -> Any:
        return AgentScopeReActAgent(openai_client=client)

    async def calculate_reward(self, response: Any) -> float | Mapping[str, float]:
        """Return the reward of a response: a number, or parts whose sum is the reward."""
        raise NotImplementedError

    async def run_async(self) -> list[Any]:
        query = self.task.raw_task[self.task.format_args.prompt_key]
        response = await self.agent.reply(query)
        reward = await self.calculate_reward(response)
        if not isinstance(reward, Mapping):
            return self.construct_experiences(score("calculate_reward", reward))
        parts = {name: score(f"calculate_reward.{name}", part) for name, part in reward.items()}
        return self.construct_experiences(sum(parts.values()), parts)

    def construct_experiences(self, reward: float, metrics: Mapping[str, float] | None = None) -> list[Any]:
        """Return an experience for each call of the model, all with the reward of the run."""
        experiences = self.model.extract_experience_from_history()
        for experience in experiences:
            experience.reward = reward
            experience.metrics |= dict(metrics or {})
        return experiences
