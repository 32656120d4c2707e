"""Sessions to review, and reviewers' browsers, for a console whose gateway and topics are in memory."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx2
import pytest

from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.follower import RecordReader
from headrace_console.read_model.rows import Names
from headrace_console.sources import gateway
from headrace_gateway.access.keys import Caller
from headrace_gateway.requests.feedback import events_of
from headrace_gateway.requests.feedback_request import FeedbackRequest
from headrace_gateway.settings import LimitSettings
from headrace_runtime.errors import Refused
from headrace_schemas import Choice, Event, Feedback, Message, Reward, UnitAssignment
from headrace_schemas.values.ids import response_id, session_key
from tests.support.account_events import START, trajectory, turn
from tests.unit.console.support import BY_PAGE, Stand, form_token

QUEUE = {"name": "help", "rubric": "Does it help?", "question": "score", "ratings": "2"}


class Bus:
    """In-memory substitute for the topic `turns` and the gateway: the console reads back the events that it sends."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.requests: list[dict[str, Any]] = []
        self.problem: Refused | None = None
        self.stand: Stand | None = None

    async def read(self, _topic: str, positions: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Event]:
        return {position: self.events[position[1]] for position in positions}

    async def call(self, _service: str, _method: str, _url: str, headers: dict[str, str], content: bytes) -> bytes:
        if self.problem is not None:
            raise self.problem
        body = json.loads(content)
        self.requests.append(body)
        tenant = "other" if headers.get("authorization") == "Bearer other-key" else "default"
        caller = Caller("k", "k", tenant, frozenset({"feedback"}), None, LimitSettings())
        assert self.stand is not None
        request = FeedbackRequest.model_validate(body)
        await self.add(events_of(request, caller, self.stand.clock, body_bytes=1000))
        return json.dumps({"event_ids": ["e"], "feedback_id": "f"}).encode()

    async def add(self, events: Sequence[Event]) -> None:
        """Add `events` to the topic, and let the console read them."""
        assert self.stand is not None
        begin = len(self.events)
        self.events += events
        async with self.stand.console.database.transaction() as tx:
            log_events = [LogEvent(event, 0, begin + at) for at, event in enumerate(events)]
            await Batch(tx, Names(), titles=True, day=20_000).apply(log_events)

    def verdicts(self) -> list[Feedback]:
        return [event for event in self.events if isinstance(event, Feedback) and event.source.startswith("review:")]


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    stub = Bus()
    monkeypatch.setattr(gateway, "call", stub.call)
    monkeypatch.setattr(RecordReader, "read", lambda _self, topic, positions: stub.read(topic, positions))
    return stub


@pytest.fixture
async def stand(tmp_path: Path, bus: Bus) -> AsyncIterator[Stand]:
    async with Stand(tmp_path) as opened:
        bus.stand = opened
        yield opened


def session_of(number: int, *, answers: int = 1, tenant: str = "default", text: str = "") -> list[Event]:
    """Return the events of a session: turns in a rollout arm, a judge's reward, and feedback of another rater."""
    key = session_key(tenant, f"private-{number}")
    name = response_id(key, uuid.UUID(int=number + 1))
    choices = tuple(
        Choice(
            index=at, token_ids=(3,), logprobs=(-0.5,), finish_reason="stop",
            message=Message(role="assistant", content=f"{text}reply {number} number {at}"),
        )
        for at in range(answers)
    )  # fmt: skip
    more: dict[str, Any] = {"session_key": key, "session_id": f"private-{number}", "tenant": tenant}
    call = turn(
        name, choices=choices, usage={"prompt_tokens": 2, "completion_tokens": answers}, version="m@9f8e7d6c5b4a",
        messages=(Message(role="user", content=f"{text}question {number}"),), time=START + timedelta(seconds=number),
        assignment=UnitAssignment(rollouts=("r",), arm="candidate", unit="u", propensity="1/2"), **more,
    )  # fmt: skip
    run = {"trajectory_id": f"T{tenant}{number}", "session_key": key, "tenant": tenant, "time": START}
    return [
        call,
        trajectory(f"T{tenant}{number}", (name,), **more),
        Reward(source="judge:help", value=0.4321, reason="looks wrong", **run),
        Feedback(
            time=START, feedback_id=f"b{tenant}{number}", rater="bob", value=0.1234, comment="looks wrong", **more
        ),
    ]


_tokens: WeakKeyDictionary[httpx2.AsyncClient, str] = WeakKeyDictionary()


async def token_of(client: httpx2.AsyncClient) -> str:
    """Return the form token of the browser's session, which is the same on every page."""
    if client not in _tokens:
        _tokens[client] = await form_token(client)
    return _tokens[client]


async def make_queue(stand: Stand, **fields: str) -> tuple[httpx2.AsyncClient, str]:
    """Create a review queue, and return the reviewer's browser and the path of the queue."""
    reviewer = await stand.signed_in("reviewer")
    form = {"form_token": await token_of(reviewer), **QUEUE, **fields}
    reply = await reviewer.post("/review/new", data=form, headers=BY_PAGE)
    assert reply.status_code == 303, reply.text
    return reviewer, reply.headers["location"]


async def next_item(client: httpx2.AsyncClient, queue: str, **fields: str) -> str:
    form = {"form_token": await token_of(client), **fields}
    reply = await client.post(f"{queue}/next", data=form, headers=BY_PAGE)
    assert reply.status_code == 303, reply.text
    return str(reply.headers["location"])


async def rate(client: httpx2.AsyncClient, item: str, answer: str, number: int = 1) -> httpx2.Response:
    form = {"form_token": await token_of(client), "answer": answer, "number": str(number)}
    return await client.post(item, data=form, headers=BY_PAGE)
