"""The doors that runs go through: Headrace's own, or the one that Trinity-RFT's clients use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from headrace.async_client import AsyncClient
from headrace.errors import UsageError
from headrace.practice.runs import SOLO, Run
from headrace.sessions import DEFAULT_URL, root_of
from headrace.stack import Addresses, Stack

if TYPE_CHECKING:
    from pydantic import JsonValue

_SILENT = "the agent made no call to the model: give it the client of copy.openai()"
R = TypeVar("R", bound=Run)
TRINITY_URL = "http://127.0.0.1:8010"
"""Where Trinity-RFT's explorer is by default, and the gateway with `gateway.trinity_port = 8010`."""


class Door(Protocol):
    """Where runs go. `client` is the caller's, who closes it."""

    stack: Stack

    def run(self, client: AsyncClient, task_id: str, number: int) -> Run:
        """A new run of a task, its `number` counted from 0."""
        ...

    async def commit(self, client: AsyncClient) -> None:
        """Have what was rewarded trained. Raises `HeadraceError`."""
        ...


class HeadraceDoor:
    """Each run is a session, and its reward ends it. `url` is the gateway's, or a `Stack`."""

    def __init__(self, url: str | Stack = DEFAULT_URL, model: str = "", *, api_key: str | None = None) -> None:
        self.stack = _stack(url, model, api_key)

    def run(self, client: AsyncClient, task_id: str, number: int) -> Run:
        return _run_of(HeadraceRun, self.stack, client, task_id)

    async def commit(self, client: AsyncClient) -> None:
        """Nothing is left to be said: feedback that ends a session commits it."""


class TrinityDoor:
    """Chat without a session, `POST /feedback` with the ids of the answers, `POST /commit`: a Trinity-RFT explorer, or
    a gateway of ours. Only whole answers have their ids noted, so a copy that asks for a stream is refused."""

    def __init__(self, url: str | Stack = TRINITY_URL, model: str = "", *, api_key: str | None = None) -> None:
        self.stack = _stack(url, model, api_key)

    def run(self, client: AsyncClient, task_id: str, number: int) -> Run:
        run = _run_of(TrinityRun, self.stack, client, task_id)
        run.run_id = str(number)
        return run

    async def commit(self, client: AsyncClient) -> None:
        await client._post("/commit", {"task_id": None, "run_id": None, "time_threshold": None})


class HeadraceRun(Run):
    """A run whose sessions are told; a reward without any is an error, as with the other door."""

    async def _send(self) -> None:
        if self.rewards and not self._sessions:
            raise UsageError(_SILENT)
        await super()._send()


class TrinityRun(Run):
    """A run whose answers are told by their ids alone."""

    def _roles(self) -> set[str]:
        return set(self.rewards)

    def __init__(self, *positional: Any, **named: Any) -> None:
        super().__init__(*positional, **named)
        self._noted: list[str] = []

    def openai(self, role: str = SOLO, *, blocking: bool = False) -> Any:
        if role != SOLO:
            raise UsageError(
                f"role = {role!r}: a reward through TrinityDoor is of the whole run; use HeadraceDoor for roles"
            )
        client = self.stack.openai({}, blocking=blocking)
        self._clients.append(client)
        _noting(client, self.note, blocking)
        return client

    def note(self, response_id: str) -> None:
        """For answers that came through another client than `openai`'s."""
        self._noted.append(response_id)

    async def _send(self) -> None:
        value = self.value
        if value is None:
            return
        if not self._noted:
            raise UsageError(_SILENT)
        ids: list[JsonValue] = [*self._noted]
        said: dict[str, JsonValue] = {"msg_ids": ids, "reward": value, "task_id": self.task_id, "run_id": self.run_id}
        await self._client._post("/feedback", said)


def _stack(url: str | Stack, model: str, api_key: str | None) -> Stack:
    if isinstance(url, Stack):
        for name, value in (("model", model or None), ("api_key", api_key)):
            if value is not None and value != getattr(url, name):
                raise UsageError(f"{name}: url is a stack, which has its own; leave {name} out")
        return url
    if not model:
        raise UsageError("model: say the name that the gateway calls the trained model by")
    return Stack(Addresses(gateway=root_of(url)), model, api_key=api_key)


def _run_of(kind: type[R], stack: Stack, client: AsyncClient, task_id: str) -> R:
    """Of which a copy may make no reward: then nothing is said of it."""
    return kind(stack, client, {"task_id": task_id}, purpose="train", model=stack.model, needs_reward=False)


def _noting(client: Any, note: Callable[[str], None], blocking: bool) -> None:
    """Have the ids of whole answers of `client.chat.completions.create` noted."""
    completions = client.chat.completions
    create = completions.create

    def check(named: dict[str, Any]) -> None:
        if named.get("stream"):
            raise UsageError("stream: TrinityDoor notes the ids of whole answers only; use HeadraceDoor, or no stream")

    def calling(*positional: Any, **named: Any) -> Any:
        check(named)
        found = create(*positional, **named)
        note(found.id)
        return found

    async def awaiting(*positional: Any, **named: Any) -> Any:
        check(named)
        found = await create(*positional, **named)
        note(found.id)
        return found

    completions.create = calling if blocking else awaiting
