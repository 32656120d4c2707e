"""One attempt at a task (`Run`), and calls of agents of any framework through Headrace.

A run has a session, an OpenAI client and a reward for each agent that takes part. No framework is imported. An agent
has an OpenAI client as `client`, `model.client` or `llm.client`, or a method `connect(base_url, headers, model)`. It
has a method `run(text)` or `reply(text)`, or is a function. The OpenAI client of an agent is redirected to Headrace.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headrace.async_client import AsyncClient, AsyncSession
from headrace.errors import HeadraceError, UsageError
from headrace.sessions import Purpose, new_id
from headrace_integrations.stack import Stack
from headrace_operations.arguments import check_names, real_number, score
from headrace_schemas.values.ids import derived_id
from headrace_schemas.values.text import describe_error, plain_number, plain_value

Play = Callable[[Any, "Run"], Awaitable[Any] | Any]
"""Function that plays one run of the agent on a task. `Run.result` stores its result, and `Run.error` its exception."""
SOLO = "agent"
"""Role of an agent that is alone in its run."""


@dataclass(frozen=True, slots=True)
class AgentReward:
    """Reward of one agent in a run, with its parts and further metrics."""

    value: float
    parts: Mapping[str, float]
    metrics: Mapping[str, float]


def part_values(parts: Mapping[str, float], overrides: Mapping[str, float] | None) -> dict[str, float]:
    """Return the value of each part of a reward: the value in `overrides`, or else the default in `parts`.

    Raises:
        UsageError: an override names no part or is not a number.
    """
    check_names("reward_function", overrides or {}, parts)
    return {
        **parts,
        **{name: real_number(f"reward_function.{name}", value) for name, value in (overrides or {}).items()},
    }


class Run:
    """One attempt at a task, by one or several agents. All sessions of a run have the same `run_id`.

    The runs of a task are compared with each other by role. With several agents, each role except `agent` has its own
    task id.
    """

    def __init__(
        self,
        stack: Stack,
        client: AsyncClient,
        task: object,
        *,
        purpose: Purpose,
        model: str,
        needs_reward: bool = True,
    ) -> None:
        self.stack = stack
        self.task = task
        self.task_id = task_id_of(task)
        self.run_id = new_id()
        self.model = model
        """Model name that calls must use."""
        self.result: Any = None
        self.error: str | None = None
        """Reason why the run failed and has no reward, or None. A failure never counts as a reward of 0."""
        self.rewards: dict[str, AgentReward] = {}
        self._client = client
        self._purpose = purpose
        self._needs_reward = needs_reward
        self._sessions: dict[str, AsyncSession] = {}
        self._clients: list[Any] = []
        self._run_reward: AgentReward | None = None

    def session(self, role: str = SOLO) -> AsyncSession:
        """Return the session of one agent of the run.

        The session is created on the first call and ends with the run.
        """
        if role not in self._sessions:
            task_id = self.task_id if role == SOLO else f"{self.task_id}/{role}"
            self._sessions[role] = self._client.session(
                f"{self.run_id}.{role}", task_id=task_id, run_id=self.run_id, purpose=self._purpose
            )
        return self._sessions[role]

    def openai(self, role: str = SOLO, *, blocking: bool = False) -> Any:
        """Return an OpenAI client for one agent, `openai.AsyncOpenAI` or, if `blocking`, `openai.OpenAI`.

        Its calls must use the model name `run.model`.
        """
        client = self.stack.openai(self.session(role).headers, blocking=blocking)
        self._clients.append(client)
        return client

    def reward(
        self,
        value: float | None = None,
        role: str | None = None,
        parts: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Set the reward of one agent, or of all agents without a reward of their own. A later call replaces it.

        Args:
            value: the reward; by default the sum of `parts`.
            metrics: numbers that are only reported.

        Raises:
            ValueError: a number is not finite, for example because a judge failed.
        """
        check = _number if value is None else partial(score, "parts")
        numbers = {name: check(part) for name, part in (parts or {}).items()}
        if value is None and not numbers:
            raise ValueError(
                "value: must be a number, or None with parts, whose sum is the reward; "
                "a run without a reward needs no call"
            )
        total = _number(value) if value is not None else math.fsum(numbers.values())
        reward = AgentReward(
            total, numbers, {name: score(f"metrics.{name}", metric) for name, metric in (metrics or {}).items()}
        )
        if role is None:
            self._run_reward = reward
        else:
            self.rewards[role] = reward

    @property
    def session_ids(self) -> dict[str, str]:
        """Session id of each agent that has taken part in the run, by the agent's role."""
        return {role: session.session_id for role, session in self._sessions.items()}

    @property
    def value(self) -> float | None:
        """The mean of the rewards of the run's agents, or None if there is no reward."""
        values = [reward.value for reward in self.rewards.values()]
        return math.fsum(values) / len(values) if values else None

    @property
    def metrics(self) -> dict[str, float]:
        """Values of the metrics that were passed to `reward`, by name."""
        metrics: dict[str, float] = {}
        for reward in self.rewards.values():
            metrics |= reward.metrics
        return metrics

    async def execute(self, play: Play) -> None:
        """Run the agent by calling `play(task, run)`, then end each session and send its agent's reward.

        If `play` raises, store the error and send no reward. Sessions of evaluation runs end without a reward.

        Args:
            play: the user's function, which plays the task and sets rewards with `Run.reward`.
        """
        try:
            self.result = await (
                play(self.task, self)
                if inspect.iscoroutinefunction(play)
                else run_in_thread(lambda: play(self.task, self))
            )
        except Exception as error:  # noqa: BLE001 (a user's play may raise anything)
            self.error = describe_error(error)
        if self._run_reward is not None:
            self.rewards = dict.fromkeys(self._sessions or (SOLO,), self._run_reward) | self.rewards
        silent = self.rewards.keys() - self._roles()
        if silent and self.error is None:
            roles = ", ".join(sorted(self._roles())) or "none"
            self.error = f"reward: the role {min(silent)!r} made no call to the model; roles with calls: {roles}"
        if self.error is not None:
            self.rewards = {}
        elif not self.rewards and self._needs_reward:
            self.error = "the run set no reward"
        await self._end()

    def _roles(self) -> set[str]:
        """Return the roles of agents that may get a reward: those with a session."""
        return set(self._sessions)

    async def _end(self) -> None:
        try:
            await self._send()
        except HeadraceError as error:
            self.error = self.error or str(error)
            self.rewards = {}
        for client in self._clients:
            closed = client.close()
            if inspect.isawaitable(closed):
                await closed

    async def _send(self) -> None:
        """Send the reward of each session and end it. Raises `HeadraceError`."""
        for role, session in self._sessions.items():
            reward = self.rewards.get(role)
            if reward is None or self._purpose == "eval":
                await session.end()
            else:
                context = {"parts": dict(reward.parts), "metrics": dict(reward.metrics)}
                context_tables = {name: json.loads(json.dumps(table)) for name, table in context.items() if table}
                await session.feedback(reward.value, context=context_tables, ends_session=True)


def task_id_of(task: object) -> str:
    """Return the id of a task: its `task_id` or `id`, or else a digest of its content."""
    if isinstance(task, Mapping):
        own_id = task.get("task_id", task.get("id"))
        if isinstance(own_id, str | int) and str(own_id):
            return str(own_id)
    own_id = getattr(task, "task_id", None)
    if isinstance(own_id, str) and own_id:
        return own_id
    return derived_id("task", json.dumps(task, sort_keys=True, default=repr))


def _number(value: object) -> float:
    try:
        if isinstance(plain_value(value), bool):
            raise ValueError("a reward must be a number, not bool")
        return plain_number(value)
    except TypeError:
        raise ValueError(f"a reward must be a number, not {type(value).__name__}") from None
    except ValueError as error:
        raise ValueError(f"a reward must be a finite number: {error}") from None


T = TypeVar("T")
_METHODS = ("run", "reply", "__call__")


@contextmanager
def plugged(agent: Any, base_url: str, headers: Mapping[str, str], model: str, api_key: str | None) -> Iterator[None]:
    """Redirect an agent's calls to `base_url`, with these headers and this model name, until the end of the block.

    Only one such block may be active for each agent. Raises `UsageError` for an agent without a client.
    """
    connect = getattr(agent, "connect", None)
    if callable(connect):
        authorization = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connect(base_url=base_url, headers={**headers, **authorization}, model=model)
        yield
        return
    holder = _client_holder(agent)
    before = {name: getattr(holder, name) for name in ("client", "model_name") if hasattr(holder, name)}
    if holder is agent and isinstance(getattr(agent, "model", None), str):
        before["model"] = agent.model
    holder.client = holder.client.with_options(base_url=base_url, api_key=api_key or "-", default_headers=dict(headers))
    for name in before.keys() - {"client"}:
        setattr(holder, name, model)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(holder, name, value)


async def call_agent(agent: Any, text: Any) -> Any:
    """Call the agent with a text and return its answer. An agent that is not async is called in a thread."""
    method = next((name for name in _METHODS if callable(getattr(agent, name, None))), None)
    if method is None:
        raise UsageError(f"{type(agent).__name__} must have a method run(text) or reply(text), or be callable")
    call: Callable[[Any], Any] = agent if method == "__call__" else getattr(agent, method)
    awaits = inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(getattr(call, "__call__", None))  # noqa: B004
    answer = call(text) if awaits else await asyncio.to_thread(call, text)
    return await answer if inspect.isawaitable(answer) else answer


asked = call_agent
"""Earlier name of `call_agent`."""


def text_of(answer: Any) -> str:
    """Return the text of an answer, which is a string or a message with `get_text_content()` or `content`."""
    reader = getattr(answer, "get_text_content", None)
    text = reader() if callable(reader) else getattr(answer, "content", answer)
    return text if isinstance(text, str) else "" if text is None else str(text)


def run_in_thread(work: Callable[[], T | Awaitable[T]]) -> Awaitable[T]:
    """Call a function in a thread and return its result. An awaitable result is awaited on the event loop."""

    async def call() -> T:
        returned: Any = await asyncio.to_thread(work)
        result: T = await returned if inspect.isawaitable(returned) else returned
        return result

    return call()


def _client_holder(agent: Any) -> Any:
    for name in ("", "model", "llm"):
        holder = getattr(agent, name, None) if name else agent
        if holder is not None and hasattr(getattr(holder, "client", None), "with_options"):
            return holder
    raise UsageError(
        f"{type(agent).__name__} has no OpenAI client as client, model.client or llm.client, and no method connect(); "
        "give it one of them"
    )
