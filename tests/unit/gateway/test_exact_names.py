"""Names that only look alike are different sessions, and a key that is bound to a session reaches no other."""

from __future__ import annotations

import asyncio
import hashlib
import random
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from headrace_gateway.settings import KeySettings
from headrace_runtime.kafka.wire import Received, Record
from headrace_schemas import Feedback, SessionEnd
from headrace_schemas.events.envelope import Envelope
from headrace_schemas.values import ids
from tests.support import session_names
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway, until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
OWN, OTHER = (ids.response_id(ids.session_key("acme", name)) for name in ("own", "other"))


async def test_two_hundred_lookalike_names_are_two_hundred_sessions_with_their_own_feedback(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"SEED={seed}")
    sessions = session_names.draw(random.Random(seed), 200)
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await until(lambda: served.publisher.connected)
        for number, session in enumerate(sessions):
            status, answer = await asyncio.to_thread(
                session_names.post, served.url, session, "/v1/chat/completions", CHAT
            )
            assert status == 200, (session, answer)
            body = {"session_id": session.name, "value": number}
            plain = session_names.NamedSession("ignored", "utf-8 header")
            status, answer = await asyncio.to_thread(session_names.post, served.url, plain, "/v1/feedback", body)
            assert status == 202, (session, answer)
            path = f"/v1/sessions/{quote(session.name, safe='')}/end"
            assert (await served.client.post(path)).status_code == 202, session
        turns = {turn.session_id: turn.session_key for turn in served.turns}
        ends = {end.session_id: end.session_key for end in served.bus.events(SessionEnd)}
        values = {event.session_key: event.value for event in served.bus.events(Feedback)}
    names = [session.name for session in sessions]
    assert turns == ends == {name: ids.session_key("default", name) for name in names}
    assert values == {turns[name]: number for number, name in enumerate(names)}


@pytest.mark.parametrize("name", [b"a%00b", b"a%0A", b"a%7F", b"a%C2%85", b"%1B%5B31m"])
async def test_a_path_with_control_characters_is_refused(tmp_path: Path, name: bytes) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.client.post(f"/sessions/{name.decode()}/v1/chat/completions", json=CHAT)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_value"


async def test_a_header_that_names_two_sessions_is_refused(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        headers = [("X-Session-Id", "one"), ("X-Session-Id", "two")]
        answer = await served.client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "repeated_header")


def bound_key(session_id: str = "own", **fields: Any) -> KeySettings:
    digest = hashlib.sha256("schlüssel".encode()).hexdigest()
    scopes = ("chat", "feedback", "admin")
    return KeySettings(name="bound", sha256=digest, tenant="acme", scopes=scopes, session_id=session_id, **fields)


BEYOND: list[tuple[str, dict[str, str], dict[str, Any]]] = [
    ("/v1/chat/completions", {"X-Session-Id": "other"}, CHAT),
    ("/v1/chat/completions", {}, {**CHAT, "metadata": {"session_id": "other"}}),
    ("/v1/chat/completions", {"X-Session-Id": "own"}, {**CHAT, "metadata": {"session_id": "other"}}),
    ("/sessions/other/v1/chat/completions", {}, CHAT),
    ("/sessions/other/v1/chat/completions", {"X-Session-Id": "own"}, CHAT),
    ("/v1/responses", {"X-Session-Id": "other"}, {"model": "tiny", "input": "hello"}),
    ("/v1/responses", {}, {"model": "tiny", "input": "hello", "metadata": {"session_id": "other"}}),
    ("/v1/feedback", {}, {"session_id": "other", "value": 1}),
    ("/v1/feedback", {}, {"response_id": OTHER, "value": 1}),
    ("/v1/feedback", {}, {"session_id": "own", "msg_ids": [OWN, OTHER], "value": 1}),
    ("/v1/feedback", {}, {"preference": {"chosen": OWN, "rejected": OTHER}}),
    ("/v1/feedback", {}, {"level": "task", "task_id": "t", "value": 1}),
    ("/v1/feedback", {"X-Session-Id": "other"}, {"session_id": "own", "value": 1}),
    ("/sessions/other/v1/feedback", {}, {"session_id": "own", "value": 1}),
    ("/feedback", {}, {"msg_ids": [OTHER], "reward": 1}),
    ("/commit", {}, {}),
    ("/v1/sessions/other/end", {}, {}),
    ("/v1/sessions/OWN/end", {}, {}),
]


@pytest.mark.parametrize(("path", "headers", "body"), BEYOND)
async def test_a_key_that_is_bound_to_a_session_touches_no_other(
    tmp_path: Path, path: str, headers: dict[str, str], body: dict[str, Any]
) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, keys=(bound_key(),)) as served:
        await until(lambda: served.publisher.connected)
        bound_headers = {**headers, "Authorization": "Bearer schlüssel".encode().decode("latin-1")}
        raw = {name.encode(): value.encode("latin-1") for name, value in bound_headers.items()}
        answer = await served.client.post(path, json=body, headers=raw)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "wrong_session"), answer.text
        assert served.bus.records == []


async def test_a_key_that_is_bound_to_a_session_serves_that_session(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, keys=(bound_key(),)) as served:
        await until(lambda: served.publisher.connected)
        key = {b"authorization": "Bearer schlüssel".encode()}
        for headers in ({}, {b"x-session-id": b"own"}):
            answer = await served.client.post("/v1/chat/completions", json=CHAT, headers={**key, **headers})
            assert answer.status_code == 200, answer.text
        for body in ({"session_id": "own", "value": 1}, {"response_id": OWN, "value": 1}):
            assert (await served.client.post("/v1/feedback", json=body, headers=key)).status_code == 202
        assert (await served.client.post("/v1/sessions/own/end", headers=key)).status_code == 202
        assert {turn.session_id for turn in served.turns} == {"own"}
        assert {event.session_key for event in served.bus.events(Feedback)} == {ids.session_key("acme", "own")}


async def test_a_response_id_of_another_tenant_leaves_the_version_of_its_session(tmp_path: Path) -> None:
    keys = tuple(
        KeySettings(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), tenant=name)
        for name in ("victim", "attacker")
    )
    newer = "tiny@fedcba9876543210"
    replica = FakeReplica(versions=("tiny@0123456789abcdef", newer))
    async with replica.running(), gateway(tmp_path, replica, keys=keys) as served:
        await until(lambda: served.publisher.connected)
        victim = {"authorization": "Bearer victim", "x-session-id": "mine"}
        first = (await served.chat(headers=victim)).json()
        served.route(newer, revision=2, serve=(*replica.versions,))
        for headers in (
            {"authorization": "Bearer attacker"},
            {
                "authorization": "Bearer attacker",
            },
        ):
            body = {"response_id": first["id"], "value": -1, "ends_session": True}
            assert (await served.client.post("/v1/feedback", json=body, headers=headers)).status_code == 202
        assert (await served.client.post("/v1/sessions/mine/end", headers=headers)).status_code == 202
        await served.chat(headers=victim)
        assert [turn.version for turn in served.turns] == ["tiny@0123456789abcdef"] * 2
        assert (await served.client.post("/v1/sessions/mine/end", headers=victim)).status_code == 202
        await served.chat(headers=victim)
        assert served.turns[-1].version == newer


async def test_two_tenants_may_name_their_trajectories_and_feedback_alike(tmp_path: Path) -> None:
    """Their events have ids of their own, so neither is dropped as a duplicate of the other."""
    keys = {tenant: f"key-{tenant}" for tenant in ("default", "a", "b", "a/b")}
    settings = [
        KeySettings(name=f"k{at}", sha256=hashlib.sha256(key.encode()).hexdigest(), tenant=tenant, scopes=("admin",))
        for at, (tenant, key) in enumerate(keys.items())
    ]
    span = {"start": 1, "logprobs": [-0.5], "turn_id": "t-1", "version": "tiny@0123456789ab", "finish_reason": "stop"}
    longest = "x" * 512
    async with gateway(tmp_path, keys=settings) as served:
        await until(lambda: served.publisher.connected)
        names: dict[str, list[str]] = {}
        for tenant, key in keys.items():
            headers = {"authorization": f"Bearer {key}"}
            names[tenant] = []
            for name in ("run-1", "run-1", longest):
                body = {
                    "trajectory_id": name,
                    "session_id": "run-1",
                    "model": "tiny",
                    "branches": [{"token_ids": [1, 2], "spans": [span]}],
                    "started_at": "2026-01-01T00:00:00Z",
                }
                answer = await served.client.post("/v1/trajectories", json=body, headers=headers)
                assert answer.status_code == 202, answer.text
                names[tenant].append(answer.json()["trajectory_id"])
            again = {**body, "trajectory_id": names[tenant][0]}
            answer = await served.client.post("/v1/trajectories", json=again, headers=headers)
            assert answer.json()["trajectory_id"] == names[tenant][0]
            feedback_body = {"response_id": OWN, "value": 1, "feedback_id": "f"}
            assert (await served.client.post("/v1/feedback", json=feedback_body, headers=headers)).status_code == 202
        for tenant in ("b", "default"):  # a name that has the prefix of another tenant
            headers = {"authorization": f"Bearer {keys[tenant]}"}
            foreign = {**body, "trajectory_id": names["a"][0]}
            answer = await served.client.post("/v1/trajectories", json=foreign, headers=headers)
            names[tenant].append(answer.json()["trajectory_id"])
        identities = [_identity(event) for event in served.bus.events(Feedback)]
    assert names["default"][:3] == ["run-1", "run-1", longest]
    assert all(of[0] == of[1] and max(map(len, of)) <= 512 for of in names.values())
    assert len({name for of in names.values() for name in of}) == 2 * len(keys) + 2
    assert len(set(identities)) == len(keys)


def _identity(event: Feedback) -> str:
    return Received(event, Envelope.of(event, "test"), Record("feedback", 0, 0, None, None)).identity
