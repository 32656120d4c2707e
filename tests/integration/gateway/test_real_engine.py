"""Tests of the gateway with the real engine: their protocol, and streams that are cut and resumed (P8).

Conversations over the Messages and the Responses API are one session and one branch with exact tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import anthropic
import httpx2
import openai
import pytest
import pytest_asyncio

from headrace_collector.branches import build_branches
from headrace_runtime.storage.blobs import BlobStore
from headrace_schemas import Replica, Routing, Turn
from headrace_schemas.values.base import utcnow
from tests.support import tiny_model
from tests.support.processes import wait_until
from tests.support.service_process import BusView, GatewayProcess, ReplicaProcess, bus_view, wait_healthy

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]
LENGTH = 120
CUT_AFTER_BYTES = 8_000
"""Bytes of a response after which it is cut: some thirty tokens as the engine writes them."""


@dataclass
class Scissors:
    """TCP proxy to the replica that cuts every response short by a connection reset, as a killed process does."""

    target: int
    port: int = 0
    cuts: int = 0

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        async with server:
            yield

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
        sending = asyncio.create_task(_copy(reader, server_writer))
        left = CUT_AFTER_BYTES
        while left > 0 and (data := await server_reader.read(min(left, 1024))):
            writer.write(data)
            await writer.drain()
            left -= len(data)
        self.cuts += left <= 0
        sending.cancel()
        for end in (writer, server_writer):
            end.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65_536):
        writer.write(data)


@dataclass
class GatewayRig:
    """One replica with two addresses: its own, and one through the proxy that cuts responses. All tests share it."""

    gateway: GatewayProcess
    view: BusView
    scissors: Scissors


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory, module_bus: str) -> AsyncIterator[GatewayRig]:
    folder, bus = tmp_path_factory.mktemp("rig"), module_bus
    data = folder / "data"
    replica, gateway = ReplicaProcess(data, bus), GatewayProcess(data, bus)
    scissors = Scissors(replica.port)
    async with bus_view(bus, data) as view, scissors.open():
        try:
            with ThreadPoolExecutor(2) as pool:  # importing torch takes a while, here as there
                starting = [pool.submit(replica.start, 100), pool.submit(gateway.start)]
                champion = tiny_model.publish(BlobStore(f"file://{data}/blobs"), tiny_model.build(folder / "tiny"))
                for started in starting:
                    started.result()
            routing = {"model": "tiny", "revision": 0, "aliases": {"champion": champion.version}, "serve": [champion]}
            await view.producer.send(Routing.model_validate({"time": utcnow(), **routing}))
            await asyncio.to_thread(wait_until, lambda: loaded(replica), 20, "the champion is loaded")
            await asyncio.to_thread(wait_healthy, gateway.url)
            beat = (await view.read(Replica))[-1]
            assert beat.ready(champion.version)
            through = {"replica_id": "through-scissors", "url": f"http://127.0.0.1:{scissors.port}", "ttl_s": 600.0}
            await view.producer.send(beat.model_copy(update={"time": utcnow(), **through}))
            yield GatewayRig(gateway, view, scissors)
        finally:
            await asyncio.to_thread(gateway.stop)
            await asyncio.to_thread(replica.stop)


def loaded(replica: ReplicaProcess) -> bool:
    return bool(httpx2.get(f"{replica.url}/v1/models").json()["data"])


async def stream(client: openai.AsyncOpenAI, number: int) -> str:
    chunks = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"question {number}"}],
        temperature=0,
        max_tokens=LENGTH,
        stream=True,
        extra_headers={"X-Session-Id": f"run-{number}", "X-Run-Id": "streamed"},
    )
    return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])


async def plain(client: openai.AsyncOpenAI, number: int) -> str:
    answer = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"question {number}"}],
        temperature=0,
        max_tokens=LENGTH,
        extra_headers={"X-Session-Id": f"run-{number}", "X-Run-Id": "plain"},
    )
    return answer.choices[0].message.content or ""


@pytest.mark.long
async def test_a_cut_stream_of_the_real_engine_is_the_one_that_was_not(rig: GatewayRig) -> None:
    """Sampling is greedy, so that a resumed stream has the tokens of a complete answer."""
    cuts = rig.scissors.cuts
    async with openai.AsyncOpenAI(base_url=f"{rig.gateway.url}/v1", api_key="none", max_retries=0) as client:
        streamed = await asyncio.gather(*(stream(client, number) for number in range(8)))
        assert rig.scissors.cuts > cuts, "no stream went through the scissors"
        uncut = await asyncio.gather(*(plain(client, number) for number in range(8)))
    turns = [turn for turn in await rig.view.read(Turn) if turn.run_id in ("streamed", "plain")]
    assert streamed == uncut
    by_run = {(turn.session_id, turn.run_id): turn for turn in turns}
    assert len(by_run) == len(turns) == 16
    for number in range(8):
        resumed, complete = by_run[f"run-{number}", "streamed"], by_run[f"run-{number}", "plain"]
        assert resumed.prompt_token_ids == complete.prompt_token_ids
        assert resumed.choices[0].token_ids == complete.choices[0].token_ids
        assert resumed.choices[0].logprobs == pytest.approx(complete.choices[0].logprobs, abs=1e-4)
        assert resumed.usage == complete.usage


SCHEMA = {
    "type": "object",
    "properties": {"mood": {"enum": ["glad", "sad"]}, "sure": {"type": "boolean"}},
    "required": ["mood", "sure"],
    "additionalProperties": False,
}
FUNCTION = {"name": "mark", "parameters": SCHEMA}


async def test_held_answers_and_responses_of_the_real_engine(rig: GatewayRig) -> None:
    """The package requests a schema and a forced call, and both again over the Responses API, plain and streamed."""
    forms: Any = {"type": "json_schema", "json_schema": {"name": "mood", "schema": SCHEMA, "strict": True}}
    tools: Any = [{"type": "function", "function": FUNCTION}]
    forced: Any = {"type": "function", "function": {"name": "mark"}}
    messages: Any = [{"role": "user", "content": "How are you?"}]
    beat = (await rig.view.read(Replica))[-1]
    assert beat.grammars == ("response_format", "tool_choice")
    own_session = {"X-Session-Id": "held"}
    async with openai.AsyncOpenAI(
        base_url=f"{rig.gateway.url}/v1", api_key="none", max_retries=0, default_headers=own_session
    ) as client:
        chat = client.chat.completions
        written = await chat.create(model="tiny", messages=messages, response_format=forms)
        called = await chat.create(model="tiny", messages=messages, tools=tools, tool_choice=forced)
        text: Any = {"format": {"type": "json_schema", "name": "mood", "schema": SCHEMA}}
        response = await client.responses.create(model="tiny", input=messages, text=text)
        tool: Any = [{"type": "function", **FUNCTION}]
        async with client.responses.stream(
            model="tiny", input=messages, tools=tool, tool_choice={"type": "function", "name": "mark"}
        ) as stream:
            streamed = await stream.get_final_response()
        bad: Any = {"format": {**text["format"], "schema": {"not": {}}, "strict": True}}
        with pytest.raises(openai.BadRequestError, match="Unimplemented keys"):
            await client.responses.create(model="tiny", input=messages, text=bad)
    turns = [turn for turn in await rig.view.read(Turn) if turn.session_id == "held"]
    assert called.choices[0].message.tool_calls
    call, item = called.choices[0].message.tool_calls[0], streamed.output[0]
    assert called.choices[0].finish_reason == "tool_calls"
    assert call.type == "function"
    assert item.type == "function_call"
    texts = [written.choices[0].message.content, response.output_text, call.function.arguments, item.arguments]
    for json_text in texts:
        assert set(json.loads(json_text or "")) == {"mood", "sure"}
    assert {turn.turn_id for turn in turns} == {written.id, called.id, response.id, streamed.id}
    assert all(turn.sampling.grammar and not turn.sampling.untruncated for turn in turns)
    assert all(turn.token_grammar and turn.recomputable for turn in turns)


INPUT_SCHEMA = {
    "type": "object",
    "properties": {"query": {"enum": ["mail", "notes"]}},
    "required": ["query"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "search", "description": "Search.", "input_schema": INPUT_SCHEMA}]
STEPS = 5


async def messages_loop(base_url: str) -> None:
    """Run a streamed tool loop whose first and third answers are calls. Streams are cut on their way and resumed."""
    messages: list[Any] = [{"role": "user", "content": "Any mail?"}]
    headers = {"x-claude-code-session-id": "claude"}
    async with anthropic.AsyncAnthropic(
        base_url=base_url, api_key="none", max_retries=0, default_headers=headers
    ) as client:
        for step in range(STEPS):
            choice: Any = {"type": "tool", "name": "search"} if step in (0, 2) else {"type": "auto"}
            # A long answer of random weights may hold text that no rendering repeats, so none follows the long one.
            limit = 1_000_000 if step == STEPS - 1 else 40
            async with client.messages.stream(
                model="tiny", max_tokens=limit, system="Be brief.", messages=messages, tools=TOOLS, tool_choice=choice
            ) as stream:
                message = await stream.get_final_message()
            messages.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
            calls = [block.id for block in message.content if block.type == "tool_use"]
            assert calls or step not in (0, 2)
            results = [{"type": "tool_result", "tool_use_id": name, "content": "1"} for name in calls]
            messages.append({"role": "user", "content": results or "Go on."})


async def responses_loop(base_url: str) -> None:
    """Run a conversation that refers to its earlier turns by the previous response."""
    previous: Any = openai.omit
    headers = {"session-id": "codex"}
    async with openai.AsyncOpenAI(
        base_url=f"{base_url}/v1", api_key="none", max_retries=0, default_headers=headers
    ) as client:
        for step in range(STEPS):
            async with client.responses.stream(
                model="tiny", input=f"Step {step}.", previous_response_id=previous, max_output_tokens=30
            ) as stream:
                last: Any = [event async for event in stream][-1]  # an answer that is cut ends with response.incomplete
            previous = last.response.id


async def test_a_conversation_is_one_branch_of_exact_tokens(rig: GatewayRig) -> None:
    await messages_loop(rig.gateway.url)
    await responses_loop(rig.gateway.url)
    turns = await rig.view.read(Turn)
    for session in ("claude", "codex"):
        session_turns = [turn for turn in turns if turn.session_id == session]
        assert len(session_turns) == STEPS
        (branch,), (dialogue,) = build_branches(session_turns)
        assert [span.turn_id for span in branch.spans] == [turn.turn_id for turn in session_turns]
        assert sum(span.restricted for span in branch.spans) == (2 if session == "claude" else 0), "forced calls"
        assert [message.role for message in dialogue.messages].count("assistant") == STEPS
