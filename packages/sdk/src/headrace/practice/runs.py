"""One run: its sessions, its OpenAI clients, its rewards. A run has a session for each agent that takes part."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from headrace.async_client import AsyncClient, AsyncSession
from headrace.errors import HeadraceError
from headrace.practice.agents import in_thread
from headrace.practice.arguments import check_names, real_number, score
from headrace.sessions import Purpose, new_id
from headrace.stack import Stack
from headrace_schemas.ids import derived_id
from headrace_schemas.plain_values import describe_error, plain_number, plain_value

Play = Callable[[Any, "Run"], Awaitable[Any] | Any]
"""One run of the agent on a task. What it returns is kept as `Run.result`; what it raises, as `Run.error`."""
SOLO = "agent"
"""The role of an agent that is alone."""


@dataclass(frozen=True, slots=True)
class AgentReward:
    """What was said about one agent of a run."""

    value: float
    parts: Mapping[str, float]
    metrics: Mapping[str, float]


def worth_of(parts: Mapping[str, float], given: Mapping[str, float] | None) -> dict[str, float]:
    """What each part of a reward is worth: as it is usual, or as it was `given`. Raises `UsageError`."""
    check_names("reward_function", given or {}, parts)
    return {**parts, **{name: real_number(f"reward_function.{name}", value) for name, value in (given or {}).items()}}


class Run:
    """One attempt at a task, by one agent or by several. All sessions of a run have one `run_id`.

    The runs of a task are compared with each other, role by role: where several agents take part, each role but
    `agent` has a task id of its own.
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
        """What a call names as its `model`."""
        self.result: Any = None
        self.error: str | None = None
        """Why the run has no reward: it failed. A failure is never a reward of 0."""
        self.rewards: dict[str, AgentReward] = {}
        self._client = client
        self._purpose = purpose
        self._needs_reward = needs_reward
        self._sessions: dict[str, AsyncSession] = {}
        self._clients: list[Any] = []
        self._whole: AgentReward | None = None

    def session(self, role: str = SOLO) -> AsyncSession:
        """The session of one agent of the run; the same one each time. It ends with the run."""
        if role not in self._sessions:
            task_id = self.task_id if role == SOLO else f"{self.task_id}/{role}"
            self._sessions[role] = self._client.session(
                f"{self.run_id}.{role}", task_id=task_id, run_id=self.run_id, purpose=self._purpose
            )
        return self._sessions[role]

    def openai(self, role: str = SOLO, *, blocking: bool = False) -> Any:
        """An `openai.AsyncOpenAI` (`blocking`: an `OpenAI`) for one agent. Its calls name `run.model`."""
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
        """How well one agent did, or all that were not named. `value` None is the sum of `parts`. The last call counts.

        `metrics` are only reported. Raises `ValueError` for what is no finite number: a judge that failed has none.
        """
        check = _number if value is None else partial(score, "parts")
        numbers = {name: check(part) for name, part in (parts or {}).items()}
        if value is None and not numbers:
            raise ValueError("a reward is a number, or the sum of parts; a run without one gets none, and never a 0")
        total = _number(value) if value is not None else math.fsum(numbers.values())
        said = AgentReward(
            total, numbers, {name: score(f"metrics.{name}", metric) for name, metric in (metrics or {}).items()}
        )
        if role is None:
            self._whole = said
        else:
            self.rewards[role] = said

    @property
    def session_ids(self) -> dict[str, str]:
        """Session id by role."""
        return {role: session.session_id for role, session in self._sessions.items()}

    @property
    def value(self) -> float | None:
        """The mean of its agents' rewards; None: it has none."""
        found = [said.value for said in self.rewards.values()]
        return math.fsum(found) / len(found) if found else None

    @property
    def metrics(self) -> dict[str, float]:
        """What `reward` was told beside the values."""
        found: dict[str, float] = {}
        for said in self.rewards.values():
            found |= said.metrics
        return found

    async def played(self, play: Play) -> None:
        """Play, then send what was said of each session. An error of `play` is kept, and no reward is sent."""
        try:
            self.result = await (
                play(self.task, self) if inspect.iscoroutinefunction(play) else in_thread(lambda: play(self.task, self))
            )
        except Exception as error:  # noqa: BLE001 (a user's play may raise anything)
            self.error = describe_error(error)
        if self._whole is not None:
            self.rewards = dict.fromkeys(self._sessions or (SOLO,), self._whole) | self.rewards
        silent = self.rewards.keys() - self._roles()
        if silent and self.error is None:
            roles = ", ".join(sorted(self._roles())) or "none"
            self.error = f"reward: the role {min(silent)!r} made no call to the model; those that did: {roles}"
        if self.error is not None:
            self.rewards = {}
        elif not self.rewards and self._needs_reward:
            self.error = "it gave no reward"
        await self._end()

    def _roles(self) -> set[str]:
        """Return the agents that a reward may be about: those with a session."""
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
        """Say what was said of each session, and end it. Raises `HeadraceError`."""
        for role, session in self._sessions.items():
            said = self.rewards.get(role)
            if said is None or self._purpose == "eval":
                await session.end()
            else:
                context = {"parts": dict(said.parts), "metrics": dict(said.metrics)}
                kept = {name: json.loads(json.dumps(table)) for name, table in context.items() if table}
                await session.feedback(said.value, context=kept, ends_session=True)


def task_id_of(task: object) -> str:
    """What a task is called: its own `task_id` or `id`, or a name that equal tasks share."""
    if isinstance(task, Mapping):
        given = task.get("task_id", task.get("id"))
        if isinstance(given, str | int) and str(given):
            return str(given)
    given = getattr(task, "task_id", None)
    if isinstance(given, str) and given:
        return given
    return derived_id("task", json.dumps(task, sort_keys=True, default=repr))


def _number(value: object) -> float:
    try:
        if isinstance(plain_value(value), bool):
            raise ValueError("a reward is a number, not bool")
        return plain_number(value)
    except TypeError:
        raise ValueError(f"a reward is a number, not {type(value).__name__}") from None
    except ValueError as error:
        raise ValueError(f"a reward is a finite number: {error}") from None
