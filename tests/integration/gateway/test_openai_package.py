"""Tests of clients with another `base_url` alone: the `openai` package, and 64 conversations that are not mixed up."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from headrace_schemas import Feedback, SessionEnd
from headrace_schemas.values import ids
from tests.clients.replica import AgentReplica, trajectories_of
from tests.integration.conftest import Circle
from tests.support.fake_replica import LENGTH, Fault
from tests.support.gateway import Gateway, gateway
from tests.support.presence import draw_seed

SEARCH: openai.types.chat.ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "search", "parameters": {"type": "object", "properties": {"query": {"type": "string"}}}},
}
CONVERSATIONS = 64
PAUSE_S = 0.2
"""Most seconds between the calls of a conversation, which mix the conversations."""
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH_TOOL = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}


def sync_agent(base_url: str, model: str) -> tuple[str, str]:
    """Run two turns with a tool, then the last question streamed. Return the plain and the streamed answer."""
    client = openai.OpenAI(base_url=base_url, api_key="none")
    assert model in [listed.id for listed in client.models.list()]
    assert client.models.retrieve(model).owned_by == "headrace"
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Who wrote?"}]
    first = client.chat.completions.create(model=model, messages=messages, tools=[SEARCH], user="u", store=False)
    assert first.choices[0].finish_reason == "tool_calls"
    message = first.choices[0].message
    assert message.tool_calls
    call = message.tool_calls[0]
    assert call.type == "function"
    assert call.function.name == "search"
    messages += [message.to_dict(), {"role": "tool", "tool_call_id": call.id, "content": "Ada"}]  # type: ignore[list-item]
    plain = client.chat.completions.create(model=model, messages=messages, tools=[SEARCH], user="u")
    assert plain.usage
    assert plain.usage.completion_tokens == LENGTH
    assert plain._request_id == plain.id
    streamed = ""
    with client.chat.completions.stream(model=model, messages=messages, tools=[SEARCH], user="u") as stream:
        for event in stream:
            if event.type == "content.delta":
                streamed += event.delta
    return plain.choices[0].message.content or "", streamed


async def test_sync_with_tools_and_streaming(served_anywhere: Circle) -> None:
    served = served_anywhere
    plain, streamed = await asyncio.to_thread(sync_agent, served.base_url, served.model)
    assert plain
    assert streamed == plain
    turns = await served.turns()
    assert len(turns) == 3
    assert len({turn.session_key for turn in turns}) == 1, "the calls of one conversation are one session"
    assert turns[1].messages[1].tool_calls == turns[0].choices[0].message.tool_calls
    assert [turn.version for turn in turns] == list(served.replicas[0].versions) * 3


async def test_async_in_parallel_with_choices_and_logprobs(served: Circle) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key="none") as client:

        async def ask(number: int) -> list[str]:
            answer = await client.chat.completions.create(
                model=served.model,
                messages=[{"role": "user", "content": f"question {number}"}],
                n=2,
                temperature=0.5,
                logprobs=True,
                metadata={"session_id": f"run-{number}"},
            )
            first = answer.choices[0].logprobs
            assert first
            assert first.content
            assert first.content[0].logprob <= 0
            return [choice.message.content or "" for choice in answer.choices]

        answers = await asyncio.gather(*(ask(number) for number in range(8)))
        assert len({text for pair in answers for text in pair}) == 16
        stream = await client.chat.completions.create(
            model=served.model,
            messages=[{"role": "user", "content": "question 3"}],
            n=2,
            stream=True,
            stream_options={"include_usage": True},
        )
        texts, usage = ["", ""], None
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == answers[3]
        assert usage
        assert usage.completion_tokens == 2 * LENGTH
    turns = {turn.session_id: turn for turn in await served.turns() if turn.session_source == "metadata"}
    assert set(turns) == {f"run-{number}" for number in range(8)}
    assert all(turn.sampling.temperature == 0.5 for turn in turns.values())


async def test_a_retry_after_a_time_out_leaves_one_undelivered_turn(served: Circle) -> None:
    """Pitfall 20: the first sample is captured and marked, so it gets no reward."""
    (replica,) = served.replicas
    replica.faults = [Fault(stall_after=0)]
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=1, timeout=0.5) as client:
        answer = await client.chat.completions.create(
            model=served.model, messages=[{"role": "user", "content": "hello"}], extra_headers={"X-Session-Id": "run"}
        )
    replica.go_on.set()
    async with asyncio.timeout(10):
        while len(turns := await served.turns()) < 2:  # noqa: ASYNC110 (the bus is asked)
            await asyncio.sleep(0.05)
    by_retry = {turn.retry: turn for turn in turns}
    assert (by_retry[1].turn_id, by_retry[1].delivered) == (answer.id, True)
    assert not by_retry[0].delivered
    assert by_retry[0].request_digest == by_retry[1].request_digest


async def test_errors_are_the_packages_own(served: Circle) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist here"):
            await client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])
        with pytest.raises(openai.BadRequestError, match="response_format"):
            await client.chat.completions.create(
                model=served.model,
                messages=[{"role": "user", "content": "x"}],
                response_format={"type": "json_object"},
            )


async def test_feedback_ends_and_commits_reach_the_bus(served_anywhere: Circle) -> None:
    served = served_anywhere
    session = f"{served.model}-run"
    unknown = ids.response_id(ids.session_key("default", session))
    async with httpx2.AsyncClient(base_url=served.gateway.url) as client:
        accepted = await client.post("/v1/feedback", json={"msg_ids": [unknown], "value": 1})
        ended = await client.post(f"/v1/sessions/{session}/end")
        committed = await client.post("/commit")
    assert (accepted.status_code, ended.status_code, committed.status_code) == (202, 202, 200)
    feedback: list[Feedback] = []
    ends: list[SessionEnd] = []
    commits: list[SessionEnd] = []
    async with asyncio.timeout(30):  # what is acknowledged is in the spool, and on a slow bus a moment later
        while not feedback or len(commits) < 4:
            feedback = [event for event in await served.bus.read(Feedback) if event.msg_ids == (unknown,)]
            ends = await served.bus.read(SessionEnd)
            commits = [event for event in ends if event.scope == "tenant"]
    assert [event.event_id for event in feedback] == accepted.json()["event_ids"]
    assert ended.json()["event_ids"] == [event.event_id for event in ends if event.session_id == session]
    assert {event.partition for event in commits} == {0, 1, 2, 3}


async def test_it_stops_cleanly(served: Circle) -> None:
    async with openai.AsyncOpenAI(base_url=served.base_url, api_key="none") as client:
        await client.chat.completions.create(model=served.model, messages=[{"role": "user", "content": "x"}])
    assert await asyncio.to_thread(served.gateway.stop) == 0
    assert "Traceback" not in served.gateway.log
    assert '"event": "stopped"' in served.gateway.log


async def converse(served: Gateway, headers: dict[str, str], draw: random.Random) -> list[str]:
    """Run a tool loop, and return the ids of its responses."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Which word? It belongs to WORD-1."}]
    response_ids = []
    while True:
        await asyncio.sleep(PAUSE_S * draw.random())
        body = {"model": "tiny", "messages": messages, "tools": [SEARCH_TOOL]}
        response = await served.client.post("/v1/chat/completions", json=body, headers=headers, timeout=60)
        answer = response.raise_for_status().json()
        response_ids.append(answer["id"])
        message = answer["choices"][0]["message"]
        calls = message.get("tool_calls", [])
        if not calls:
            return response_ids
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "Ada wrote it"} for call in calls]
        messages = [*messages, message, *results]


@pytest.mark.parametrize("names_sessions", [True, False], ids=["headers", "no headers"])
async def test_equal_conversations_of_one_key_stay_apart(tmp_path: Path, names_sessions: bool) -> None:
    draw = random.Random(draw_seed("interleaved"))
    replica = AgentReplica(tmp_path)
    async with replica.running(), gateway(tmp_path, replica) as served:
        headers = [{"x-session-id": f"s{number}"} if names_sessions else {} for number in range(CONVERSATIONS)]
        conversations = await asyncio.gather(*(converse(served, fields, draw) for fields in headers))
        turns = served.turns
    conversation_of = {name: number for number, names in enumerate(conversations) for name in names}
    order = [conversation_of[turn.turn_id] for turn in turns]
    mixed = sum(one != other for one, other in itertools.pairwise(order))
    assert mixed > len(turns) / 2, "the conversations are interleaved"
    assert len({turn.session_key for turn in turns}) == (CONVERSATIONS if names_sessions else 1)
    trajectories = trajectories_of(turns)
    assert sorted(list(item.turn_ids) for item in trajectories) == sorted(conversations)
    assert {len(item.branches) for item in trajectories} == {1}
