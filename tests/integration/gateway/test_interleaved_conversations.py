"""Test of 64 interleaved conversations with one API key and equal openings, answers and tool results: no run is
mixed up."""

from __future__ import annotations

import asyncio
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from tests.clients.replica import AgentReplica, trajectories_of
from tests.support.gateway import Gateway, gateway
from tests.support.seeds import draw_seed

CONVERSATIONS = 64
PAUSE_S = 0.2
"""Most seconds between the calls of a conversation, which mix the conversations."""
PARAMETERS = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
SEARCH = {"type": "function", "function": {"name": "search", "parameters": PARAMETERS}}


async def converse(served: Gateway, headers: dict[str, str], draw: random.Random) -> list[str]:
    """Run a tool loop, and return the ids of its responses."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Which word? It belongs to WORD-1."}]
    response_ids = []
    while True:
        await asyncio.sleep(PAUSE_S * draw.random())
        body = {"model": "tiny", "messages": messages, "tools": [SEARCH]}
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
