"""Tests of outages: processes are killed, and no turn is lost or failed (P1, P8).

A call that is larger than the topic's limit is captured like any other.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import httpx2
import openai
import pytest

from headrace_runtime.kafka import topics
from headrace_schemas import Turn
from tests.integration.conftest import Circle, circle
from tests.support.fake_replica import LENGTH, FakeReplica
from tests.support.packages import ROOT
from tests.support.processes import free_port, wait_open
from tests.support.servers import BrokerProcess
from tests.support.service_process import wait_healthy

AGENTS = 4


class Agents:
    """Agents that make calls until `stop`, session by session. The comparison uses their answers as its ledger."""

    def __init__(self, running_circle: Circle) -> None:
        self._circle = running_circle
        self._stop = False
        self.feedback_of: dict[str, list[str]] = defaultdict(list)
        """Response ids whose end a client received, by session, in order."""
        self.failures: list[str] = []
        self.slowest_s = 0.0

    async def run(self, name: str) -> None:
        async with httpx2.AsyncClient(base_url=self._circle.gateway.url, timeout=30) as client:
            number = 0
            while not self._stop:
                number += 1
                body = {
                    "model": self._circle.model,
                    "messages": [{"role": "user", "content": f"{name} {number}"}],
                    "stream": number % 2 == 0,
                }
                started = time.monotonic()
                answer = await client.post("/v1/chat/completions", json=body, headers={"X-Session-Id": name})
                self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                if answer.status_code == 200 and (answer.text.endswith("[DONE]\n\n") or number % 2):
                    self.feedback_of[name].append(answer.headers["x-request-id"])
                else:
                    self.failures.append(answer.text)

    async def during(self, *steps: tuple[float, object]) -> None:
        """Run all agents. For each `(seconds, function)`, wait and then call the function in a thread."""
        running = [asyncio.create_task(self.run(f"{self._circle.model}-{number}")) for number in range(AGENTS)]
        for pause_s, step in steps:
            await asyncio.sleep(pause_s)
            if callable(step):
                await asyncio.to_thread(step)
        self._stop = True
        await asyncio.gather(*running)


def first_appearances(turns: list[Turn]) -> dict[str, list[str]]:
    by_session: dict[str, list[str]] = defaultdict(list)
    for turn in turns:
        if turn.turn_id not in by_session[turn.session_id]:
            by_session[turn.session_id].append(turn.turn_id)
    return by_session


async def drained(running_circle: Circle, expected: int) -> list[Turn]:
    """Wait until there are `expected` different turns on the bus, and return all turns."""
    async with asyncio.timeout(20):
        while True:
            turns = await running_circle.turns()
            if len({turn.turn_id for turn in turns}) >= expected:
                return turns
            await asyncio.sleep(0.1)


@pytest.mark.long
async def test_the_bus_dies_under_load_and_comes_back(tmp_path: Path, mortal_bus: BrokerProcess) -> None:
    async with circle(tmp_path, mortal_bus.address, FakeReplica()) as running_circle:
        agents = Agents(running_circle)
        await agents.during((0.5, mortal_bus.kill), (4.0, mortal_bus.start), (0.8, None))  # longer than it waits
        assert agents.failures == []
        assert agents.slowest_s < 7
        turns = await drained(running_circle, sum(map(len, agents.feedback_of.values())))
        assert first_appearances(turns) == agents.feedback_of, "nothing lost, each session in its order"
        assert '"event": "spool_drained"' in running_circle.gateway.log, "the outage was long enough to mean something"


@pytest.mark.long
async def test_the_gateway_is_killed_with_a_full_spool_while_the_bus_is_away(
    tmp_path: Path, mortal_bus: BrokerProcess
) -> None:
    async with circle(tmp_path, mortal_bus.address, FakeReplica()) as running_circle:
        agents = Agents(running_circle)
        await agents.during((0.3, mortal_bus.kill), (4.0, None))
        assert agents.failures == []
        await asyncio.to_thread(running_circle.gateway.kill)
        await asyncio.to_thread(mortal_bus.start)
        await asyncio.to_thread(running_circle.gateway.start)
        turns = await drained(running_circle, sum(map(len, agents.feedback_of.values())))
        assert first_appearances(turns) == agents.feedback_of
        await asyncio.to_thread(wait_healthy, running_circle.gateway.url)


@pytest.mark.long
async def test_started_without_a_bus_it_takes_feedback_and_tells_agents_when_to_come_back(
    tmp_path: Path, mortal_bus: BrokerProcess
) -> None:
    async with circle(
        tmp_path, mortal_bus.address, FakeReplica(), GATEWAY__UPSTREAM__ROUTING_WAIT_S=0.2
    ) as running_circle:
        await asyncio.to_thread(running_circle.gateway.stop)
        await asyncio.to_thread(mortal_bus.kill)
        await asyncio.to_thread(running_circle.gateway.start)
        async with httpx2.AsyncClient(base_url=running_circle.gateway.url) as client:
            body = {"model": running_circle.model, "messages": [{"role": "user", "content": "x"}]}
            refused = await client.post("/v1/chat/completions", json=body)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            assert (await client.post("/v1/feedback", json={"session_id": "a", "value": 1})).status_code == 202
            await asyncio.to_thread(mortal_bus.start)
            await asyncio.to_thread(wait_healthy, running_circle.gateway.url)
            assert (await client.post("/v1/chat/completions", json=body)).status_code == 200


def start_replica(name: str, port: int, version: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "tests.support.fake_replica", name, str(port), version, "0.1"]
    process = subprocess.Popen(command, cwd=ROOT)
    wait_open(port, 20)
    return process


@pytest.mark.long
async def test_a_replica_is_killed_in_the_middle_of_its_streams(tmp_path: Path, embedded_bus: str) -> None:
    ports = free_port(), free_port()
    replicas = [FakeReplica(name, url=f"http://127.0.0.1:{port}") for name, port in zip("ab", ports, strict=True)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        async with circle(tmp_path, embedded_bus, *replicas) as running_circle:
            version = replicas[0].versions[0]
            for replica, port in zip(replicas, ports, strict=True):
                processes.append(await asyncio.to_thread(start_replica, replica.replica_id, port, version))
            async with openai.AsyncOpenAI(base_url=running_circle.base_url, api_key="none", max_retries=0) as client:
                begun = asyncio.Barrier(9)
                streams = [
                    asyncio.create_task(_stream(client, running_circle.model, number, begun)) for number in range(8)
                ]
                async with asyncio.timeout(20):
                    await begun.wait()
                processes[0].kill()
                texts = await asyncio.gather(*streams)
                plain = await asyncio.gather(*(_plain(client, running_circle.model, number) for number in range(8)))
            assert texts == plain, "each stream is whole, with no word lost or said twice"
            turns = await drained(running_circle, 16)
            assert all(len(turn.choices[0].token_ids) == LENGTH for turn in turns)
            metrics = (await _get(f"{running_circle.gateway.url}/metrics")).text
            resumes = [line for line in metrics.splitlines() if line.startswith("headrace_gateway_resumes_total")]
            assert float(resumes[0].split()[1]) >= 1, "no stream was on the replica that was killed"
    finally:
        for process in processes:
            process.kill()
            process.wait()


async def _stream(client: openai.AsyncOpenAI, model: str, number: int, begun: asyncio.Barrier) -> str:
    text = ""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"question {number}"}],
        stream=True,
        extra_headers={"X-Session-Id": f"{model}-{number}"},
    )
    async for chunk in stream:
        delta = chunk.choices[0].delta.content or ""
        if delta and not text:
            await begun.wait()
        text += delta
    return text


async def _plain(client: openai.AsyncOpenAI, model: str, number: int) -> str:
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": f"question {number}"}]
    answer = await client.chat.completions.create(model=model, messages=messages)
    return answer.choices[0].message.content or ""


async def _get(url: str) -> httpx2.Response:
    async with httpx2.AsyncClient() as client:
        return await client.get(url)


@pytest.mark.long
async def test_a_gateway_that_starts_while_the_bus_is_away_serves_what_it_knew(
    tmp_path: Path, mortal_bus: BrokerProcess
) -> None:
    async with circle(tmp_path, mortal_bus.address, FakeReplica()) as running_circle:
        agents = Agents(running_circle)
        await agents.during((3.0, None))  # the file follows the topics with a delay
        await asyncio.to_thread(running_circle.gateway.kill)
        await asyncio.to_thread(mortal_bus.kill)
        await asyncio.to_thread(running_circle.gateway.start)
        await agents.during((1.5, mortal_bus.start), (0.8, None))
        assert agents.failures == []
        turns = await drained(running_circle, sum(map(len, agents.feedback_of.values())))
        assert first_appearances(turns) == agents.feedback_of


QUESTION = "a long document " * 60_000


async def test_a_call_of_a_megabyte_and_its_tokens_is_captured_whole(mortal_bus: BrokerProcess, tmp_path: Path) -> None:
    async with circle(tmp_path, mortal_bus.address, FakeReplica()) as running_circle:
        client = openai.AsyncOpenAI(base_url=running_circle.base_url, api_key="none", max_retries=0)
        answer = await client.chat.completions.create(
            model=running_circle.model, messages=[{"role": "user", "content": QUESTION}]
        )
        async with asyncio.timeout(30):
            while True:
                turns = await running_circle.turns()
                if turns:
                    break
                await asyncio.sleep(0.1)
        (turn,) = turns
        assert turn.turn_id == answer.id
        assert [message.content for message in turn.messages] == [QUESTION]
        assert len(turn.to_json()) > topics.catalogue()["turns"].max_message_bytes
        assert list((tmp_path / "data" / "blobs" / "sha256").rglob("[0-9a-f]*")), "by way of the blob store"


async def test_a_killed_gateway_continues_responses_and_conversations(tmp_path: Path, embedded_bus: str) -> None:
    async with circle(tmp_path, embedded_bus, FakeReplica()) as running_circle:
        gateway, model = running_circle.gateway, running_circle.model
        async with openai.AsyncOpenAI(base_url=running_circle.base_url, api_key="-", max_retries=5) as client:
            first = await client.responses.create(model=model, input="Hello.", instructions="Be brief.")
            deleted = await client.responses.create(model=model, input="Forget this.")
            hidden = await client.responses.create(model=model, input="Hush.", store=False)
            conversation = await client.conversations.create()
            one = await client.responses.create(model=model, input="One.", conversation=conversation.id)
            await client.responses.delete(deleted.id)
            await asyncio.to_thread(gateway.kill)
            await asyncio.to_thread(gateway.start)
            await asyncio.to_thread(wait_healthy, gateway.url)
            await client.responses.create(model=model, input="And?", previous_response_id=first.id)
            await client.responses.create(model=model, input="Two.", conversation=conversation.id)
            for missing in (deleted.id, hidden.id):
                with pytest.raises(openai.NotFoundError):
                    await client.responses.retrieve(missing)
        turns = await drained(running_circle, 6)
    histories = [[message.text for message in turn.messages] for turn in turns]
    assert ["Hello.", first.output_text, "And?"] in histories
    assert ["One.", one.output_text, "Two."] in histories
