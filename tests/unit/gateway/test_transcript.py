"""Tests of sampled tokens, base URLs, spool batches and server-sent events.

Impossible tokens are detected (P2, pitfalls 2 and 3). A base URL carries parameters for clients that cannot set
headers. Events of the spool are sent together where their order allows it. Server-sent events are split however they
arrive.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message, Receive, Scope, Send

from headrace_gateway.capture.spool import split_into_stages
from headrace_gateway.capture.transcript import Transcript
from headrace_gateway.requests.client_connection import EventTooLarge, Splitter, encode_event
from headrace_gateway.requests.engine_wire import EngineAnswer
from headrace_gateway.requests.http_request import KEY, SESSION, PathPrefixes
from headrace_schemas import Event, Feedback, SessionEnd
from headrace_schemas.values import ids
from headrace_schemas.values.base import utcnow
from tests.support.fake_replica import VERSION, Fault, Generation

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}], "n": 2}


def streamed(body: dict[str, Any], fault: Fault | None = None) -> Transcript:
    transcript = Transcript()
    for chunk, _ in Generation(body, VERSION).chunks(fault or Fault()):
        transcript.add(EngineAnswer.model_validate(chunk), streamed=True)
    return transcript


def test_chunks_add_up_to_what_was_sampled() -> None:
    transcript = streamed(BODY)
    work = Generation(BODY, VERSION)
    assert transcript.prompt_token_ids == work.prompt_ids
    assert transcript.version == VERSION
    for index in (0, 1):
        choice = transcript.choices[index]
        assert choice.token_ids == work.tokens(index)
        assert "".join(choice.content) == "".join(f"w{token} " for token in work.tokens(index))
        assert choice.finish_reason == "stop"
    assert transcript.finished(2)
    assert transcript.disagreement() is None


def test_tool_calls_arrive_in_pieces() -> None:
    transcript = streamed({**BODY, "n": 1, "tools": [{"function": {"name": "search"}}]})
    (call,) = transcript.choices[0].calls.values()
    assert (call.name, call.arguments) == ("search", '{"query": "invoice"}')
    assert call.id.startswith("call_")


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        (Fault(lose_logprobs=1), "choice 0 has 6 token ids and 5 logprobs"),
        (Fault(usage_off_by=1), "prompt and sampled ids are"),
        (Fault(no_usage=True), "the engine sent no usage"),
    ],
)
def test_what_does_not_add_up_is_named(fault: Fault, complaint: str) -> None:
    assert complaint in (streamed(BODY, fault).disagreement() or "")


def test_two_prompts_of_one_request_are_noticed() -> None:
    transcript = streamed(BODY)
    transcript.add(EngineAnswer(prompt_token_ids=[1, 2, 3]), streamed=True)
    assert "other prompt ids" in (transcript.disagreement() or "")


def test_a_stream_goes_on_from_its_tokens_and_from_nothing_without_any() -> None:
    transcript = Transcript()
    chunks = Generation(BODY, VERSION).chunks(Fault())
    for chunk, _ in chunks[:2]:  # the two openings
        transcript.add(EngineAnswer.model_validate(chunk), streamed=True)
    assert transcript.resume() is None
    for chunk, _ in chunks[2:5]:
        transcript.add(EngineAnswer.model_validate(chunk), streamed=True)
    resume = transcript.resume()
    assert resume
    assert [len(choice.token_ids) for choice in resume.choices] == [2, 1]


def test_a_stream_keeps_the_version_that_it_began_with() -> None:
    transcript = Transcript()
    for model in ("", VERSION, "tiny@ffffffffffff", ""):
        transcript.add(EngineAnswer(model=model), streamed=True)
    assert transcript.version == VERSION


async def seen(path: str) -> Scope:
    scopes: list[Scope] = []

    async def app(scope: Scope, _receive: Receive, _send: Send) -> None:
        scopes.append(scope)

    async def nothing() -> Message:
        raise AssertionError("nothing is read here")

    async def nowhere(_message: Message) -> None:
        raise AssertionError("nothing is sent here")

    await PathPrefixes(app)({"type": "http", "path": path, "raw_path": path.encode()}, nothing, nowhere)
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
    assert (scope["path"], scope.get(KEY), scope.get(SESSION)) == (rest.rstrip("/") or "/", key, session)


KEYS = [ids.session_key("default", name) for name in ("a", "b", "c")]


def feedback(key: str) -> Feedback:
    return Feedback(time=utcnow(), feedback_id="f", session_key=key, value=1.0)


def end(key: str) -> SessionEnd:
    return SessionEnd(time=utcnow(), end_id="e", session_key=key)


def commit() -> SessionEnd:
    return SessionEnd(time=utcnow(), end_id="c", scope="tenant", reason="commit")


def stages(events: list[Event]) -> list[list[int]]:
    """Return the stages that `events` are sent in, as lists of indices into `events`."""
    return split_into_stages(list(range(len(events))), lambda index: events[index])


def test_sessions_owe_each_other_nothing_and_an_end_waits_for_its_own_events() -> None:
    a, b, _ = KEYS
    assert stages([feedback(a), end(a), feedback(b), feedback(b), end(b), feedback(a)]) == [[0, 2, 3], [1, 4], [5]]


def test_the_end_of_a_tenant_stands_alone() -> None:
    a, b, _ = KEYS
    assert stages([feedback(a), feedback(b), end(b), commit(), feedback(a), end(b)]) == [[0, 1], [2], [3], [4, 5]]


events = st.one_of(st.builds(feedback, st.sampled_from(KEYS)), st.builds(end, st.sampled_from(KEYS)), st.builds(commit))


@given(st.lists(events, max_size=30))
def test_a_session_keeps_its_order_in_as_few_stages_as_its_topics_take_turns(sent: list[Event]) -> None:
    staged = stages(sent)
    assert sorted(itertools.chain(*staged)) == list(range(len(sent)))
    assert all(staged)
    at = {index: number for number, stage in enumerate(staged) for index in stage}
    assert all(stage == sorted(stage) for stage in staged)
    for first, second in itertools.combinations(range(len(sent)), 2):
        if sent[first].key == sent[second].key:
            assert at[first] + (sent[first].topic != sent[second].topic) <= at[second]
        if "c" in (getattr(sent[first], "end_id", ""), getattr(sent[second], "end_id", "")):
            assert at[first] < at[second]
    assert len(staged) <= _turns_taken(sent)


def _turns_taken(sent: list[Event]) -> int:
    """Return the largest number of stages that `sent` may need: changes of topic in a session, and one for each
    commit."""
    total, between = 0, list[Event]()
    for event in [*sent, commit()]:
        if isinstance(event, SessionEnd) and event.scope == "tenant":
            runs = [[topic for topic, _ in itertools.groupby(e.topic for e in between if e.key == key)] for key in KEYS]
            total, between = total + max(map(len, runs)) + 1, []
        else:
            between.append(event)
    return total - 1


PAYLOADS = st.lists(
    st.binary(min_size=1, max_size=40).filter(lambda data: not {10, 13, 0xC2, 0xE2} & set(data)), max_size=8
)


@given(payloads=PAYLOADS, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_any_cut_of_the_bytes_gives_the_same_events(payloads: list[bytes], cuts: list[int]) -> None:
    encoded = b"".join(encode_event(payload) for payload in payloads)
    edges = [0, *sorted(min(cut, len(encoded)) for cut in cuts), len(encoded)]
    splitter = Splitter(1000)
    events_of_cut = [event for a, b in itertools.pairwise(edges) for event in splitter.feed(encoded[a:b])]
    assert events_of_cut == payloads


def test_comments_other_fields_and_carriage_returns_are_no_data() -> None:
    splitter = Splitter(1000)
    assert splitter.feed(b": ping\n\nevent: x\r\ndata: a\r\ndata:b\r\nid: 1\r\n\r\nretry: 5\n\n") == [b"a\nb"]


def test_an_event_without_an_end_is_bounded() -> None:
    with pytest.raises(EventTooLarge):
        Splitter(10).feed(b"data: 0123456789")


def test_line_separators_inside_of_json_are_escaped() -> None:
    data = '{"a":"x\u2028y\u2029z\u0085"}'
    event = encode_event(data.encode(), "kind").decode()
    assert event.splitlines() == ["event: kind", r'data: {"a":"x\u2028y\u2029z\u0085"}', ""]
    assert json.loads(event.split("data: ")[1]) == json.loads(data)
