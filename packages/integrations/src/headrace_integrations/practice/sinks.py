"""Destinations to which training copies send their runs: Headrace's own interface, or that of Trinity-RFT's clients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headrace.async_client import AsyncClient
from headrace.errors import UsageError
from headrace.sessions import DEFAULT_URL, gateway_root
from headrace_integrations.practice.runs import SOLO, Run
from headrace_integrations.stack import Addresses, Stack

if TYPE_CHECKING:
    from pydantic import JsonValue

_NO_CALL = "the agent made no call to the model: give it the client of copy.openai()"
R = TypeVar("R", bound=Run)
TRINITY_URL = "http://127.0.0.1:8010"
"""Default address of Trinity-RFT's explorer, and of a gateway with `gateway.trinity_port = 8010`."""


class TrajectorySink(Protocol):
    """Destination of runs and their rewards. The caller owns and closes `client`."""

    stack: Stack

    def run(self, client: AsyncClient, task_id: str, number: int) -> Run:
        """Create a run of a task. `number` is the number of the run among those of the task, from 0."""
        ...

    async def commit(self, client: AsyncClient) -> None:
        """Send the runs and their rewards to the trainer. Raises `HeadraceError` if that fails."""
        ...


class HeadraceSink:
    """Sink for a Headrace gateway. Each run is a session, and its reward ends the session.

    Args:
        url: address of the gateway, or a `Stack`.
    """

    def __init__(self, url: str | Stack = DEFAULT_URL, model: str = "", *, api_key: str | None = None) -> None:
        self.stack = _stack(url, model, api_key)

    def run(self, client: AsyncClient, task_id: str, number: int) -> Run:
        return _run_of(HeadraceRun, self.stack, client, task_id)

    async def commit(self, client: AsyncClient) -> None:
        """Do nothing, because feedback that ends a session also commits it."""


class TrinitySink:
    """Sink for Trinity-RFT's interface: a Trinity-RFT explorer, or a gateway of Headrace.

    Chat calls have no session; rewards go to `POST /feedback` with the ids of the answers, and `POST /commit` commits
    them. The ids of streamed answers are not recorded, so a copy that requests a stream is refused.
    """

    def __init__(self, url: str | Stack = TRINITY_URL, model: str = "", *, api_key: str | None = None) -> None:
        self.stack = _stack(url, model, api_key)

    def run(self, client: AsyncClient, task_id: str, number: int) -> Run:
        run = _run_of(TrinityRun, self.stack, client, task_id)
        run.run_id = str(number)
        return run

    async def commit(self, client: AsyncClient) -> None:
        await client._post("/commit", {"task_id": None, "run_id": None, "time_threshold": None})


class HeadraceRun(Run):
    """A run with sessions. If it has a reward but made no call, sending the reward is an error, as in `TrinityRun`."""

    async def _send(self) -> None:
        if self.rewards and not self._sessions:
            raise UsageError(_NO_CALL)
        await super()._send()


class TrinityRun(Run):
    """A run that is identified only by the ids of its answers."""

    def _roles(self) -> set[str]:
        return set(self.rewards)

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._response_ids: list[str] = []

    def openai(self, role: str = SOLO, *, blocking: bool = False) -> Any:
        if role != SOLO:
            raise UsageError(
                f"role = {role!r}: a reward through TrinitySink applies to the whole run; use HeadraceSink for roles"
            )
        client = self.stack.openai({}, blocking=blocking)
        self._clients.append(client)
        _record_response_ids(client, self.note, blocking)
        return client

    def note(self, response_id: str) -> None:
        """Add the id of an answer to this run, so that the answer gets the run's reward.

        Call it for answers of clients other than `openai`, whose answers are added automatically.
        """
        self._response_ids.append(response_id)

    async def _send(self) -> None:
        value = self.value
        if value is None:
            return
        if not self._response_ids:
            raise UsageError(_NO_CALL)
        ids: list[JsonValue] = [*self._response_ids]
        body: dict[str, JsonValue] = {"msg_ids": ids, "reward": value, "task_id": self.task_id, "run_id": self.run_id}
        await self._client._post("/feedback", body)


def _stack(url: str | Stack, model: str, api_key: str | None) -> Stack:
    if isinstance(url, Stack):
        for name, value in (("model", model or None), ("api_key", api_key)):
            if value is not None and value != getattr(url, name):
                raise UsageError(f"{name}: url is a stack with its own {name}; leave {name} out")
        return url
    if not model:
        raise UsageError("model: must be the name of the trained model at the gateway")
    return Stack(Addresses(gateway=gateway_root(url)), model, api_key=api_key)


def _run_of(kind: type[R], stack: Stack, client: AsyncClient, task_id: str) -> R:
    """Create a run of this kind that may end without a reward. Then it sends no feedback."""
    return kind(stack, client, {"task_id": task_id}, purpose="train", model=stack.model, needs_reward=False)


def _record_response_ids(client: Any, note: Callable[[str], None], blocking: bool) -> None:
    """Wrap the client's `chat.completions.create`, so that it passes the ids of unstreamed answers to `note`."""
    completions = client.chat.completions
    create = completions.create

    def check(named: dict[str, Any]) -> None:
        if named.get("stream"):
            raise UsageError(
                "stream: TrinitySink does not record the ids of streamed answers; use HeadraceSink, or do not stream"
            )

    def calling(*positional: Any, **named: Any) -> Any:
        check(named)
        completion = create(*positional, **named)
        note(completion.id)
        return completion

    async def awaiting(*positional: Any, **named: Any) -> Any:
        check(named)
        completion = await create(*positional, **named)
        note(completion.id)
        return completion

    completions.create = calling if blocking else awaiting


Door, HeadraceDoor, TrinityDoor = TrajectorySink, HeadraceSink, TrinitySink
"""Earlier names, which existing programs import."""
