"""Grammars of custom tools: their patterns, and the answers that are reported as not held to one."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from headrace_gateway.refusals import ApiError
from headrace_gateway.request_context import RequestContext
from headrace_gateway.responses_api.grammars import NotRegularError, pattern_of
from headrace_gateway.responses_api.request import parse_responses
from headrace_schemas import Tool
from tests.support.requests import lenient, strict

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
