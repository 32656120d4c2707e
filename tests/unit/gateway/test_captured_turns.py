"""Tests of captured turns: what the engine sampled, and turns that extend an earlier turn of their session.

Impossible tokens are detected (P2, pitfalls 2 and 3). Server-sent events are split however they arrive. A turn that
extends another one is stored without the shared part, and restored by readers.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks._sessions_replica import answer_of, prompt_of
from headrace_gateway.capture.captured_turns import CapturedTurn, CapturedTurns, read_turn
from headrace_gateway.capture.transcript import Transcript
from headrace_gateway.requests.client_connection import EventTooLarge, Splitter, encode_event
from headrace_gateway.requests.engine_wire import EngineAnswer
from headrace_gateway.requests.identity import CallIdentity
from headrace_gateway.settings import CaptureSettings
from headrace_schemas import Turn
from headrace_schemas.http.replica_api import History
from headrace_schemas.rules.turn_history import TurnHistory
from headrace_schemas.values import ids
from tests.support.fake_replica import VERSION, FakeReplica, Fault, Generation
from tests.support.gateway import Gateway, gateway, until

Messages = list[dict[str, Any]]
OPENING: dict[str, Any] = {"role": "system", "content": "Read the rules before you act. " * 200}
LOOKUP = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


@pytest.fixture
def exact_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the prompts of the replica continue the sampled tokens of earlier answers."""
    monkeypatch.setattr(Generation, "prompt_ids", property(lambda self: prompt_of(self.body["messages"])))
    monkeypatch.setattr(Generation, "tokens", lambda self, index: answer_of([*self.prompt_ids, index])[: self.limit])
    monkeypatch.setattr(Generation, "calls_a_tool", property(lambda _self: False))


with_exact_prompts = pytest.mark.usefixtures("exact_prompts")


async def ask(served: Gateway, messages: Messages, session: str = "s", **fields: Any) -> Messages:
    """Request a chat completion, and return the conversation with its first answer."""
    body = {"model": "tiny", "messages": messages, **fields}
    answer = await served.client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    message = answer.json()["choices"][0]["message"]
    return [*messages, {"role": "assistant", "content": message["content"]}]


async def converse(served: Gateway, turns: int, session: str = "s", **fields: Any) -> Messages:
    messages = [OPENING]
    for number in range(turns):
        messages = await ask(served, [*messages, {"role": "user", "content": f"result {number}"}], session, **fields)
    return messages


def resolve(turns: list[Turn]) -> list[Turn]:
    history = TurnHistory()
    return [history.whole_turn(turn) for turn in turns]


def as_sent(turn: Turn) -> Messages:
    return [json.loads(message.model_dump_json(exclude_none=True)) for message in turn.messages]


@with_exact_prompts
async def test_turns_of_a_session_contain_what_they_add_and_resolve_to_what_the_engine_saw(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await converse(served, 30, tools=[LOOKUP])
        turns = served.stored_turns
    assert turns[0].extends is None
    assert [turn.extends and turn.extends.turn_id for turn in turns[1:]] == [turn.turn_id for turn in turns[:-1]]
    sizes = [len(turn.to_json()) for turn in turns]
    assert max(sizes[1:]) < sizes[0] / 3, sizes
    assert max(sizes[2:]) < 1.1 * min(sizes[1:]), sizes
    assert all(len(turn.messages) == 1 and not turn.tools for turn in turns[1:]), "the answer is not repeated either"
    for request, turn in zip(replica.requests, resolve(turns), strict=True):
        assert as_sent(turn) == request["messages"]
        assert list(turn.prompt_token_ids) == prompt_of(request["messages"])
        assert [tool.function.name for tool in turn.tools] == ["lookup"]
        assert turn.usage.prompt_tokens == len(turn.prompt_token_ids)


@with_exact_prompts
async def test_forks_alternating_conversations_and_changed_histories_resolve(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        first = await converse(served, 2)
        left = await ask(served, [*first, {"role": "user", "content": "left"}])
        await ask(served, [*first, {"role": "user", "content": "right"}], n=2)
        other = await ask(served, [OPENING, {"role": "user", "content": "a sub-agent"}], tools=[LOOKUP])
        await ask(served, [*left, {"role": "user", "content": "on"}])
        await ask(served, [*other, {"role": "user", "content": "on"}])
        edited = [{**message, "content": message["content"].replace("left", "west")} for message in left]
        await ask(served, [*edited, {"role": "user", "content": "edited"}])
        await ask(served, first[:-1])
        turns = served.stored_turns
    assert sum(turn.extends is not None for turn in turns) == len(turns) - 1
    for request, turn in zip(replica.requests, resolve(turns), strict=True):
        assert as_sent(turn) == request["messages"]
        assert list(turn.prompt_token_ids) == prompt_of(request["messages"])
        assert len(turn.tools) == len(request.get("tools", ()))


@with_exact_prompts
async def test_other_sessions_and_unknown_history_are_stored_whole(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running():
        async with gateway(tmp_path, replica) as served:
            messages = await converse(served, 2, session="a")
            await ask(served, [*messages, {"role": "user", "content": "on"}], session="b")
            assert served.stored_turns[-1].extends is None, "the other session may be in another partition"
        async with gateway(tmp_path, replica) as restarted:
            await ask(restarted, [*messages, {"role": "user", "content": "on"}], session="a")
            assert restarted.stored_turns[-1].extends is None
        async with gateway(tmp_path, replica, capture=CaptureSettings(references_bytes_max=0)) as served:
            await converse(served, 3)
            assert [turn.extends for turn in served.stored_turns] == [None] * 3


@with_exact_prompts
async def test_turn_that_neither_bus_nor_spool_took_is_never_referred_to(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        messages = await converse(served, 1)
        served.bus.back.clear()
        lost = [*messages, {"role": "user", "content": "lost"}]
        spool = served.spool.append

        async def broken(_events: object) -> None:
            raise OSError("the disk is gone")

        served.spool.append = broken  # type: ignore[method-assign, assignment]
        answer = await served.client.post(
            "/v1/chat/completions", json={"model": "tiny", "messages": lost}, headers={"x-session-id": "s"}
        )
        assert answer.status_code >= 500
        served.spool.append = spool  # type: ignore[method-assign]
        served.bus.back.set()
        await until(lambda: served.publisher.connected)
        await ask(served, [*lost, {"role": "user", "content": "again"}])
        turns = served.stored_turns
    assert turns[-1].extends is not None
    assert turns[-1].extends.turn_id == turns[0].turn_id
    resolve(turns)


@with_exact_prompts
async def test_line_of_turns_begins_with_a_whole_turn_again(tmp_path: Path) -> None:
    """A chain of extending turns starts again with a complete turn, which bounds the bytes that a reader has to
    resolve."""
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        messages = [OPENING]
        for number in range(24):
            content = f"result {number} " + "x" * 1_200
            messages = await ask(served, [*messages, {"role": "user", "content": content}])
        turns = served.stored_turns
    lines = [at for at, turn in enumerate(turns) if turn.extends is None]
    assert 2 <= len(lines) <= 6, lines
    total = sum(len(turn.to_json()) for turn in turns)
    added = len(turns[-1].to_json()) * len(turns)
    assert total < 4 * added, "the whole turns cost about as much as the others together"
    assert [len(turn.messages) for turn in resolve(turns)] == [2 * at + 2 for at in range(24)]


@with_exact_prompts
async def test_replica_that_was_restarted_gets_the_exact_tokens_of_the_conversation_once(tmp_path: Path) -> None:
    replica, other = FakeReplica(), FakeReplica("replica-1")
    async with replica.running(), gateway(tmp_path, replica) as served:
        served.replica_set.update(replica.replica_id, replica.heartbeat(histories=True))
        messages = await converse(served, 3)
        assert not any("headrace_history" in request for request in replica.requests), "it has answered them itself"
        answered = served.stored_turns[-1]
        served.replica_set.update(replica.replica_id, replica.heartbeat(histories=True))
        for stream in (False, True):
            messages = [*messages, {"role": "user", "content": "on"}]
            body = {"model": "tiny", "messages": messages, "stream": stream}
            answer = await served.client.post("/v1/chat/completions", json=body, headers={"x-session-id": "s"})
            assert answer.status_code == 200
            content = replica_answer(replica)
            messages = [*messages, {"role": "assistant", "content": content}]
        sent = [request.get("headrace_history") for request in replica.requests[-2:]]
        history = History.model_validate(sent[0])
        assert sent[1] is None
        expected = resolve(served.stored_turns[:3])[-1]
        assert answered.turn_id == expected.turn_id
        assert history.prompt_token_ids == expected.prompt_token_ids
        assert history.token_ids == expected.choices[0].token_ids
        assert history.messages == len(expected.messages)
        served.replica_set.update(replica.replica_id, replica.heartbeat(histories=False))
        messages = await ask(served, [*messages, {"role": "user", "content": "on"}])
        assert "headrace_history" not in replica.requests[-1], "an earlier release does not know the field"
        async with other.running():
            served.replica_set.update(replica.replica_id, None)
            served.beat(other)
            served.replica_set.update(other.replica_id, other.heartbeat(histories=True))
            await ask(served, [*messages, {"role": "user", "content": "elsewhere"}])
            await ask(served, [OPENING, {"role": "user", "content": "another conversation"}])
            await ask(served, [*messages, {"role": "user", "content": "elsewhere"}], session="t")
        assert ["headrace_history" in request for request in other.requests] == [True, False, False]


def replica_answer(replica: FakeReplica) -> str:
    """Return the text of the replica's answer to its last request."""
    work = Generation(replica.requests[-1], "tiny")
    return "".join(map(work.text, range(work.limit), work.tokens(0)))


def captured(name: str, prompt: bytes) -> CapturedTurn:
    return CapturedTurn(
        name, VERSION, None, None, (), prompt, (b"\x00\x01\x00\x00",), b"m" * 16, (b"r" * 16,), 10, 10, 10
    )


@with_exact_prompts
async def test_recalled_turns_are_continued_as_if_the_gateway_had_never_stopped(tmp_path: Path) -> None:
    replica = FakeReplica()
    memory = CapturedTurns(10_000_000, recalls=True)
    async with replica.running(), gateway(tmp_path, replica) as served:
        messages = await converse(served, 3, tools=[LOOKUP])
        turns = served.turns
    for turn in turns:
        memory.recall(identity("s"), read_turn(turn))
    on = [*messages, {"role": "user", "content": "on"}]
    async with replica.running(), gateway(tmp_path, replica, captured=memory) as restarted:
        restarted.replica_set.update(replica.replica_id, replica.heartbeat(histories=True))
        await ask(restarted, on, tools=[LOOKUP])
        (stored,) = restarted.stored_turns
    assert stored.extends is not None
    assert (stored.extends.turn_id, len(stored.messages), stored.tools) == (turns[-1].turn_id, 1, ())
    history = History.model_validate(replica.requests[-1]["headrace_history"])
    assert (history.prompt_token_ids, history.messages) == (turns[-1].prompt_token_ids, len(turns[-1].messages))
    memory.recall(identity("s"), read_turn(turns[0]))
    assert memory.of_session(identity("s"))[0].turn_id == stored.turn_id, "a newer turn keeps its place"
    memory.end_recall()
    assert resolve([*turns, stored])[-1].message_count == len(on)


def identity(session: str, tenant: str = "default") -> CallIdentity:
    key = ids.session_key(tenant, session)
    return CallIdentity(tenant, session, key, "header", None, None, "train")


def test_memory_of_captured_turns_is_bounded_by_bytes_and_shared_fairly() -> None:
    memory = CapturedTurns(100_000)
    memory.add(identity("quiet", "other"), captured("t", bytes(9_000)))
    for number in range(50):
        memory.add(identity(f"session {number}"), captured("t", bytes(9_000)))
        memory.add(identity("used"), captured(f"t{number}", bytes(4 * number)))
    assert memory.of_session(identity("session 0")) == ()
    assert memory.of_session(identity("session 49"))
    assert 1 <= len(memory.of_session(identity("used"))) <= 4, "used by every call, so it stays"
    assert memory.of_session(identity("quiet", "other")), "another tenant's calls forget their own sessions"
    assert memory._sessions.size <= 100_000


def test_turn_replaces_the_turn_that_it_continues() -> None:
    memory = CapturedTurns(100_000)
    first = captured("first", bytes(400))
    memory.add(identity("s"), first)
    memory.add(identity("s"), captured("fork", bytes(200)))
    memory.add(identity("s"), captured("second", first.prompt + first.answers[0] + bytes(40)))
    assert [turn.turn_id for turn in memory.of_session(identity("s"))] == ["second", "fork"]


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
