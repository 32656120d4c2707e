"""Tests of the gateway's routes: bodies, prefixes of paths, the port for clients of Trinity-RFT, and metric labels.

The gateway accepts a body only if all events that are made from it are valid. Otherwise the error names the invalid
field. A base URL carries parameters for clients that cannot set headers.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import json
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx2
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from headrace_gateway import http as gateway_http
from headrace_gateway.app import serve_trinity_port
from headrace_gateway.requests import http_request
from headrace_gateway.settings import GatewaySettings, LimitSettings, TotalLimitSettings
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import (
    DeadLetter,
    Event,
    Experience,
    Feedback,
    Reward,
    SessionEnd,
    TrainingMetrics,
    TrainingOutcome,
    Trajectory,
    Turn,
)
from headrace_schemas.events.envelope import parse_record
from headrace_schemas.values.blobs import BlobRef
from headrace_schemas.values.bounds import JSON_DEPTH_MAX
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import Gateway, gateway
from tests.support.hostile_json import KEY, RESPONSES, bases, requests
from tests.support.presence import draw_seed
from tests.support.processes import free_port
from tests.support.turns import START, ask, user
from tests.unit.collector.conftest import collector, pass_time
from tests.unit.scorer.conftest import half, scorer

WIDE = LimitSettings(requests_per_s=1e6, burst=1_000_000)
WIDE_TOTAL = TotalLimitSettings(requests_per_s=1e6, burst=1_000_000)
KINDS: tuple[type[Event], ...] = (Turn, Feedback, SessionEnd, Trajectory)
EXPECTED = {200, 202, 400, 403, 404, 413, 422}


def events_of(served: Gateway, kind: type[Event], folder: Path) -> list[Event]:
    """Return the events of `kind` on the bus, and read the contents of large events from the blob store."""
    blobs = BlobStore((folder / "blobs").as_uri())
    events = []
    for record in served.bus.records:
        if record.topic == kind.topic:
            _, value = parse_record(record.topic, record.value, record.headers)
            events.append(kind.from_json(blobs.get(value) if isinstance(value, BlobRef) else value))
    return events


@pytest.mark.parametrize(("route", "body"), bases(), ids=lambda value: value if isinstance(value, str) else "")
async def test_each_valid_body_is_accepted(tmp_path: Path, route: str, body: dict[str, Any]) -> None:
    replica = FakeReplica(grammars=("response_format",))
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.client.post(route, json=body)
        assert answer.status_code in (200, 202), answer.text
        assert any(served.bus.events(kind) for kind in KINDS)


@pytest.mark.parametrize("depth", range(60, 67))
@pytest.mark.parametrize(
    ("route", "field_path"),
    [
        ("/v1/chat/completions", ("response_format", "json_schema", "schema")),
        ("/v1/chat/completions", ("tools", 0, "function", "parameters")),
        ("/v1/chat/completions", ("metadata",)),
        ("/v1/chat/completions", ("chat_template_kwargs",)),
        ("/v1/responses", ("text", "format", "schema")),
        ("/v1/responses", ("tools", 0, "parameters")),
        ("/v1/responses", ("metadata",)),
        ("/v1/responses", ("chat_template_kwargs",)),
        ("/v1/messages", ("output_config", "format", "schema")),
        ("/v1/messages", ("tools", 0, "input_schema")),
        ("/v1/messages", ("metadata",)),
        ("/v1/feedback", ("context",)),
    ],
)
async def test_json_is_refused_where_the_event_that_records_it_would_be_too_deep(
    tmp_path: Path, route: str, field_path: tuple[str | int, ...], depth: int
) -> None:
    body = copy.deepcopy(next(body for path, body in bases() if path == route and _holds(body, field_path)))
    target: Any = body
    for name in field_path[:-1]:
        target = target[name]
    leaf: Any = 1
    target[field_path[-1]] = functools.reduce(lambda inner, _: {"x": inner}, range(depth), leaf)
    replica = FakeReplica(grammars=("response_format",))
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.client.post(route, json=body)
        assert answer.status_code in ((200, 202) if depth == 60 else (200, 202, 400)), answer.text
        if depth > JSON_DEPTH_MAX:
            assert str(field_path[0]) in (answer.json()["error"].get("param") or answer.json()["error"]["message"])
        if answer.status_code == 400:
            assert "64 levels" in answer.text
        assert served.bus.events(DeadLetter) == []


def _holds(body: Any, field_path: tuple[str | int, ...]) -> bool:
    """Return whether `body` has a value at `field_path`."""
    try:
        functools.reduce(lambda inner, name: inner[name], field_path, body)
    except (KeyError, IndexError, TypeError):
        return False
    return True


async def test_no_request_fails_the_gateway_and_what_it_accepts_becomes_events_that_every_reader_takes(
    tmp_path: Path, database_url: str
) -> None:
    chance = random.Random(draw_seed())
    replica = FakeReplica(grammars=("response_format",))
    codes: Counter[tuple[str, int]] = Counter()
    async with (
        replica.running(),
        gateway(tmp_path, replica, limits_per_key=WIDE, limits_total=WIDE_TOTAL) as served,
    ):
        for route, body in itertools.islice(requests(chance), 700):
            answer = await served.client.post(route, content=body, headers={"content-type": "application/json"})
            assert answer.status_code in EXPECTED, (route, body[:2000], answer.text)
            codes[route, answer.status_code // 100] += 1
            if answer.status_code >= 400:
                error = answer.json()["error"]
                fields = {"message", "type"} | (set() if route == "/v1/messages" else {"param", "code"})
                assert set(error) == fields, (route, body[:2000])
        assert (await served.chat()).status_code == 200
        events = {kind: events_of(served, kind, tmp_path) for kind in KINDS}
        assert served.bus.events(DeadLetter) == [], "a call that was answered was not captured"
    for route in {route for route, _ in codes}:
        assert codes[route, 2], f"{route} accepted nothing"
        assert codes[route, 4], f"{route} refused nothing"
    await _follow(tmp_path, database_url, events)


async def _follow(tmp_path: Path, url: str, events: dict[type[Event], list[Any]]) -> None:
    """Process the accepted `events` with a collector and a scorer, and record the experiences in training metrics.

    The turns that the events refer to are delivered first.
    """
    messages = [user("q")]
    turns = [ask(messages, text, session="s", turn_id=name) for text, name in zip("abc", RESPONSES, strict=True)]
    assert {turn.session_key for turn in turns} == {KEY}
    async with collector(url, tmp_path / "collector") as stream:
        await stream.deliver(*turns, *events[Turn])
        await stream.deliver(*events[Feedback])
        await stream.deliver(*events[SessionEnd])
        for _ in range(10):  # a step closes some at a time, and an end may wait for its turns
            await pass_time(stream, 1000)
        assert {dead_letter.reason for dead_letter in stream.sent(DeadLetter)} <= {"unknown_target"}
        trajectories = stream.sent(Trajectory)
        assert {turn.turn_id for turn in turns} <= {
            turn_id for trajectory in trajectories for turn_id in trajectory.turn_ids
        }
    async with scorer(url, tmp_path / "scorer", half, labels={"good": 1.0}) as rig:
        for feedback in events[Feedback]:
            await rig.stream.deliver(feedback)
        await rig.deliver(*trajectories, *events[Trajectory])
        await rig.pass_time(3000)
        dead_letters = rig.stream.sent(DeadLetter)
        assert {dead_letter.reason for dead_letter in dead_letters} <= {"turn_taken"}, dead_letters
        assert rig.stream.sent(Reward)
        experiences = rig.stream.sent(Experience)
    assert {KEY} <= {experience.session_key for experience in experiences}
    outcomes = tuple(
        TrainingOutcome(
            experience_id=experience.experience_id, revision=experience.revision, turn_ids=experience.turn_ids
        )
        for experience in experiences
    )
    account = TrainingMetrics(time=START, model="tiny", lineage="l", step=1, verdicts=outcomes)
    assert TrainingMetrics.from_json(account.to_json()) == account


HEAVY = {
    "values": lambda: b'{"session_id": "s", "context": {"x": [' + b"{}," * 2_600_000 + b"{}]}}",
    "deep": lambda: b'{"session_id": "s", "context": {"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}",
    "names": lambda: json.dumps({"session_id": "s", "context": {"x": {f"k{n}": n for n in range(400_000)}}}).encode(),
    "ids": lambda: b'{"value": 1, "msg_ids": [' + b'"x",' * 1_500_000 + b'"x"]}',
    "text": lambda: json.dumps({"session_id": "s", "value": 1, "context": {"x": "\\" * 2_000_000}}).encode(),
    "tokens": lambda: b'{"branches": [{"token_ids": [' + b"1," * 3_000_000 + b"1]}]}",
}
ROUTES = ("/v1/feedback", "/feedback", "/commit", "/v1/trajectories", "/v1/responses")


def _marks(route: str, kind: str) -> Sequence[pytest.MarkDecorator]:
    """Each route and each kind once, and the tokens of a trajectory; the other pairs are long."""
    quick = kind == "values" or route == "/v1/feedback" or (route, kind) == ("/v1/trajectories", "tokens")
    return () if quick else (pytest.mark.long,)


@pytest.mark.parametrize(
    ("route", "kind"),
    [pytest.param(route, kind, marks=_marks(route, kind)) for kind in HEAVY for route in ROUTES],
)
async def test_a_heavy_body_is_refused_and_other_callers_go_on(tmp_path: Path, route: str, kind: str) -> None:
    body = HEAVY[kind]()
    longest_s = 0.0
    stop = asyncio.Event()

    async def watch() -> None:
        nonlocal longest_s
        while not stop.is_set():
            began = time.perf_counter()
            await asyncio.sleep(0.005)
            longest_s = max(longest_s, time.perf_counter() - began)

    async with gateway(tmp_path) as served:
        watching = asyncio.create_task(watch())
        answers = await asyncio.gather(*(served.client.post(route, content=body) for _ in range(2)))
        stop.set()
        await watching
        assert {answer.status_code for answer in answers} <= {400, 413, 422}
        assert served.bus.records == []
    assert longest_s < 1.0, "the event loop was blocked"


async def test_a_body_at_the_bound_of_values_is_taken(tmp_path: Path) -> None:
    def body(count: int) -> bytes:
        return json.dumps({"session_id": "s", "context": {"x": [0] * count}}).encode()

    count_max = Feedback.values_max - 4  # the object, its two names, the context
    async with gateway(tmp_path) as served:
        assert (await served.client.post("/v1/feedback", content=body(count_max))).status_code == 202
        refused = await served.client.post("/v1/feedback", content=body(count_max + 8))
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_values")


async def test_a_trajectory_has_a_bound_on_its_objects_beside_that_on_its_numbers(tmp_path: Path) -> None:
    def body(messages: int, numbers: int) -> bytes:
        dialogue_messages = [{"role": "user", "content": "a"}] * 1000
        span = {"start": 0, "logprobs": [-0.5], "turn_id": "t", "version": "tiny@0123456789ab"}
        fields = {"trajectory_id": "t", "session_id": "s", "model": "tiny", "started_at": "2026-01-01T00:00:00Z"}
        branch = {"token_ids": [1] * numbers, "spans": [span]}
        return json.dumps(
            fields | {"branches": [branch], "dialogues": [{"messages": dialogue_messages}] * messages}
        ).encode()

    async with gateway(tmp_path) as served:
        answer = await served.client.post("/v1/trajectories", content=body(1, 200_000))
        assert answer.status_code == 202, answer.text
        refused = await served.client.post("/v1/trajectories", content=body(17, 1))
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "too_many_values")
        assert str(Trajectory.containers_max) in refused.json()["error"]["message"]


async def test_chat_has_a_short_name(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": False}
        answer = await served.client.post("/chat", json=body)
        assert answer.status_code == 200
        (turn,) = served.turns
        assert turn.turn_id == answer.json()["id"]
        feedback_body = {"msg_ids": [turn.turn_id], "reward": 1.0, "task_id": "t", "run_id": "0"}
        assert (await served.client.post("/feedback", json=feedback_body)).json() == {"status": "success"}
        assert served.bus.events(Feedback)[0].msg_ids == (turn.turn_id,)


async def test_the_same_pages_are_at_a_second_port_when_it_is_asked_for() -> None:
    app = Starlette(routes=[Route("/commit", lambda _: JSONResponse({"status": "success"}), methods=["POST"])])
    port = free_port()
    async with (
        serve_trinity_port(app, GatewaySettings(port=0, trinity_port=port)) as opened,
        httpx2.AsyncClient() as client,
    ):
        assert opened == port
        assert (await client.post(f"http://127.0.0.1:{port}/commit")).json() == {"status": "success"}


async def test_there_is_none_otherwise() -> None:
    async with serve_trinity_port(Starlette(), GatewaySettings()) as opened:
        assert opened == 0


LABELS = {
    "/v1/chat/completions": "chat", "/v1/completions": "completions", "/v1/responses": "responses",
    "/v1/responses/input_tokens": "count_tokens", "/v1/responses/resp_1": "stored_responses",
    "/v1/messages": "messages", "/v1/messages/count_tokens": "count_tokens", "/v1/models": "models",
    "/v1/models/org/name": "models", "/v1/feedback": "feedback", "/v1/sessions/a/b/end": "end",
    "/v1/trajectories": "trajectories", "/v1/conversations/conv_1/items": "other", "/feedback": "trinity_feedback",
    "/commit": "trinity_commit", "/chat": "other", "/health": "health", "/metrics": "metrics", "/": "other",
    "/unknown": "other",
}  # fmt: skip


def test_the_metric_label_of_a_request_is_the_name_of_its_route() -> None:
    parts = gateway_http.Parts(GatewaySettings(), Mock(), Mock(), Mock(), Mock(), Mock())
    counting = gateway_http.application(parts)._app  # type: ignore[attr-defined]
    assert {path: counting.label_of(path) for path in LABELS} == LABELS


def test_a_new_route_without_a_name_is_counted_under_that_of_its_endpoint() -> None:
    async def embeddings(_request: object) -> JSONResponse:
        return JSONResponse({})

    counting = gateway_http.RequestCounter(Mock(), [Route("/v1/embeddings", embeddings, methods=["POST"])])
    assert counting.label_of("/v1/embeddings") == "embeddings"


async def seen(path: str) -> Scope:
    scopes: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        scopes.append(scope)

    async def nothing() -> Message:
        raise AssertionError("nothing is read here")

    async def nowhere(_message: Message) -> None:
        raise AssertionError("nothing is sent here")

    await http_request.PathPrefixes(app)({"type": "http", "path": path, "raw_path": path.encode()}, nothing, nowhere)
    return scopes[0]


@pytest.mark.parametrize(
    ("path", "rest", "key", "session"),
    [
        ("/v1/models", "/v1/models", None, None),
        ("/t/KEY/feedback", "/feedback", "KEY", None),
        ("/t/KEY//feedback", "/feedback", "KEY", None),
        ("//feedback", "/feedback", None, None),
        ("/sessions/run-1/v1/chat/completions", "/v1/chat/completions", None, "run-1"),
        ("/t/K/sessions/run%2F1%20b/v1/chat/completions", "/v1/chat/completions", "K", "run/1 b"),
        ("/sessions/a/t/K/v1/models", "/v1/models", "K", "a"),
        ("/sessions/a/sessions/b/v1/models", "/sessions/b/v1/models", None, "a"),
        ("/v1/sessions/a/end", "/v1/sessions/a/end", None, None),
        ("/t/", "/t", None, None),
        ("/v1/chat/completions/", "/v1/chat/completions", None, None),
        ("/chat/completions", "/v1/chat/completions", None, None),
        ("/t/K/messages/count_tokens", "/v1/messages/count_tokens", "K", None),
        ("/v1/v1/messages", "/v1/messages", None, None),
        ("/models/tiny", "/v1/models/tiny", None, None),
        ("/chat", "/chat", None, None),
        ("/", "/", None, None),
    ],
)
async def test_prefixes_are_peeled(path: str, rest: str, key: str | None, session: str | None) -> None:
    scope = await seen(path)
    assert (scope["path"], scope.get(http_request.KEY), scope.get(http_request.SESSION)) == (
        rest.rstrip("/") or "/",
        key,
        session,
    )
