"""A console with the middleware of its server but without network, logged-in HTTP clients, and sessions to review."""

from __future__ import annotations

import hashlib
import json
import random
import re
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import httpx2
import pytest

from headrace_console.app import Console, SecurityHeaders
from headrace_console.read_model.batch import Batch, LogEvent
from headrace_console.read_model.follower import RecordReader
from headrace_console.read_model.rows import Names
from headrace_console.read_model.verdicts import feedback_id, item_id
from headrace_console.settings import ConsoleSettings, Role, UserSettings
from headrace_console.sources import clients
from headrace_gateway.access.keys import Caller
from headrace_gateway.requests.feedback import events_of
from headrace_gateway.requests.feedback_request import FeedbackRequest
from headrace_gateway.settings import LimitSettings
from headrace_runtime.clock import SystemClock
from headrace_runtime.errors import Refused
from headrace_runtime.http.guard import WebGuard
from headrace_runtime.settings.sections import BusSettings, Common, DatabaseSettings, SecuritySettings
from headrace_schemas import Choice, Event, Feedback, Message, Reward, Turn, UnitAssignment
from headrace_schemas.values.ids import response_id, session_key
from tests.support.remembered import make_tables
from tests.support.turns import START, trajectory, turn

RATERS = ("ann", "ben", "cat")


ORIGIN = "http://127.0.0.1:8040"
BY_PAGE = {"origin": ORIGIN, "sec-fetch-site": "same-origin"}
"""Headers of a request that a page of the console causes."""


class TestClock(SystemClock):
    """Clock that a test advances."""

    __test__ = False

    def __init__(self) -> None:
        self.now_s = 1000.0
        self._began_at = datetime.now(UTC) - timedelta(seconds=self.now_s)

    def monotonic_s(self) -> float:
        return self.now_s

    def now(self) -> datetime:
        return self._began_at + timedelta(seconds=self.now_s)


@dataclass
class Stand:
    """Console of one test, with one user for each role; the token of a user is the name of the role.

    `async with` creates the tables and closes the console after the block.
    """

    data_dir: Path
    read_only: bool = False
    urls: dict[str, str] = field(default_factory=dict)
    clock: TestClock = field(default_factory=TestClock)
    bus: BusSettings = field(default_factory=BusSettings)
    tenants: tuple[str, ...] = ()
    database: DatabaseSettings = field(default_factory=DatabaseSettings)

    def __post_init__(self) -> None:
        (self.data_dir / "run").mkdir(parents=True, exist_ok=True)
        roles: tuple[Role, ...] = ("rater", "viewer", "reviewer", "operator")
        users = tuple(
            UserSettings(name=role, sha256=hashlib.sha256(role.encode()).hexdigest(), role=role, tenants=self.tenants)
            for role in roles
        )
        self.settings = ConsoleSettings(users=users, read_only=self.read_only, urls=self.urls)
        self.console = Console(
            Common(data_dir=self.data_dir, bus=self.bus, database=self.database), self.settings, self.clock
        )

    async def __aenter__(self) -> Stand:
        await make_tables(self.console.database, "headrace_console")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.console.close()

    def client(self) -> httpx2.AsyncClient:
        """Return a client without a session, which follows no redirects."""
        guarded = WebGuard(SecurityHeaders(self.console.app), self.settings, SecuritySettings(), accepts_forms=True)
        return httpx2.AsyncClient(transport=httpx2.ASGITransport(app=guarded), base_url=ORIGIN)

    async def signed_in(self, role: Role = "viewer") -> httpx2.AsyncClient:
        """Return a client that is logged in as the user with `role`."""
        await make_tables(self.console.database, "headrace_console")
        client = self.client()
        reply = await client.post("/login", data={"token": role}, headers=BY_PAGE)
        assert reply.status_code == 303, reply.text
        return client


async def form_token(client: httpx2.AsyncClient) -> str:
    """Return the form token of the client's session, as a page contains it."""
    match = re.search(r'name="form_token" value="([0-9a-f]{64})"', (await client.get("/")).text)
    assert match is not None
    return match[1]


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

    async def call(self, service: str, _method: str, _url: str, headers: dict[str, str], content: bytes = b"") -> bytes:
        if service != "gateway":
            raise Refused(503, f"{service}_away", "Only the gateway answers.")
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
    monkeypatch.setattr(clients, "call", stub.call)
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


def verdict(call: Event, rater: str, *, number: int = 1, repeated: bool = False, **answer: object) -> Feedback:
    """Return the verdict of `rater` about the session of `call` in the queue `help`."""
    assert isinstance(call, Turn)
    item = item_id(call.tenant, "help", call.session_key)
    fields = {"level": "turn", **answer} if "preference" not in answer else answer
    return Feedback.model_validate(
        {
            "time": START, "feedback_id": feedback_id(item, rater, number, repeated=repeated), "source": "review:help",
            "rater": rater, "session_key": call.session_key, "msg_ids": (call.turn_id,), **fields,
        }
    )  # fmt: skip


def scores(sessions: int) -> tuple[list[Event], dict[int, dict[str, float]]]:
    """Return events and scores by session and rater. Some scores are missing, and the judge rounds up to 0.5."""
    draws, events, table = random.Random(5), list[Event](), dict[int, dict[str, float]]()
    for number in range(sessions):
        session = session_of(number)
        events += session
        truth = draws.randrange(5)
        table[number] = {
            rater: (truth if draws.random() < 0.7 else draws.randrange(5)) / 4
            for rater in RATERS
            if draws.random() < 0.8
        }
        events += [verdict(session[0], rater, value=value) for rater, value in table[number].items()]
    return events, table
