"""Stand-ins for adapter tests without services: a gateway that records requests, a model with a fixed answer, and a bus
in memory."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import httpx2

from headrace import AsyncClient, Client
from headrace.stack import Addresses, Stack
from headrace.topics import Entry, Range
from headrace_integrations.practice.runs import Run
from headrace_integrations.practice.training import Step, play_all
from headrace_schemas import Event

VERSION = "tiny@0123456789abcdef"


class Gateway:
    """Gateway that accepts and records every request."""

    def __init__(self) -> None:
        self.posted: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, request: httpx2.Request) -> httpx2.Response:
        self.posted.append((request.url.path, json.loads(request.content) if request.content else {}))
        return httpx2.Response(202, json={"event_ids": []})

    @property
    def values(self) -> list[float]:
        """Values of all recorded feedback."""
        return [body["value"] for path, body in self.posted if path == "/v1/feedback" and "value" in body]

    @property
    def ended(self) -> int:
        return sum(path.endswith("/end") for path, _ in self.posted)


class RecordingGatewayStack(Stack):
    """Stack with a recording gateway only. Its models always answer `answer`."""

    def __init__(self, answer: str = "it is 4", settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(Addresses("http://gateway"), "tiny")
        self.gateway, self.answer = Gateway(), answer
        self.settings_table = {"trainer.batch_experiences": 4, "trainer.compute.device": "cpu", **(settings or {})}
        self.clients: list[Mapping[str, str]] = []
        self.__dict__["client"] = Client("http://gateway", transport=httpx2.MockTransport(self.gateway))

    def async_client(self) -> AsyncClient:
        return AsyncClient("http://gateway", transport=httpx2.MockTransport(self.gateway))

    def openai(self, headers: Mapping[str, str], *, blocking: bool = False) -> Any:
        self.clients.append(dict(headers))
        return fake_client(self.answer, blocking=blocking)

    def settings(self) -> dict[str, Any]:
        return self.settings_table

    def serving(self, name: str | None = None) -> str | None:
        return VERSION

    async def hold(self, version: str, timeout_s: float = 120.0) -> None: ...


def fake_client(answer: str, *, blocking: bool) -> Any:
    """Return the part of an OpenAI client that the tests use."""
    message = SimpleNamespace(content=answer, tool_calls=None)
    usage = SimpleNamespace(prompt_tokens=3, completion_tokens=2)
    completion = SimpleNamespace(choices=[SimpleNamespace(message=message)], usage=usage)

    async def create(**_: Any) -> Any:
        return completion

    async def close() -> None: ...

    completions = SimpleNamespace(create=(lambda **_: completion) if blocking else create)
    return SimpleNamespace(chat=SimpleNamespace(completions=completions), close=(lambda: None) if blocking else close)


async def train_once(
    stack: RecordingGatewayStack, tasks: Sequence[Any], play: Any, *, group_size: int = 1, **_: Any
) -> AsyncIterator[Step]:
    """Play each task without training, as a replacement of `train_on_tasks`."""
    client = stack.async_client()
    runs = [Run(stack, client, task, purpose="train", model=stack.model) for task in tasks for _ in range(group_size)]
    await play_all(runs, play, 4)
    yield Step(1, tuple(runs), trained=0, champion=VERSION)


def entering(stack: RecordingGatewayStack) -> Any:
    """Replace `stack_for` by a function that yields the given stack."""

    @contextmanager
    def stack_for(*_: Any, **__: Any) -> Any:
        yield stack

    return stack_for


class Bus:
    """In-memory topics with one partition each, which replace `connected`."""

    def __init__(self) -> None:
        self.events: dict[str, list[Event]] = {}

    def add(self, *events: Event) -> None:
        for event in events:
            self.events.setdefault(event.topic, []).append(event)

    @asynccontextmanager
    async def connected(self, _address: str) -> AsyncIterator[Bus]:
        yield self

    async def ends(self, topics: Sequence[str]) -> dict[str, dict[int, int]]:
        return {topic: {0: len(self.events.get(topic, []))} for topic in topics}

    async def read(self, selection: Range, _progress: Any = None, ends: Mapping[int, int] | None = None) -> Any:
        for offset, event in enumerate(self.events.get(selection.topic, [])):
            inside = (selection.from_offset or 0) <= offset < (ends or {}).get(0, 10**9)
            if inside and (not selection.keys or event.key in selection.keys):
                yield Entry(selection.topic, 0, offset, datetime.now(UTC), event.key, event)

    async def records(self, selection: Range, _progress: Any = None, ends: Mapping[int, int] | None = None) -> Any:
        async for entry in self.read(selection, ends=ends):
            yield SimpleNamespace(key=entry.key.encode())
