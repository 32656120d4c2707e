"""A call larger than a topic takes is captured like any other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai

from headrace_runtime.kafka import topics
from tests.integration.gateway.conftest import circle
from tests.support.broker_process import BrokerProcess
from tests.support.fake_replica import FakeReplica

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
