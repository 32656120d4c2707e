"""Workflows of Trinity-RFT and training with them (`run_workflow`), with the interface that a workflow sees.

The classes are `Workflow`, `AgentScopeReActWorkflow`, `ModelWrapper`, `Task` and `Experience`. Tokens of calls are read
from the bus.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from headrace.blocking import blocking
from headrace.errors import UsageError
from headrace.following import Follower
from headrace.topics import connected
from headrace_integrations.practice.runs import SOLO, Run, task_id_of
from headrace_integrations.practice.training import Step, train_on_tasks
from headrace_integrations.stack import Stack
from headrace_operations.arguments import score
from headrace_schemas import Turn
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values import ids


class Workflow:
    """Base class of workflows. Subclasses override `run`, or `run_async` with `is_async = True`.

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
        """Return the experiences of one run, with the reward of the run."""
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
    """Train on runs of a workflow, and yield the result of each training step.

    All experiences of a run must have the same reward. A workflow that raises or returns no reward makes its run fail.

    Args:
        workflow: class or function with the parameters task, model and auxiliary models.
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
    """Return the reward that all experiences of a run have.

    Raises:
        UsageError: an experience has no reward, or the rewards differ. Send rewards of single turns as feedback about
            turns.
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
    """Return the metrics of a run's experiences. If several experiences have a metric, the last value counts."""
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
    """Workflow with a ReAct agent. Subclasses override `calculate_reward`, and optionally `make_agent`."""

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


@dataclass(slots=True)
class EID:
    """Id of an experience: `task` and `run` are those of the run, `step` counts its calls, `suffix` is the response
    id."""

    batch: int | str = ""
    task: int | str = ""
    run: int | str = 0
    step: int = 0
    suffix: str = ""


@dataclass(slots=True)
class TrinityExperience:
    """One call of the model.

    Every call of a run has the same reward. Setting any other attribute is an error, because it would be ignored.

    Attributes:
        tokens: tokens of prompt and answer.
        prompt_length: number of prompt tokens.
        logprobs: logprobs of the answer tokens.
    """

    eid: EID
    tokens: list[int]
    prompt_length: int
    logprobs: list[float]
    reward: float | None = None
    response_text: str = ""
    prompt_text: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def action_mask(self) -> list[bool]:
        """Mask of the sampled tokens: all tokens after the prompt."""
        return [True] * (len(self.tokens) - self.prompt_length)


@dataclass
class FormatArgs:
    """Names of the data set's columns: `prompt_key` for the question, `response_key` for the expected answer."""

    prompt_key: str = "prompt"
    response_key: str = "response"


@dataclass
class TrinityTask:
    """One row of a data set to be played by a workflow, with the workflow's options."""

    raw_task: Mapping[str, Any]
    format_args: FormatArgs = field(default_factory=FormatArgs)
    workflow: Any = None
    repeat_times: int | None = None
    rollout_args: Mapping[str, Any] = field(default_factory=dict)
    workflow_args: Mapping[str, Any] = field(default_factory=dict)
    reward_fn_args: Mapping[str, Any] = field(default_factory=dict)
    is_eval: bool = False
    batch_id: int | str = ""
    task_id: int | str = ""

    @property
    def task_desc(self) -> Any:
        return self.raw_task.get(self.format_args.prompt_key)

    @property
    def truth(self) -> Any:
        return self.raw_task.get(self.format_args.response_key)


class ModelWrapper:
    """Model of one run. The calls of its clients belong to the run's session; `model_path` is the model name to use."""

    def __init__(self, run: Run, role: str = SOLO, *, model: str | None = None, enable_history: bool = True) -> None:
        self.model_path = self.model_name = model or run.model
        self.enable_history = enable_history
        self._run, self._role = run, role
        self._follow = Follower(Turn.topic)
        self._history = TurnHistory()
        self._began = False
        self._turns: list[Turn] = []

    def get_openai_client(self) -> Any:
        """Return a blocking `openai.OpenAI` client of the gateway, whose calls belong to this run."""
        return self._with_model_path(self._run.openai(self._role, blocking=True))

    def get_openai_async_client(self) -> Any:
        """Return an `openai.AsyncOpenAI` client of the gateway, whose calls belong to this run."""
        return self._with_model_path(self._run.openai(self._role))

    def extract_experience_from_history(self, clear_history: bool = True) -> list[TrinityExperience]:
        """Return an experience for each finished answer, in order.

        The gateway publishes a turn before its answer ends, so all finished answers are included. Raises `ValueError`
        if `enable_history` is False.
        """
        if not self.enable_history:
            raise ValueError("enable_history = False: this model keeps no history; create it with enable_history=True")
        blocking(self._read())
        experiences = [
            experience for step, turn in enumerate(self._turns) for experience in self._experiences(turn, step)
        ]
        if clear_history:
            self._turns.clear()
        return experiences

    @property
    def model_version(self) -> str | None:
        """The version that the gateway serves under the model's name."""
        return self._run.stack.serving(self.model_path)

    def _with_model_path(self, client: Any) -> Any:
        client.model_path = self.model_path
        return client

    async def _read(self) -> None:
        stack, session = self._run.stack, self._run.session(self._role).session_id
        key = ids.session_key(stack.tenant, session)
        async with connected(stack.bus) as topics:
            async for turn in self._new_turns(topics, key):
                self._turns.append(self._history.whole_turn(turn))

    async def _new_turns(self, topics: Any, key: str) -> AsyncIterator[Turn]:
        async for turn in self._follow.events(topics, Turn, keys=[key]):
            yield turn

    def _experiences(self, turn: Turn, step: int) -> list[TrinityExperience]:
        return [
            TrinityExperience(
                eid=EID(
                    batch=getattr(self._run.task, "batch_id", ""),
                    task=self._run.task_id,
                    run=self._run.run_id,
                    step=step,
                    suffix=turn.turn_id,
                ),
                tokens=[*turn.prompt_token_ids, *choice.token_ids],
                prompt_length=len(turn.prompt_token_ids),
                logprobs=list(choice.logprobs),
                response_text=choice.message.text,
                info={"model_version": turn.version},
            )
            for choice in turn.choices
        ]


Experience, Task = TrinityExperience, TrinityTask
