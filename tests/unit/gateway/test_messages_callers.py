"""The Messages API: keys, refusals as the `anthropic` package raises them, and sessions."""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import anthropic
import pytest

from headrace_gateway.settings import KeySettings, LimitSettings
from headrace_schemas import Turn
from tests.support.fake_replica import FakeReplica, Fault
from tests.support.gateway import gateway, until
from tests.unit.gateway.test_messages_api import ASKED, served, streamed


def key_settings(secret: str, **fields: Any) -> KeySettings:
    return KeySettings(name=secret, sha256=hashlib.sha256(secret.encode()).hexdigest(), **fields)


KEYS = (
    key_settings("s3cret", tenant="acme"),
    key_settings("slow", limits=LimitSettings(burst=1, requests_per_s=0.01)),
    key_settings("feedback", scopes=("feedback",)),
)


async def test_a_key_comes_in_either_header(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica(), key="s3cret", keys=KEYS) as (running, client):
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
    async with served(tmp_path, FakeReplica(), key=key, keys=KEYS, limits_per_key=limits) as (_, client):
        with pytest.raises(kind) as caught:
            await client.messages.create(**{**ASKED, **fields})
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", name)
    assert caught.value.request_id == body["request_id"]


async def test_too_many_requests_raise_a_rate_limit_error(tmp_path: Path) -> None:
    async with served(tmp_path, FakeReplica(), key="slow", keys=KEYS) as (_, client):
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
    async with served(tmp_path, replica) as (running, client):
        with pytest.raises(anthropic.APIStatusError) as caught:
            await streamed(client, **ASKED)
        assert running.turns == []
    body: Any = caught.value.body
    assert body["error"]["type"] == "overloaded_error"


def claude_code_user(session: str) -> str:
    return json.dumps({"device_id": "d" * 64, "account_uuid": "", "session_id": session})


@pytest.mark.parametrize(
    ("headers", "user_id", "session", "source"),
    [
        ({"x-claude-code-session-id": "s-1"}, claude_code_user("s-2"), "s-1", "header"),
        ({}, claude_code_user("s-2"), "s-2", "metadata"),
        ({}, f"user_{'a' * 64}_account__session_{'b' * 36}", "b" * 36, "metadata"),
        ({"x-session-id": "mine"}, claude_code_user("s-2"), "mine", "header"),
        ({}, "ada", None, "implicit"),
    ],
)
async def test_the_session_that_claude_code_sends_is_the_session_of_the_turn(
    tmp_path: Path, headers: dict[str, str], user_id: str, session: str | None, source: str
) -> None:
    async with served(tmp_path, FakeReplica()) as (running, client):
        await client.messages.create(**ASKED, metadata={"user_id": user_id}, extra_headers=headers)
        turn: Turn = running.turns[0]
    assert turn.session_source == source
    assert session in (None, turn.session_id)


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
