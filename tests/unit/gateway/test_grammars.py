"""Tests of `response_format`, forced tool calls and custom tools through the gateway.

They cover the request to the replica, the choice of the replica, the recorded turn, and answers that do not match their
grammar. The turn records the grammar and token sets that the replica reports, also for streamed and resumed answers.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace_gateway.access.refusals import ApiError
from headrace_gateway.apis.responses_api.grammars import NotRegularError, pattern_of
from headrace_gateway.apis.responses_api.request import parse_responses
from headrace_gateway.capture.transcript import Transcript
from headrace_gateway.requests.chat_request import parse_chat
from headrace_gateway.requests.engine_wire import EngineAnswer
from headrace_gateway.requests.request_context import RequestContext
from headrace_schemas import Grammar, Sampling, TokenGrammar, Tool
from headrace_schemas.events.turn import STORED_SETS_MAX
from headrace_schemas.http.answer_form import repeated_request
from tests.support.fake_replica import FakeReplica, Fault
from tests.support.gateway import gateway, lenient, strict
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
    """The gateway refuses the request at once instead of waiting for a replica that supports the grammar."""
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
    """A shadow request is rebuilt from the recorded turn alone, and has the same grammar."""
    tools = tuple(Tool.model_validate(tool) for tool in TOOLS)
    prompt = ask([user("q")], sampling=Sampling(grammar=grammar, temperature=0.5), tools=tools)
    again = parse_chat(json.dumps(repeated_request("tiny", prompt, prompt.messages, 64)).encode(), strict())
    assert again.sampling.grammar == grammar
    assert again.sampling.temperature == 0.5


APPLY_PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
update_hunk: "*** Update File: " filename LF change_move? change?

filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

change_move: "*** Move to: " filename LF
change: (change_context | change_line)+ eof_line?
change_context: ("@@" | "@@ " /(.+)/) LF
change_line: ("+" | "-" | " ") /(.*)/ LF
eof_line: "*** End of File" LF

%import common.LF
"""
"""The grammar of Codex CLI's tool `apply_patch`."""
PATCH = "*** Begin Patch\n*** Update File: a.py\n@@ def f\n-x = 1\n+x = 2\n*** Add File: b\n+é\n*** End Patch"


def grammar(definition: str, syntax: str = "lark") -> dict[str, Any]:
    return {"type": "grammar", "syntax": syntax, "definition": definition}


def chat_tools(context: RequestContext, text_format: Any, choice: Any) -> tuple[Tool, ...]:
    tool = {"type": "custom", "name": "patch", "format": text_format}
    body = {"model": "tiny", "input": "q", "tools": [tool], "tool_choice": choice}
    return parse_responses(json.dumps(body).encode(), context).chat.tools or ()


@pytest.mark.parametrize(
    ("definition", "texts", "others"),
    [
        (APPLY_PATCH, [PATCH, PATCH + "\n"], ["", PATCH.replace("@@", "@"), PATCH + "\n\n", PATCH.replace("*", "")]),
        ('start: "a"~2..3 ["x"i] ("c".."e")  // a comment', ["aac", "aaaXd"], ["ac", "aaxxc", "aaf"]),
        ('?start: _item ("," _item)*\n_item.2: /[a-z]/i\n     | INT\n%import common (INT, LF)', ["A,1,b"], ["", "a,"]),
        ('start: "(" [X] ")."\nX: /a\\/b/ -> x', ["().", "(a/b)."], ["(", "()x"]),
        ('start: N "-" N\n%import common.SIGNED_NUMBER -> N', ["1--2.5e3"], ["1-"]),
    ],
)
def test_a_lark_grammar_is_the_pattern_of_its_texts(definition: str, texts: list[str], others: list[str]) -> None:
    pattern = pattern_of(grammar(definition))
    assert pattern is not None
    for text in texts:
        assert re.search(pattern[:-1] + r"\Z", text), text
    for text in others:
        assert not re.search(pattern[:-1] + r"\Z", text), text


@pytest.mark.parametrize(
    "definition",
    [
        'start: "(" start ")" | "x"',
        "start: a\na: b\nb: a",
        "start: missing",
        "other: /x/",
        'start: "a"\n%ignore " "',
        'start: "a"\n%import python.NAME',
        "start: PYTHON\n%import common.PYTHON",
        'start: "a" }',
        'start: ("a"',
        r'start: "\ud800"',
        'start: "a" )',
        "start: /x/q",
        "start: " + "(" * 100 + '"a"' + ")" * 100,
        "start: " + "/x/ " * 2000,
        "\n".join(["start: a0", *(f"a{at}: a{at + 1} a{at + 1}" for at in range(40)), "a40: /x/"]),
        "x" * 20_000,
    ],
)
def test_a_grammar_without_a_pattern_is_described_and_reported(definition: str) -> None:
    with pytest.raises(NotRegularError):
        pattern_of(grammar(definition))
    context = lenient()
    (tool,) = chat_tools(context, grammar(definition), "required")
    assert tool.function.parameters is not None
    assert tool.function.parameters["properties"] == {"input": {"type": "string"}}
    assert definition in (tool.function.description or "")
    assert context.ignored == ("tools.format",)
    with pytest.raises(ApiError, match="the grammar of patch is only described"):
        chat_tools(strict(), grammar(definition), "required")


@pytest.mark.parametrize(
    "text_format", [grammar("start: /[a-c]+/"), grammar("^[a-c]+$", "regex"), grammar("[a-c]+", "regex")]
)
def test_a_forced_call_is_held_to_the_pattern_and_another_is_reported(text_format: Any) -> None:
    forced, free = strict(), lenient()
    (tool,) = chat_tools(forced, text_format, {"type": "custom", "name": "patch"})
    assert tool.function.parameters is not None
    pattern = tool.function.parameters["properties"]["input"]["pattern"]  # type: ignore[index,call-overload]
    assert re.fullmatch(str(pattern), "abc")
    assert not re.fullmatch(str(pattern), "abd")
    assert chat_tools(free, text_format, "auto") == (tool,), "the prompt is the same, so that histories continue"
    assert (forced.ignored, free.ignored) == ((), ("tools.format",))


def test_a_tool_with_free_text_has_no_pattern() -> None:
    assert pattern_of({"type": "text"}) is pattern_of(None) is None
    assert chat_tools(strict(), {"type": "text"}, "auto")


GRAMMAR = {
    "text": 'start: "a"', "library": "llguidance", "library_version": "1.9.1", "tokenizer_sha256": "a" * 64,
    "vocabulary": 320, "end_id": 2, "stop_ids": [2],
}  # fmt: skip


def answer(tokens: list[int] | None = None, *, prompt: list[int] | None = None, **fields: Any) -> EngineAnswer:
    choice: dict[str, Any] = {"index": 0, "delta": {}}
    if tokens:
        choice["token_ids"] = tokens
        choice["logprobs"] = {"content": [{"logprob": -1.0} for _ in tokens]}
        choice["headrace_stored_sets"] = fields.pop("sets", None)
    body = {"model": "m@0123456789ab", "choices": [choice], "prompt_token_ids": prompt, **fields}
    return EngineAnswer.model_validate(body)


def transcript_of(*answers: EngineAnswer) -> Transcript:
    transcript = Transcript()
    for each in answers:
        transcript.add(each, streamed=True)
    return transcript


def test_clients_do_not_get_the_fields() -> None:
    sent = answer([1], prompt=[9], sets=[1, 1], headrace_grammar=GRAMMAR)
    assert "headrace" not in sent.model_dump_json()


def test_sets_of_chunks_are_joined() -> None:
    transcript = transcript_of(answer(prompt=[9]), answer([4], sets=[2, 4, 5]), answer([6, 7], sets=[1, 6, 1, 7]))
    assert transcript.recorded_sets == {0: [2, 4, 5, 1, 6, 1, 7]}


@pytest.mark.parametrize("sets", [None, [STORED_SETS_MAX, *range(STORED_SETS_MAX)]])
def test_sets_that_are_missing_or_too_large_are_not_recorded(sets: list[int] | None) -> None:
    transcript = transcript_of(answer(prompt=[9]), answer([4], sets=[1, 4]), answer([6], sets=sets))
    assert transcript.recorded_sets == {}


def test_a_grammar_is_recorded_if_all_replicas_of_a_call_report_it() -> None:
    begun = (answer(prompt=[9], headrace_grammar=GRAMMAR), answer([4]))
    assert transcript_of(*begun).token_grammar == GRAMMAR
    resumed = answer(prompt=[9], headrace_grammar=GRAMMAR)
    assert transcript_of(*begun, resumed).token_grammar == GRAMMAR
    other = answer(prompt=[9], headrace_grammar={**GRAMMAR, "library_version": "1.7.6"})
    assert transcript_of(*begun, other).token_grammar is None
    assert transcript_of(*begun, answer(prompt=[9])).token_grammar is None
    failed = transcript_of(answer(prompt=[9], headrace_grammar=GRAMMAR))
    failed.forget()
    assert failed.token_grammar is None


@pytest.mark.parametrize(
    ("sampling", "fields", "recomputable"),
    [
        (Sampling(), {}, True),
        (Sampling(grammar=Grammar(tool_choice="required")), {}, False),
        (Sampling(grammar=Grammar(tool_choice="required")), {"token_grammar": TokenGrammar(**GRAMMAR)}, True),
        (Sampling(top_p=0.5), {}, False),
        (Sampling(top_p=0.5), {"sets": True}, True),
        (Sampling(top_k=4, grammar=Grammar(tool_choice="required")), {"token_grammar": TokenGrammar(**GRAMMAR)}, False),
        (Sampling(top_k=4, grammar=Grammar(tool_choice="required")), {"sets": True}, True),
        (Sampling(min_p=0.1), {}, False),
        (Sampling(min_p=0.1), {"sets": True}, True),
        (Sampling(top_p=0.5, temperature=0.0), {"sets": True}, False),
        (Sampling(top_p=0.5, presence_penalty=0.5), {"sets": True}, True),
    ],
)
def test_turns_are_trained_if_their_distribution_can_be_computed(
    sampling: Sampling, fields: dict[str, Any], recomputable: bool
) -> None:
    turn = ask([user("q")], "ab", "c", sampling=sampling)
    if fields.pop("sets", False):
        stored = [
            choice.model_copy(update={"stored_sets": tuple(n for token in choice.token_ids for n in (1, token))})
            for choice in turn.choices
        ]
        fields["choices"] = tuple(stored)
    assert turn.model_copy(update=fields).recomputable is recomputable
