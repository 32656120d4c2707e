"""Tests of invalid, large and hostile requests, and of errors as the `anthropic` package raises them.

An invalid request gets an OpenAI-shaped error, and the next request is served. A value of a wrong JSON type is refused
by the name of its field or accepted, and never causes a server error. Large bodies do not delay other clients. Tenants
do not share replica caches.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

from headrace_gateway.access.keys import KeyRing
from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.messages_api.request import MessagesRequest, parse_messages
from headrace_gateway.apis.responses_api import request as responses_request
from headrace_gateway.apis.responses_api.request import ResponsesRequest
from headrace_gateway.capture.turn_events import capture
from headrace_gateway.requests import chat_request
from headrace_gateway.requests.chat_request import ChatRequest, parse_chat
from headrace_gateway.requests.feedback_request import FeedbackRequest, TrinityCommit, TrinityFeedback
from headrace_gateway.settings import KeySettings, LimitSettings, TotalLimitSettings
from headrace_schemas import Feedback, Trajectory, Turn
from tests.support.fake_replica import FakeReplica, Fault
from tests.support.gateway import gateway, strict, until
from tests.support.hostile_json import KINDS, bases, kinds_everywhere
from tests.unit.gateway.test_messages_api import ASKED, streamed
from tests.unit.gateway.test_messages_api import served as messages_gateway

HEADERS = b"Host: localhost\r\nContent-Type: application/json\r\n"
GOOD = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b'{"model": "tiny", ', 400, "invalid_json"),
        (b"\xff\xfe\x00", 400, "invalid_json"),
        (b"[" * 20_000, 400, "invalid_json"),
        (b"[" * 100_000, 413, "too_many_values"),
        (json.dumps({**GOOD, "temprature": 1}).encode(), 400, "unknown_field"),
        (json.dumps({**GOOD, "response_format": {"type": "json_schema"}}).encode(), 400, "invalid_value"),
        (json.dumps({**GOOD, "messages": 7}).encode(), 400, "invalid_value"),
        (json.dumps({**GOOD, "model": "nope"}).encode(), 404, "model_not_found"),
        (json.dumps({**GOOD, "model": "tiny@000000000000"}).encode(), 404, "model_not_found"),
        (json.dumps({**GOOD, "messages": [{"role": "user", "content": "x" * 9000}]}).encode(), 413, "body_too_large"),
    ],
    ids=["cut", "bytes", "deep", "deeper", "unknown", "unsupported", "type", "model", "version", "large"],
)
async def test_a_bad_call_is_refused_and_the_next_one_served(
    tmp_path: Path, body: bytes, status: int, code: str
) -> None:
    replica = FakeReplica()
    limits = LimitSettings(body_bytes_max=8192) if code == "body_too_large" else LimitSettings()
    async with replica.running(), gateway(tmp_path, replica, limits_per_key=limits) as served:
        answer = await served.client.post("/v1/chat/completions", content=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (status, code)
        assert set(error) == {"message", "type", "param", "code"}
        assert replica.requests == []
        assert (await served.chat()).status_code == 200
        assert len(served.bus.events(Turn)) == 1


async def test_a_large_body_is_refused_by_its_announcement_and_by_its_bytes(tmp_path: Path) -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield b"x" * 1000

    async with gateway(tmp_path, limits_per_key=LimitSettings(body_bytes_max=4096)) as served:
        for body in (b"x" * 10_000, chunks()):
            assert (await served.client.post("/v1/feedback", content=body)).status_code == 413


async def test_a_body_that_does_not_come_does_not_hold_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_gateway.apis.admission.BODY_TIMEOUT_S", 0.1)
    async with gateway(tmp_path) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/feedback HTTP/1.1\r\n" + HEADERS + b"Content-Length: 100\r\n\r\n{")
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 5)
        writer.close()
        assert b" 408 " in answer
        assert b"body_timeout" in answer


async def test_a_body_of_an_unknown_compression_is_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post("/v1/feedback", content=b"x", headers={"content-encoding": "br"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_encoding")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/v1/embeddings", 404), ("GET", "/x", 404), ("POST", "/t/k", 405)],
)
async def test_other_urls_are_refused_in_the_same_shape(tmp_path: Path, method: str, path: str, status: int) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.request(method, path)
        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def key(secret: str, **fields: Any) -> KeySettings:
    return KeySettings(name=secret, sha256=hashlib.sha256(secret.encode()).hexdigest(), **fields)


KEYS = (
    key("agent", tenant="acme"),
    key("bound", tenant="acme", session_id="run-9", scopes=("chat",)),
    key("slow", limits=LimitSettings(requests_per_s=0.001, burst=1)),
)


async def test_keys_decide_who_may_do_what_for_whom(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, keys=KEYS) as served:
        assert (await served.chat()).status_code == 401
        assert (await served.chat(headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await served.client.get("/v1/models")).status_code == 401
        assert (await served.client.get("/health")).status_code == 200
        assert (await served.chat(headers={"authorization": "Bearer bound"})).status_code == 200
        forbidden = await served.client.post(
            "/v1/feedback", json={"session_id": "a", "value": 1}, headers={"authorization": "Bearer bound"}
        )
        assert (forbidden.status_code, forbidden.json()["error"]["code"]) == (403, "missing_scope")
        for scope in ("agent", "bound"):
            answer = await served.client.post("/v1/trajectories", json={}, headers={"authorization": f"Bearer {scope}"})
            assert answer.status_code == 403
        answer = await served.client.post("/t/agent/feedback", json={"msg_ids": ["x"], "reward": 1})
        assert answer.status_code == 200
        body = {**GOOD, "stream": False}
        answer = await served.client.post(
            "/t/agent/sessions/run-3/v1/chat/completions", json=body, headers={"authorization": "Bearer dummy"}
        )
        assert answer.status_code == 200
        bound, in_path = served.turns
        assert (bound.session_id, bound.session_source, bound.tenant) == ("run-9", "key", "acme")
        assert (in_path.session_id, in_path.session_source, in_path.tenant) == ("run-3", "path", "acme")
        assert [event.tenant for event in served.bus.events(Feedback)] == ["acme"]


async def test_beyond_its_rate_a_key_is_told_to_wait_and_others_are_not(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, keys=KEYS) as served:
        slow = {"authorization": "Bearer slow"}
        assert (await served.chat(headers=slow)).status_code == 200
        refused = await served.chat(headers=slow)
        assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
        assert int(refused.headers["retry-after"]) > 100
        assert (await served.chat(headers={"authorization": "Bearer agent"})).status_code == 200


WIDE = LimitSettings(requests_per_s=1e6, burst=1_000_000)
WIDE_TOTAL = TotalLimitSettings(requests_per_s=1e6, burst=1_000_000)
MODELS: dict[str, type[BaseModel]] = {
    "/v1/feedback": FeedbackRequest,
    "/feedback": TrinityFeedback,
    "/commit": TrinityCommit,
    "/v1/trajectories": Trajectory,
    "/v1/chat/completions": ChatRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
}
OTHER_NAMES = {
    "/v1/chat/completions": (*chat_request.NEUTRAL, *chat_request.HARMLESS),
    "/v1/responses": (*responses_request.NEUTRAL, *chat_request.HARMLESS),
}


@pytest.mark.parametrize("kind", [{}, [], [[]], {"a": 1}, 7, None], ids=str)
@pytest.mark.parametrize(
    ("route", "field", "item"),
    [
        ("/v1/responses", "input", lambda kind: {"role": "user", "content": [{"type": kind, "text": "q"}]}),
        ("/v1/responses", "input", lambda kind: {"type": kind, "role": "user", "content": "q"}),
        ("/v1/responses", "input", lambda kind: {"role": kind, "content": "q"}),
        ("/v1/chat/completions", "messages", lambda kind: {"role": "user", "content": [{"type": kind}]}),
        ("/v1/chat/completions", "messages", lambda kind: {"role": kind, "content": "q"}),
    ],
)
async def test_a_type_or_a_role_that_is_no_text_is_refused_by_name(
    tmp_path: Path, route: str, field: str, item: Any, kind: Any
) -> None:
    async with gateway(tmp_path) as served:
        answer = await served.client.post(route, json={"model": "tiny", field: [item(kind)]})
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"].startswith(field)


@pytest.mark.parametrize("kinds_per_place", [3, pytest.param(len(KINDS), marks=pytest.mark.long)])
@pytest.mark.parametrize(("route", "body"), bases(), ids=lambda value: value if isinstance(value, str) else "")
async def test_no_value_of_another_type_fails_the_gateway(
    tmp_path: Path, route: str, body: dict[str, Any], kinds_per_place: int
) -> None:
    replica = FakeReplica(grammars=("response_format", "tool_choice"))
    names = (*MODELS[route].model_fields, *OTHER_NAMES.get(route, ()))
    statuses: Counter[int] = Counter()
    async with replica.running(), gateway(tmp_path, replica, limits_per_key=WIDE, limits_total=WIDE_TOTAL) as served:
        for changed in kinds_everywhere(body, names, kinds_per_place):
            answer = await served.client.post(route, json=changed)
            assert answer.status_code in {200, 202, 400, 403, 404, 422}, (json.dumps(changed), answer.text)
            statuses[answer.status_code] += 1
            if answer.status_code >= 400:
                error = answer.json()["error"]
                assert error.get("param") or any(name in error["message"] for name in (*names, "body")), (
                    changed,
                    error,
                )
        assert (await served.client.post(route, json=body)).status_code in (200, 202)
    assert statuses[400] + statuses[422] > 10, statuses


@pytest.mark.parametrize("name", ["session_id", "account_uuid", "device_id"])
@pytest.mark.parametrize("value", [r'"\ud800"', r'"a\u0000b"', '"' + "x" * 5000 + '"', "9" * 5000, "1e999", "[" * 5000])
def test_json_inside_of_a_label_is_read_ignored_or_refused_by_name(name: str, value: str) -> None:
    """Claude Code sends JSON inside of `user_id`. What it holds must fit the JSON of the translated request."""
    body = {**GOOD, "max_tokens": 1, "metadata": {"user_id": f'{{"{name}": {value}}}'}}
    if "u0000" in value:
        with pytest.raises(ApiError, match="metadata: must not contain NUL"):
            parse_messages(json.dumps(body).encode(), strict())
        return
    _, request = parse_messages(json.dumps(body).encode(), strict())
    assert (request.metadata or {}).get("user_id")


USER = {"role": "user", "content": "hello"}
SHAPES: dict[str, bytes] = {
    "values": b'{"metadata":{"a":[' + b"0," * 300_000 + b"0]}}",
    "keys": ("{" + ",".join(f'"k{i}":1' for i in range(200_000)) + "}").encode(),
    "messages": json.dumps({"model": "tiny", "messages": [USER] * 60_000}).encode(),
    "parts": json.dumps(
        {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 60_000}]}
    ).encode(),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_too_many_values_are_refused_before_they_are_parsed(shape: str) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(SHAPES[shape], strict(4, 32_768))
    assert (refused.value.status, refused.value.code) == (413, "too_many_values")
    assert "more than 32768 JSON values" in str(refused.value)


async def test_a_large_request_is_read_beside_the_loop_and_a_small_one_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []

    def parse(*given: Any) -> ChatRequest:
        threads.append(threading.current_thread().name)
        return parse_chat(*given)

    def capture_in_thread(*given: Any, **more: Any) -> Any:
        threads.append(threading.current_thread().name)
        return capture(*given, **more)

    monkeypatch.setattr("headrace_gateway.apis.chat.parse_chat", parse)
    monkeypatch.setattr("headrace_gateway.apis.chat.capture", capture_in_thread)
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as running:
        for words in (1, 5_000, 100_000):
            answer = await running.chat("1, 2, 3 " * words)
            assert answer.status_code == 200, answer.text[:300]
    main = threading.current_thread().name
    assert threads[:2] == [main, main]
    assert all(name.startswith("worker_") for name in threads[2:4])
    assert all(name.startswith("worker-large") for name in threads[4:])


async def test_replicas_hear_a_salt_for_each_tenant_and_never_its_name(tmp_path: Path) -> None:
    keys = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "tenant": tenant}
        for name, tenant in (("one", "acme"), ("another", "acme"), ("other", "globex"))
    ]
    salts: dict[str, str] = {}
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, keys=keys) as running:
        for name in ("one", "another", "other"):
            answer = await running.chat(headers={"authorization": f"Bearer {name}"})
            assert answer.status_code == 200
            salts[name] = replica.requests[-1]["cache_salt"]
    assert salts["one"] == salts["another"] != salts["other"]
    assert all(len(salt) == 32 and not {"acme", "globex"} & {salt} for salt in salts.values())


def test_a_salt_cannot_be_computed_without_the_internal_key() -> None:
    rings = [KeyRing((), LimitSettings(), internal_key) for internal_key in ("", "secret", "secret", "other")]
    salts = [ring.cache_salt("acme") for ring in rings]
    assert salts[1] == salts[2]
    assert len(set(salts)) == 3


AGENT_KEYS = (
    key("s3cret", tenant="acme"),
    key("slow", limits=LimitSettings(burst=1, requests_per_s=0.01)),
    key("feedback", scopes=("feedback",)),
)


async def test_a_key_comes_in_either_header(tmp_path: Path) -> None:
    async with messages_gateway(tmp_path, FakeReplica(), key="s3cret", keys=AGENT_KEYS) as (running, client):
        await client.messages.create(**ASKED)
        async with anthropic.AsyncAnthropic(base_url=running.url, auth_token="s3cret", api_key=None) as bearer:
            await bearer.messages.create(**ASKED)
        assert [turn.tenant for turn in running.turns] == ["acme", "acme"]


@pytest.mark.parametrize(
    ("key", "fields", "kind", "name"),
    [
        ("wrong", {}, anthropic.AuthenticationError, "authentication_error"),
        ("feedback", {}, anthropic.PermissionDeniedError, "permission_error"),
        ("s3cret", {"model": "claude"}, anthropic.NotFoundError, "not_found_error"),
        ("s3cret", {"extra_body": {"temperature": 9}}, anthropic.BadRequestError, "invalid_request_error"),
        ("s3cret", {"metadata": {"user_id": "x" * 2**21}}, anthropic.APIStatusError, "request_too_large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_refusal_raises_the_packages_own_error(
    tmp_path: Path, key: str, fields: dict[str, Any], kind: type[anthropic.APIStatusError], name: str
) -> None:
    limits = LimitSettings(body_bytes_max=1_048_576)
    async with messages_gateway(tmp_path, FakeReplica(), key=key, keys=AGENT_KEYS, limits_per_key=limits) as (
        _,
        client,
    ):
        with pytest.raises(kind) as caught:
            await client.messages.create(**{**ASKED, **fields})
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", name)
    assert caught.value.request_id == body["request_id"]


async def test_too_many_requests_raise_a_rate_limit_error(tmp_path: Path) -> None:
    async with messages_gateway(tmp_path, FakeReplica(), key="slow", keys=AGENT_KEYS) as (_, client):
        await client.messages.create(**ASKED)
        with pytest.raises(anthropic.RateLimitError) as caught:
            await client.messages.create(**ASKED)
    assert int(caught.value.response.headers["retry-after"]) > 1


async def test_a_gateway_without_replicas_is_overloaded(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        answer = await running.client.post("/v1/messages", json=ASKED)
        unknown = await running.client.get("/v1/nothing", headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (529, "overloaded_error")
    assert "retry-after" in answer.headers
    assert (unknown.status_code, unknown.json()["error"]["type"]) == (404, "not_found_error")


async def test_a_stream_that_breaks_ends_with_an_error_and_is_no_turn(tmp_path: Path) -> None:
    replica = FakeReplica(resumes=False, faults=[Fault(drop_after=2)])
    async with messages_gateway(tmp_path, replica) as (running, client):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await streamed(client, **ASKED)
        assert running.turns == []
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"


async def test_the_root_answers_a_client_that_looks_for_the_server(tmp_path: Path) -> None:
    async with gateway(tmp_path) as running:
        answer = await running.client.head("/")
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "status"), [("/v1/messages", 529), ("/v1/chat/completions", 503)])
async def test_a_call_that_the_end_of_the_server_cuts_may_be_sent_again(
    tmp_path: Path, route: str, status: int, *, stream: bool
) -> None:
    replica = FakeReplica(faults=[Fault(stall_after=0)])
    async with replica.running(), gateway(tmp_path, replica) as running:
        calling = asyncio.create_task(running.client.post(route, json={**ASKED, "stream": stream}))
        await until(lambda: replica.requests)
        for task in asyncio.all_tasks():
            if "run_asgi" in repr(task.get_coro()):
                task.cancel()
        answer = await calling
    assert (answer.status_code, answer.headers["retry-after"]) == (status, "1")
    assert "send the request again" in answer.json()["error"]["message"]
