"""`response_format` and forced calls through the gateway: the request to the replica, the choice of the replica, and
the recorded turn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.chat_request import parse_chat
from headrace_registry.shadow.gateway_client import request_body
from headrace_schemas import Grammar, Sampling, Tool
from tests.support.fake_replica import FakeReplica, Fault
from tests.support.gateway import gateway
from tests.support.requests import strict
from tests.support.turns import ask, user

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}
TOOLS = [{"type": "function", "function": {"name": "search", "parameters": {"type": "object"}}}]
NAMED = {"type": "function", "function": {"name": "search"}}
ALL = ("response_format", "tool_choice")
ASKED: list[tuple[dict[str, Any], dict[str, Any], Grammar]] = [
    (
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object"}},
        Grammar(response_format={"type": "json_object"}),
    ),
    ({"response_format": FORMAT}, {"response_format": FORMAT}, Grammar(response_format=FORMAT)),
    (
        {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False},
        {"tool_choice": "required", "parallel_tool_calls": False},
        Grammar(tool_choice="required"),
    ),
    (
        {"tools": TOOLS, "tool_choice": NAMED, "response_format": {"type": "text"}},
        {"tool_choice": NAMED},
        Grammar(tool_choice="function", function="search"),
    ),
]


@pytest.mark.parametrize(("asked", "wanted", "grammar"), ASKED)
async def test_it_reaches_the_replica_and_the_event(
    tmp_path: Path, asked: dict[str, Any], wanted: dict[str, Any], grammar: Grammar
) -> None:
    replica = FakeReplica(grammars=ALL)
    async with replica.running(), gateway(tmp_path, replica) as served:
        assert (await served.chat(**asked)).status_code == 200
        assert (await served.chat()).status_code == 200
        assert {name: replica.requests[0].get(name) for name in wanted} == wanted
        assert not {"response_format", "parallel_tool_calls", "grammar"} & replica.requests[1].keys()
        held_turn, free_turn = served.turns
    assert held_turn.sampling.grammar == grammar
    assert not held_turn.sampling.untruncated
    assert free_turn.sampling.grammar is None
    assert held_turn.request_digest != free_turn.request_digest


@pytest.mark.parametrize(("grammars", "field"), [((), "response_format"), (("tool_choice",), "response_format")])
async def test_without_a_replica_that_can_it_is_refused_by_name(
    tmp_path: Path, grammars: tuple[str, ...], field: str
) -> None:
    """At once, whichever engine it is: no client waits for an answer that never comes."""
    replica = FakeReplica(engine="vllm", grammars=grammars)
    async with replica.running(), gateway(tmp_path, replica) as served:
        refused = await served.chat(response_format={"type": "json_object"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == field
        assert "grammars" in refused.json()["error"]["message"]
        assert replica.requests == []


async def test_replicas_that_can_get_the_calls_and_go_on_with_broken_streams(tmp_path: Path) -> None:
    plain = FakeReplica("plain")
    first, second = (FakeReplica(name, grammars=ALL, faults=[Fault(drop_after=2)]) for name in ("one", "two"))
    second.faults = []
    async with plain.running(), first.running(), second.running(), gateway(tmp_path, plain, first, second) as served:
        for number in range(6):
            await served.chat(f"question {number}", response_format={"type": "json_object"}, stream=True)
        resumed = [body for replica in (first, second) for body in replica.requests if "headrace_resume" in body]
        assert plain.requests == []
        assert all(body["response_format"] == {"type": "json_object"} for body in resumed)
        assert len(resumed) == 1
        assert len(served.turns) == 6


@pytest.mark.parametrize("grammar", [grammar for *_, grammar in ASKED])
def test_a_shadow_asks_for_the_same_form(grammar: Grammar) -> None:
    """The recorded turn is enough to repeat the request, and the gateway accepts it."""
    tools = tuple(Tool.model_validate(tool) for tool in TOOLS)
    prompt = ask([user("q")], sampling=Sampling(grammar=grammar, temperature=0.5), tools=tools)
    again = parse_chat(json.dumps(request_body("tiny", prompt, prompt.messages, 64)).encode(), strict())
    assert again.sampling.grammar == grammar
    assert again.sampling.temperature == 0.5
