"""Where a session id comes from: header, metadata, path, key, implied; and the inputs of the implied one."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import pytest

from headrace_gateway import prefixes
from headrace_gateway.access import ALL_SCOPES, Caller
from headrace_gateway.identity import CallIdentity, RequestMetadata, identify, opening
from headrace_gateway.refusals import ApiError
from headrace_gateway.settings import LimitSettings
from headrace_schemas import Message
from headrace_schemas.values import ids

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
    scope = {prefixes.SESSION: path} if path else {}
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
    """Gateways are replaced one after the other, in the middle of runs."""
    opened = b'{"role":"user","content":"hello"}'
    expected = hashlib.sha256(caller().key_id.encode() + b"\0train tiny\0\0" + opened).hexdigest()[:32]
    assert identity(SYSTEM, HELLO).session_id == f"implicit-{expected}"
