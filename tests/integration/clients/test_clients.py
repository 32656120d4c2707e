"""Tests of agents of other projects, which are unchanged except for the base URL and complete their tool loops."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace_schemas import Turn
from tests.support import presence
from tests.support.fake_replica import Called, FakeReplica, ScriptedAnswer
from tests.support.gateway import Gateway, gateway

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
SEARCH = Called("search", {"query": "the invoice"})
FOUND = "Ada wrote about the invoice"
PROGRAMS = Path(__file__).with_name("programs.py")
_TIMEOUT_S = 240.0
"""Their imports alone take seconds, on a busy machine minutes."""


async def run(program: str, base_url: str, model: str) -> list[dict[str, object]]:
    """Run a function of `programs.py` in the environment of `make install GROUP=clients`; return the JSON that it
    prints. Skip the test without the environment.
    """
    presence.need("clients")
    quiet = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_LOG": "ERROR", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OPENAI_", "HEADRACE_"))}
    process = await asyncio.create_subprocess_exec(
        str(presence.CLIENTS),
        str(PROGRAMS),
        program,
        base_url,
        model,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environ | quiet,
    )
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            output, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()[-4000:]
    results: list[dict[str, object]] = json.loads(output.decode().strip().splitlines()[-1])
    return results


@pytest.fixture
def replica() -> FakeReplica:
    return FakeReplica(grammars=("response_format", "tool_choice"))


@pytest.fixture
async def served(tmp_path: Path, replica: FakeReplica) -> AsyncIterator[Gateway]:
    async with replica.running(), gateway(tmp_path, replica) as served_gateway:
        yield served_gateway


def check_conversation(turns: list[Turn]) -> None:
    """Check that each call is a turn, all turns are of one session, and each turn continues the previous one."""
    assert len({turn.session_key for turn in turns}) == 1
    for before, after in itertools.pairwise(turns):
        assert len(after.messages) > len(before.messages)
    assert FOUND in turns[1].messages[-1].text


@pytest.mark.parametrize("program", ["openai_loop", "litellm_loop", "anthropic_loop"])
async def test_a_tool_loop_plain_and_streamed(served: Gateway, replica: FakeReplica, program: str) -> None:
    replica.script = [SEARCH, Called("search", {"query": "Ada"}), "It was Ada."] * 2
    assert await run(program, f"{served.url}/v1", "tiny") == [{"answer": "It was Ada.", "calls": 3}] * 2
    assert len(served.turns) == 6
    for turns in (served.turns[:3], served.turns[3:]):
        check_conversation(turns)
        assert [message.role for message in turns[-1].messages] == ["user", *(["assistant", "tool"] * 2)]


async def test_smolagents_on_two_clients_plain_and_streamed(served: Gateway, replica: FakeReplica) -> None:
    replica.script = [SEARCH, Called("search", {"query": "Ada"}), Called("final_answer", {"answer": "Ada"})] * 4
    results = await run("smolagents_agent", f"{served.url}/v1", "tiny")
    assert results == [{"answer": "Ada", "calls": 3}] * 4
    assert len(served.turns) == 12
    for at in range(0, 12, 3):
        check_conversation(served.turns[at : at + 3])


async def test_dspy(served: Gateway, replica: FakeReplica) -> None:
    replica.script = [
        _fields(next_thought="I search.", next_tool_name="search", next_tool_args='{"query": "the invoice"}'),
        _fields(next_thought="I know.", next_tool_name="finish", next_tool_args="{}"),
        _fields(reasoning="The mail says so.", answer="Ada"),
    ]
    assert await run("dspy_agent", f"{served.url}/v1", "tiny") == [{"answer": "Ada", "calls": 3}]
    assert len(served.turns) == 3
    assert FOUND in served.turns[1].messages[-1].text


async def test_openai_agents_on_both_apis_plain_and_streamed(served: Gateway, replica: FakeReplica) -> None:
    """The agent uses the Responses API by default. Its typed answer is requested with a grammar."""
    replica.script = [SEARCH, '{"answer": "Ada"}'] * 4
    assert await run("agents_loop", f"{served.url}/v1", "tiny") == [{"answer": "Ada", "calls": 2}] * 4
    assert len(served.turns) == 8
    for at in range(0, 8, 2):
        check_conversation(served.turns[at : at + 2])
        assert served.turns[at + 1].sampling.grammar is not None


async def test_agentscope_forces_a_call_plain_and_streamed(served: Gateway, replica: FakeReplica) -> None:
    replica.script = [Called("generate_structured_output", {"answer": "Ada"})] * 2
    assert await run("agentscope_structured", f"{served.url}/v1", "tiny") == [{"answer": "Ada"}] * 2
    assert [turn.sampling.grammar is not None for turn in served.turns] == [True, True]


def _fields(**values: str) -> ScriptedAnswer:
    """Return an answer in the format that DSPy's chat adapter parses."""
    return "\n\n".join([*(f"[[ ## {name} ## ]]\n{value}" for name, value in values.items()), "[[ ## completed ## ]]"])
