"""Tests of session ids and of the role of a call in its session.

A session id comes from the header, the metadata, the path, the key, or is implied by the request. The role of a call is
main, side call or sub-agent; a request may also be a retry.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.access.keys import ALL_SCOPES, Caller
from headrace_gateway.access.refusals import ApiError
from headrace_gateway.capture.recent_turns import RepeatedRequests
from headrace_gateway.requests import http_request
from headrace_gateway.requests.identity import CallIdentity, RequestMetadata, identify, opening
from headrace_gateway.settings import LimitSettings
from headrace_schemas import Message, SubAgent, Turn
from headrace_schemas.events.trajectory import NO_TOOLS
from headrace_schemas.values import ids
from tests.support.fake_replica import FakeReplica
from tests.support.gateway import gateway, until
from tests.unit.gateway.test_messages_api import ASKED
from tests.unit.gateway.test_messages_api import served as messages_gateway

SYSTEM = Message(role="system", content="You are helpful.")
HELLO = Message(role="user", content="hello")
ANSWER = Message(role="assistant", content="hi")
MORE = Message(role="user", content="and now?")


def caller(key: str = "open", tenant: str = "default", session_id: str | None = None) -> Caller:
    return Caller(hashlib.sha256(key.encode()).hexdigest(), key, tenant, ALL_SCOPES, session_id, LimitSettings())


def identity(
    *messages: Message,
    headers: Mapping[bytes, bytes] | None = None,
    metadata: dict[str, Any] | None = None,
    path: str | None = None,
    by: Caller | None = None,
    model: str = "tiny",
) -> CallIdentity:
    scope = {http_request.SESSION: path} if path else {}
    return identify(
        by or caller(), scope, RequestMetadata(headers or {}, metadata or {}), model, messages or (SYSTEM, HELLO)
    )


def test_the_first_source_that_says_something_wins() -> None:
    sources: dict[str, Any] = {
        "headers": {b"x-session-id": b"from-header"},
        "metadata": {"session_id": "from-metadata"},
        "path": "from-path",
    }
    expected = ["header", "metadata", "path", "key", "implicit"]
    for source in expected:
        if source == "key":  # a key that is bound to a session admits no other source
            sources["by"] = caller(session_id="from-key")
        session = identity(**sources)
        assert session.source == source
        if source != "implicit":
            assert session.session_id == f"from-{source}"
            sources.pop({"header": "headers", "key": "by"}.get(source, source))
        assert session.session_key == ids.session_key("default", session.session_id)


def test_who_names_its_user_in_the_header_or_the_metadata_means_it_before_openais_field() -> None:
    headers = RequestMetadata({b"x-user-id": b"ann"}, {})
    nothing = RequestMetadata({}, {})
    identities = [
        identify(caller(), {}, source, "tiny", (HELLO,), user) for source in (headers, nothing) for user in ("bob", 7)
    ]
    ann, bob = (ids.session_key("default", f"user:{name}") for name in ("ann", "bob"))
    assert [identified.user_key for identified in identities] == [ann, ann, bob, None]


def test_calls_that_open_alike_are_one_session_and_its_forks() -> None:
    first = identity(SYSTEM, HELLO)
    assert first.session_id == identity(SYSTEM, HELLO, ANSWER, MORE).session_id
    assert first.session_id == identity(SYSTEM, HELLO, Message(role="assistant", content="other")).session_id


@pytest.mark.parametrize(
    "other",
    [
        {"messages": (SYSTEM, MORE)},
        {"messages": (HELLO, MORE)},
        {"model": "other"},
        {"by": caller("another-key")},
        {"metadata": {"purpose": "eval"}},
        {"metadata": {"user_id": "ann"}},
    ],
    ids=["question", "task", "model", "key", "purpose", "user"],
)
def test_another_opening_key_model_or_purpose_is_another_session(other: dict[str, Any]) -> None:
    messages = other.pop("messages", (SYSTEM, HELLO))
    assert identity(*messages, **other).session_key != identity(SYSTEM, HELLO).session_key


def test_system_prompt_and_environment_do_not_decide_the_session() -> None:
    clock = Message(role="system", content="It is 10:01.")
    environment = Message(role="user", content="<environment_context>/work</environment_context>")
    first = identity(SYSTEM, environment, HELLO)
    assert identity(clock, environment, HELLO, ANSWER, MORE).session_id == first.session_id
    assert identity(SYSTEM, environment, MORE).session_id != first.session_id
    assert identity(SYSTEM).session_id != identity(clock).session_id, "there is nothing else"


def test_prompt_cache_key_tells_conversations_apart_and_merges_none() -> None:
    def session(*messages: Message, cache_key: object) -> str:
        metadata = RequestMetadata({}, {})
        return identify(caller(), {}, metadata, "tiny", messages, None, cache_key).session_id  # type: ignore[arg-type]

    assert session(HELLO, cache_key="a") != session(HELLO, cache_key="b")
    assert session(HELLO, cache_key="a") == session(HELLO, ANSWER, MORE, cache_key="a")
    assert session(HELLO, cache_key="a") != session(MORE, cache_key="a")
    assert session(HELLO, cache_key=7) == session(HELLO, cache_key=None)


def test_a_user_cannot_imitate_another_with_a_cache_key() -> None:
    def session(user: str, cache_key: str) -> str:
        return identify(caller(), {}, RequestMetadata({}, {}), "tiny", (HELLO,), user, cache_key).session_id

    assert session("ann", "thread") != session("ann\0thread", "")
    assert session("ann\0", "thread") != session("ann", "\0thread")


def test_tenants_never_share_a_session() -> None:
    mine = identity(headers={b"x-session-id": b"run-1"})
    other_tenant = identity(headers={b"x-session-id": b"run-1"}, by=caller(tenant="other"))
    assert mine.session_id == other_tenant.session_id
    assert mine.session_key != other_tenant.session_key


def test_an_opening_without_a_user_is_all_there_is() -> None:
    assert opening((SYSTEM, ANSWER)) == (SYSTEM, ANSWER)
    assert opening((SYSTEM, HELLO, ANSWER, MORE)) == (SYSTEM, HELLO)
    assert opening((SYSTEM, ANSWER, HELLO, MORE, ANSWER)) == (SYSTEM, ANSWER, HELLO, MORE), "an answer may come first"


def test_task_run_and_purpose_come_the_same_ways() -> None:
    identified = identity(
        headers={b"x-task-id": "größe-7".encode(), b"x-headrace-purpose": b"eval"},
        metadata={"task_id": "t", "run_id": 3},
    )
    assert (identified.task_id, identified.run_id, identified.purpose) == ("größe-7", "3", "eval")
    assert identity(metadata={"purpose": "eval"}).purpose == "eval"
    assert identity().purpose == "train"


@pytest.mark.parametrize(
    ("said", "param"),
    [
        ({"headers": {b"x-session-id": b""}}, "X-Session-Id"),
        ({"headers": {b"x-run-id": b"x" * 513}}, "X-Run-Id"),
        ({"metadata": {"session_id": ["a"]}}, "metadata.session_id"),
        ({"metadata": {"session_id": True}}, "metadata.session_id"),
        ({"metadata": {"task_id": "a\x00b"}}, "metadata.task_id"),
        ({"metadata": {"purpose": "evaluation"}}, "purpose"),
        ({"headers": {b"x-headrace-purpose": b"training"}}, "purpose"),
        ({"headers": {b"x-headrace-purpose": b"shadow"}}, "shadow_of"),
        ({"headers": {b"x-shadow-of": b"a" * 16}}, "shadow_of"),
        ({"metadata": {"purpose": "shadow", "shadow_of": "nobody"}}, "shadow_of"),
    ],
)
def test_an_id_that_is_none_is_refused(said: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        identity(**said)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_an_implied_session_is_the_same_for_every_release_of_the_gateway() -> None:
    """The implied session id must not change between releases, because gateways are replaced during runs."""
    opened = b'{"role":"user","content":"hello"}'
    expected = hashlib.sha256(caller().key_id.encode() + b"\0train tiny\0\0" + opened).hexdigest()[:32]
    assert identity(SYSTEM, HELLO).session_id == f"implicit-{expected}"


CLAUDE = {"x-claude-code-session-id": "s"}
TOOLS = [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(
    ("headers", "fields", "kind"),
    [
        ({}, {}, None),
        ({}, {"tools": TOOLS}, None),
        (CLAUDE, {"tools": TOOLS}, None),
        (CLAUDE, {}, NO_TOOLS),
        ({"session-id": "s"}, {}, NO_TOOLS),
        ({"x-session-id": "s"}, {}, None),
        ({**CLAUDE, "x-headrace-side-call": "no"}, {}, None),
        ({"x-headrace-side-call": "title"}, {"tools": TOOLS}, "title"),
        ({"x-openai-subagent": "memory_consolidation"}, {"tools": TOOLS}, "memory_consolidation"),
        ({"x-openai-subagent": "review", "session-id": "s"}, {"tools": TOOLS}, None),
        ({"x-openai-memgen-request": "true"}, {}, "memory"),
        ({}, {"text": "Please write a title for: hello"}, "title"),
        ({}, {"messages": [{"role": "system", "content": "x"}, {"role": "user", "content": "write a title"}]}, "title"),
    ],
)
async def test_turn_names_the_kind_of_a_side_call(
    tmp_path: Path, headers: dict[str, str], fields: dict[str, Any], kind: str | None
) -> None:
    replica = FakeReplica(grammars=("tool_choice",))
    async with replica.running(), gateway(tmp_path, replica, side_calls={"title": "write a title"}) as served:
        assert (await served.chat(headers=headers, **fields)).status_code == 200
        assert served.turns[0].side_call == kind


async def test_kind_of_a_side_call_is_a_name(tmp_path: Path) -> None:
    async with gateway(tmp_path) as served:
        served.route()
        answer = await served.chat(headers={"x-headrace-side-call": ""})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "X-Headrace-Side-Call")


@pytest.mark.parametrize(
    ("headers", "sub_agent"),
    [
        ({**CLAUDE}, None),
        ({**CLAUDE, "x-claude-code-agent-id": "a1"}, SubAgent(agent="a1")),
        (
            {**CLAUDE, "x-claude-code-agent-id": "a2", "x-claude-code-parent-agent-id": "a1"},
            SubAgent(agent="a2", parent="a1"),
        ),
        ({"session-id": "s", "thread-id": "s"}, None),
        ({"session-id": "s", "thread-id": "t", "x-codex-parent-thread-id": "s"}, SubAgent(agent="t")),
        ({"session-id": "s", "thread-id": "u", "x-codex-parent-thread-id": "t"}, SubAgent(agent="u", parent="t")),
        ({"x-headrace-agent-id": "a", "x-headrace-parent-agent-id": "p"}, SubAgent(agent="a", parent="p")),
        ({"x-headrace-agent-id": ""}, None),
    ],
)
async def test_turn_names_its_sub_agent(tmp_path: Path, headers: dict[str, str], sub_agent: SubAgent | None) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        assert (await served.chat(headers=headers)).status_code == 200
        assert served.turns[0].sub_agent == sub_agent


class StoppedClock:
    """Clock that a test advances."""

    now_s = 0.0

    def monotonic_s(self) -> float:
        return self.now_s


async def test_request_repeats_one_that_was_lost_or_has_just_ended(tmp_path: Path) -> None:
    replica = FakeReplica(token_delay_s=0.05)
    async with replica.running(), gateway(tmp_path, replica) as served:
        for _ in range(2):
            await served.chat("equal", headers={"x-session-id": "s"})
        await served.chat("other", headers={"x-session-id": "s"})
        await served.chat("equal", headers={"x-session-id": "t"})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await served.chat("lost", headers={"x-session-id": "s"})
        await until(lambda: len(served.turns) == 5)
        await served.chat("lost", headers={"x-session-id": "s"})
        first, again, other, elsewhere, lost, retry = served.turns
    assert [turn.repeats for turn in (first, again, other, elsewhere, lost)] == [None, first.turn_id, None, None, None]
    assert (lost.delivered, retry.repeats) == (False, lost.turn_id)


async def test_requests_under_way_and_long_after_are_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StoppedClock()
    replica = FakeReplica()
    begin = RepeatedRequests.begin
    monkeypatch.setattr(RepeatedRequests, "begin", lambda repeated, call: begin(_with(repeated, clock), call))
    async with replica.running(), gateway(tmp_path, replica) as served:
        await asyncio.gather(*(served.chat("equal", headers={"x-session-id": "s"}) for _ in range(3)))
        clock.now_s += 11
        await served.chat("equal", headers={"x-session-id": "s"})
        assert [turn.repeats for turn in served.turns] == [None] * 4


def _with(repeated: RepeatedRequests, clock: Any) -> RepeatedRequests:
    repeated._clock = clock
    return repeated


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
    async with messages_gateway(tmp_path, FakeReplica()) as (running, client):
        await client.messages.create(**ASKED, metadata={"user_id": user_id}, extra_headers=headers)
        turn: Turn = running.turns[0]
    assert turn.session_source == source
    assert session in (None, turn.session_id)
