"""Tests of chat completions over HTTP, from the request to the turn on the bus."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headrace_schemas import Sampling, Turn
from headrace_schemas.values import ids
from tests.support.fake_replica import LENGTH, VERSION, FakeReplica, Fault, Generation, text_of
from tests.support.gateway import gateway, until

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}


def events_of(answer: httpx2.Response) -> list[dict[str, Any]]:
    """Return the events of a streamed response, which must have ended with `[DONE]`."""
    *events, last_line = [line[6:] for line in answer.text.split("\n\n") if line]
    assert last_line == "[DONE]"
    return [json.loads(event) for event in events]


def text_in(chunks: list[dict[str, Any]], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


async def test_a_plain_call_is_answered_and_captured(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        answer = await served.chat(temperature=0.5, max_tokens=4, headers={"X-Session-Id": "run-1", "X-Task-Id": "t"})
        assert answer.status_code == 200
        body = answer.json()
        work = Generation(replica.requests[0], VERSION)
        assert body["model"] == VERSION
        assert body["choices"][0]["message"]["content"] == "".join(map(text_of, work.tokens(0)))
        assert body["choices"][0]["finish_reason"] == "length"
        assert answer.headers["x-request-id"] == body["id"]
        (turn,) = served.turns
    assert turn.turn_id == body["id"]
    assert turn.session_key == ids.key_of_response(body["id"]) == ids.session_key("default", "run-1")
    assert (turn.session_id, turn.session_source, turn.task_id, turn.purpose) == ("run-1", "header", "t", "train")
    assert (turn.version, turn.replica_id, turn.delivered, turn.retry) == (VERSION, "replica-0", True, 0)
    assert turn.sampling == Sampling(temperature=0.5, max_tokens=4)
    assert list(turn.choices[0].token_ids) == work.tokens(0)
    assert list(turn.prompt_token_ids) == work.prompt_ids


async def test_the_replica_gets_what_the_client_asked_for_and_what_capture_needs(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat(temperature=0.5, top_p=0.9, seed=3, stop=["END"], tools=[TOOL], frequency_penalty=0.5,
                          logit_bias={"5": -1.5})  # fmt: skip
        (request,) = replica.requests
    assert re.fullmatch("[0-9a-f]{32}", request.pop("cache_salt")), "it does not name the tenant"
    assert request == {
        "model": VERSION,
        "messages": [{"role": "user", "content": "hello"}],
        "n": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "seed": 3,
        "stop": ["END"],
        "frequency_penalty": 0.5,
        "logit_bias": {"5": -1.5},
        "tools": [TOOL],
        "tool_choice": "auto",
        "return_token_ids": True,
        "logprobs": True,
    }


async def test_templates_get_every_content_as_one_text(tmp_path: Path) -> None:
    """Chat templates concatenate contents, so a list fails, and a null beside tool calls renders as the word "None"."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    call = {"id": "c", "type": "function", "function": {"name": "search", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": parts},
        {"role": "assistant", "tool_calls": [call], "name": "agent", "refusal": None},
        {"role": "tool", "tool_call_id": "c", "content": "found"},
    ]
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat(messages=messages)
        assert replica.requests[0]["messages"] == [
            {"role": "user", "content": "ab"},
            {"role": "assistant", "content": "", "name": "agent", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "found"},
        ]
        recorded = served.turns[0].messages
    assert recorded[1].content is None
    assert recorded[0].model_dump()["content"] == tuple(parts)


async def test_sampling_is_always_said_so_that_no_engine_takes_its_own_defaults(tmp_path: Path) -> None:
    """Pitfall 5: a stock vLLM server reads the defaults of top_p and temperature from `generation_config.json`."""
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat()
        assert {name: replica.requests[0][name] for name in ("temperature", "top_p", "top_k")} == {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
        }
        assert served.turns[0].sampling.untruncated


@pytest.mark.parametrize("n", [1, 3])
async def test_a_stream_says_the_same_as_a_plain_answer(tmp_path: Path, n: int) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        plain = (await served.chat(n=n)).json()
        answer = await served.chat(n=n, stream=True)
        assert answer.headers["content-type"].startswith("text/event-stream")
        chunks = events_of(answer)
        for choice in plain["choices"]:
            assert text_in(chunks, choice["index"]) == choice["message"]["content"]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert {chunk["model"] for chunk in chunks} == {VERSION}
        assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
        first, second = served.turns
    assert second.turn_id == chunks[0]["id"]
    assert first.choices == second.choices
    assert first.request_digest == second.request_digest


async def test_chunks_reach_the_client_while_the_engine_is_still_sampling(tmp_path: Path) -> None:
    """Pitfall 28: the gateway forwards each chunk at once instead of splitting a finished answer into chunks."""
    replica = FakeReplica(faults=[Fault(stall_after=2)])
    async with replica.running(), gateway(tmp_path, replica) as served:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "stream": True}
        async with served.client.stream("POST", "/v1/chat/completions", json=body) as answer:
            lines = answer.aiter_lines()
            seen = ""
            async for line in lines:
                seen += line
                if seen.count('"content":"w') == 2:
                    break
            assert served.turns == []
            replica.go_on.set()
            rest = [line async for line in lines]
        assert rest[-2:] in (["data: [DONE]", ""], ["", "data: [DONE]"]) or "data: [DONE]" in rest
        assert len(served.turns) == 1


async def test_tool_calls_are_relayed_and_captured(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        plain = (await served.chat(tools=[TOOL])).json()["choices"][0]
        chunks = events_of(await served.chat(tools=[TOOL], stream=True))
        calls = [c for chunk in chunks for choice in chunk["choices"] for c in choice["delta"].get("tool_calls", [])]
        assert plain["finish_reason"] == "tool_calls"
        assert plain["message"]["content"] is None
        (call,) = plain["message"]["tool_calls"]
        assert call["type"] == "function"
        assert calls[0]["id"] == call["id"]
        assert calls[0]["function"]["name"] == call["function"]["name"] == "search"
        assert "".join(c["function"]["arguments"] for c in calls) == call["function"]["arguments"]
        for turn in served.turns:
            assert turn.choices[0].message.tool_calls
            assert turn.choices[0].message.tool_calls[0].function.arguments == call["function"]["arguments"]
            assert turn.tools[0].function.name == "search"


async def test_logprobs_ids_and_usage_go_to_who_asked(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2, "return_token_ids": True}
        plain = (await served.chat(**options)).json()
        assert len(plain["choices"][0]["logprobs"]["content"]) == LENGTH
        assert len(plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 2
        assert len(plain["choices"][0]["token_ids"]) == LENGTH
        chunks = events_of(await served.chat(**options, stream=True, stream_options={"include_usage": True}))
        assert chunks[0]["prompt_token_ids"] == plain["prompt_token_ids"]
        tokens = [token for chunk in chunks for choice in chunk["choices"] for token in choice["token_ids"] or ()]
        assert tokens == plain["choices"][0]["token_ids"]
        assert chunks[-1]["usage"] == plain["usage"]
        assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


async def test_a_retry_is_told_from_a_parallel_sample(tmp_path: Path) -> None:
    """Pitfalls 20 and 21: the prompt digest is equal, but the retry count differs. No turn is deduplicated by its
    prompt."""
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        for retry in ("0", "1", "junk", "99999999999999"):
            await served.chat(headers={"x-stainless-retry-count": retry})
        await served.chat("something else")
        turns = served.turns
    assert [turn.retry for turn in turns] == [0, 1, 0, 0, 0]
    assert len({turn.request_digest for turn in turns}) == 2
    assert len({turn.turn_id for turn in turns}) == 5


async def test_the_version_is_the_one_that_the_engine_reports(tmp_path: Path) -> None:
    """P3, pitfall 19: the turn names the version that served the request, which may differ from the requested
    version."""
    other = "tiny@fedcba9876543210"
    replica = FakeReplica(faults=[Fault(model=other), Fault(model=other)])
    async with replica.running(), gateway(tmp_path, replica) as served:
        assert (await served.chat()).json()["model"] == other
        assert events_of(await served.chat(stream=True))[0]["model"] == other
        assert [turn.version for turn in served.turns] == [other, other]


async def test_the_turn_of_a_registered_version_says_why_it_is_never_trained(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat()
        served.route(VERSION, untrained=(VERSION,), revision=2)
        await served.chat()
        assert [turn.untrained for turn in served.turns] == [None, "registered"]


async def test_evaluation_traffic_is_marked(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat(headers={"X-Headrace-Purpose": "eval"})
        await served.chat(metadata={"purpose": "eval", "run_id": "7"})
        assert [turn.purpose for turn in served.turns] == ["eval", "eval"]
        assert served.turns[1].run_id == "7"


async def test_a_shadow_is_an_evaluation_that_says_whose_prompt_it_answers(tmp_path: Path) -> None:
    """A shadow turn is marked as an evaluation, so old readers never train it. It does not move the user's session."""
    replica, of = FakeReplica(), "a" * 16
    async with replica.running(), gateway(tmp_path, replica) as served:
        headers = {"X-Headrace-Purpose": "shadow", "X-Shadow-Of": of, "X-Session-Id": "shadow-1"}
        assert (await served.chat(headers=headers)).status_code == 200
        (turn,) = served.turns
        assert (turn.purpose, turn.shadow_of, turn.assignment) == ("eval", of, None)
        assert turn.session_key != of


@pytest.mark.parametrize(("load", "status"), [(0.0, 200), (0.49, 200), (0.5, 429), (1.0, 429)])
async def test_a_shadow_waits_while_users_need_the_replica(tmp_path: Path, load: float, status: int) -> None:
    replica = FakeReplica(capacity=100)
    async with replica.running(), gateway(tmp_path, replica) as served:
        beat = replica.heartbeat().model_copy(update={"in_flight": round(100 * load)})
        served.replica_set.update(replica.replica_id, beat)
        headers = {"X-Headrace-Purpose": "shadow", "X-Shadow-Of": "a" * 16, "X-Session-Id": "shadow-1"}
        answer = await served.chat(headers=headers)
        assert answer.status_code == status
        if status == 429:
            assert answer.json()["error"]["code"] == "users_first"
            assert answer.headers["retry-after"]
            assert served.turns == []
        assert (await served.chat()).status_code == 200, "a user is served in any case"


async def test_a_shadow_is_not_held_for_a_version_that_nobody_has(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        served.route(VERSION, serve=(f"tiny@{'9' * 16}",), revision=2)
        headers = {"X-Headrace-Purpose": "shadow", "X-Shadow-Of": "a" * 16, "X-Session-Id": "shadow-1"}
        answer = await served.chat(headers=headers, model=f"tiny@{'9' * 16}")
        assert answer.json()["error"]["code"] == "users_first"


async def test_the_trace_runs_from_the_client_through_the_replica_to_the_turn(tmp_path: Path) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat(headers={"traceparent": parent})
        at_replica = replica.headers[0]["traceparent"]
        at_bus = dict(served.bus.records[0].headers)["traceparent"].decode()
    assert at_replica.split("-")[1] == at_bus.split("-")[1] == parent.split("-")[1]


async def test_a_jdk_client_that_offers_h2c_keeps_its_body(tmp_path: Path) -> None:
    """Pitfall 29: AgentScope's client sends the h2c upgrade header with each request, on one connection."""
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": False}).encode()
        for _ in range(2):
            writer.write(
                b"POST /v1/chat/completions HTTP/1.1\r\nConnection: Upgrade, HTTP2-Settings\r\nContent-Length: %d\r\n"
                b"Host: 127.0.0.1:8000\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c\r\n"
                b"Authorization: Bearer dummy\r\nContent-Type: application/json\r\n"
                b"User-Agent: agentscope-java/1.0.9\r\n\r\n%s" % (len(body), body)
            )
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            assert head.startswith(b"HTTP/1.1 200 ")
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            answer = json.loads(await reader.readexactly(length))
            assert answer["choices"][0]["message"]["content"]
            assert not {"error", "status", "code"} & set(answer), "AgentScope reads these as a failure"
        writer.close()
        assert len(served.turns) == 2


async def test_models_are_listed_under_every_name(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica, model_aliases={"training-model": "tiny"}) as served:
        listed = (await served.client.get("/v1/models")).json()
        names = [model["id"] for model in listed["data"]]
        assert names == ["tiny", "tiny:champion", VERSION, "training-model"]
        for name in names:
            shown_model = (await served.client.get(f"/v1/models/{name}")).json()
            assert (shown_model["id"], shown_model["object"], shown_model["version"]) == (name, "model", VERSION)
            assert (await served.chat(model=name)).json()["model"] == VERSION
        missing = await served.client.get("/v1/models/nope")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "model_not_found"


async def test_health_and_metrics_tell_how_it_goes(tmp_path: Path) -> None:
    replica = FakeReplica()
    async with replica.running(), gateway(tmp_path, replica) as served:
        await served.chat()
        assert (await served.client.get("/health")).json()["checks"] == {"routing": True, "capture": True}
        page = (await served.client.get("/metrics")).text
        assert 'headrace_gateway_requests_total{route="chat",status="200"}' in page
        assert 'headrace_gateway_turns_total{model="tiny",purpose="train"}' in page


async def test_a_client_that_goes_away_leaves_an_undelivered_turn(tmp_path: Path) -> None:
    """Pitfall 20: an SDK that timed out will retry, so this sample is captured and never trained."""
    for stream in (False, True):
        replica = FakeReplica(faults=[Fault(stall_after=2)])
        folder = tmp_path / str(stream)
        async with replica.running(), gateway(folder, replica) as served:
            calling = asyncio.create_task(served.chat(stream=stream))
            await until(lambda replica=replica: replica.requests)
            await asyncio.sleep(0.05)
            calling.cancel()
            await asyncio.wait([calling])
            await asyncio.sleep(0.05)
            replica.go_on.set()
            await until(lambda served=served: served.turns)
            (turn,) = served.turns
            assert isinstance(turn, Turn)
            assert not turn.delivered
            assert len(turn.choices[0].token_ids) == LENGTH


async def test_a_client_that_went_away_does_not_hold_the_engine_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_gateway.apis.chat.UNDELIVERED_WAIT_S", 0.1)
    replica = FakeReplica(faults=[Fault(stall_after=0)])
    async with replica.running(), gateway(tmp_path, replica) as served:
        calling = asyncio.create_task(served.chat())
        await until(lambda: replica.requests)
        calling.cancel()
        await asyncio.wait([calling])
        await until(lambda: replica.cancelled == 1)
        assert served.turns == []
