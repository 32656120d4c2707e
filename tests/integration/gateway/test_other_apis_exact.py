"""Conversations over the Messages and the Responses API with the real engine: one session, one branch, exact tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from headrace_collector.branches import build_branches
from headrace_schemas import Turn
from tests.integration.gateway.test_real_engine import rig
from tests.support.broker_process import BrokerProcess

pytestmark = pytest.mark.timeout(300)
SCHEMA = {
    "type": "object",
    "properties": {"query": {"enum": ["mail", "notes"]}},
    "required": ["query"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "search", "description": "Search.", "input_schema": SCHEMA}]
STEPS = 5


async def messages_loop(base_url: str) -> None:
    """Play a streamed tool loop whose first and third answers are calls. Streams are cut on their way and resumed."""
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
    """Play a conversation whose earlier turns are named by the response before."""
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


async def test_a_conversation_is_one_branch_of_exact_tokens(tmp_path: Path, mortal_bus: BrokerProcess) -> None:
    async with rig(tmp_path, mortal_bus.address) as running:
        await messages_loop(running.gateway.url)
        await responses_loop(running.gateway.url)
        turns = await running.view.read(Turn)
    for session in ("claude", "codex"):
        own = [turn for turn in turns if turn.session_id == session]
        assert len(own) == STEPS
        (branch,), (dialogue,) = build_branches(own)
        assert [span.turn_id for span in branch.spans] == [turn.turn_id for turn in own]
        assert sum(span.restricted for span in branch.spans) == (2 if session == "claude" else 0), "forced calls"
        assert [message.role for message in dialogue.messages].count("assistant") == STEPS
