"""Agents that nobody here wrote, unchanged but for the base URL: their tool loops run to their end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_schemas import Turn
from tests.integration.clients.conftest import run
from tests.support.fake_replica import Called, FakeReplica, Said
from tests.support.gateway import Gateway, gateway

pytestmark = pytest.mark.timeout(180)
STREAMS = pytest.mark.parametrize("how", [(), ("stream",)], ids=["plain", "stream"])
SEARCH = Called("search", {"query": "the invoice"})
FOUND = "Ada wrote about the invoice"


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica()


@pytest.fixture
async def served(tmp_path: Path, replica: FakeReplica) -> AsyncIterator[Gateway]:
    async with replica.running(), gateway(tmp_path, replica) as made:
        yield made


def one_conversation(turns: list[Turn], calls: int) -> None:
    """Each call is a turn, all are of one session, and each goes on where the one before ended."""
    assert len(turns) == calls
    assert len({turn.session_key for turn in turns}) == 1
    for before, after in zip(turns, turns[1:], strict=False):
        assert len(after.messages) > len(before.messages)


@STREAMS
@pytest.mark.parametrize("program", ["openai_loop", "litellm_loop"])
async def test_a_tool_loop(served: Gateway, replica: FakeReplica, program: str, how: tuple[str, ...]) -> None:
    replica.script = [SEARCH, Called("search", {"query": "Ada"}), "It was Ada."]
    assert await run(program, f"{served.url}/v1", "tiny", *how) == {"answer": "It was Ada.", "calls": 3}
    one_conversation(served.turns, 3)
    assert [message.role for message in served.turns[-1].messages] == ["user", *(["assistant", "tool"] * 2)]
    assert served.turns[1].messages[-1].text == FOUND


@STREAMS
@pytest.mark.parametrize("on", ["openai", "litellm"])
async def test_smolagents(served: Gateway, replica: FakeReplica, on: str, how: tuple[str, ...]) -> None:
    replica.script = [SEARCH, Called("search", {"query": "Ada"}), Called("final_answer", {"answer": "Ada"})]
    said = await run("smolagents_agent", f"{served.url}/v1", "tiny", on, *how)
    assert said == {"answer": "Ada", "calls": 3}
    one_conversation(served.turns, 3)
    assert FOUND in served.turns[1].messages[-1].text


async def test_dspy(served: Gateway, replica: FakeReplica) -> None:
    replica.script = [
        _fields(next_thought="I search.", next_tool_name="search", next_tool_args='{"query": "the invoice"}'),
        _fields(next_thought="I know.", next_tool_name="finish", next_tool_args="{}"),
        _fields(reasoning="The mail says so.", answer="Ada"),
    ]
    said = await run("dspy_agent", f"{served.url}/v1", "tiny")
    assert said == {"answer": "Ada", "calls": 3}
    assert len(served.turns) == 3
    assert FOUND in served.turns[1].messages[-1].text


def _fields(**values: str) -> Said:
    """An answer as DSPy's chat adapter reads it."""
    return "\n\n".join([*(f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()), "[[ ## completed ## ]]"])
