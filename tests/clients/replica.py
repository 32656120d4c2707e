"""A replica whose model plays any tool loop: two calls, then an answer that repeats the word of the question.

Prompts are rendered by a chat template, one token for each word, so that an answer that a client sends back unchanged
is an exact token prefix of the next prompt. As in vLLM, the template gets the arguments of a call as an object, so that
other spaces in their JSON make no difference.
"""

from __future__ import annotations

import itertools
import json
import re
import uuid
import zlib
from dataclasses import dataclass, field
from typing import Any

from tests.support.chat_templates import render
from tests.support.fake_replica import Called, FakeReplica, Fault, Generation

CALLS = 2
_WORD = re.compile(r"WORD-\w+")
_TOOLS = ("search", "mail-search", "Read", "exec_command", "shell", "read", "read_file", "bash", "run_shell_command")
"""Tools that the model calls, the first one that is on offer."""
_TEMPLATE = "qwen2"
_ASSISTANT, _END = "<|im_start|>assistant\n", "<|im_end|>"
_TOKEN = re.compile(r"<\|im_start\|>\w+\n|<\|im_end\|>|\s+(?=<\|im_)|\s*[^\s<]+|\s*<|\s+")
Json = dict[str, Any]


@dataclass
class AgentReplica(FakeReplica):
    """Serves an agent of any framework without a script of its own. `file` is the file that coding agents read."""

    grammars: tuple[str, ...] = ("response_format", "tool_choice")
    file: str = "note.txt"

    def _work(self, body: Json, fault: Fault) -> Generation:
        return AgentGeneration(body, body["model"], (), answer_to(body, self.file))


@dataclass
class AgentGeneration(Generation):
    """One answer with its text in the form of the chat template."""

    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def prompt_ids(self) -> list[int]:
        messages = [_with_parsed_arguments(message) for message in self.body["messages"]]
        prompt = json.dumps(self.body.get("tools")) + render(_TEMPLATE, messages)
        return [_token_id(piece) for piece in _TOKEN.findall(prompt)]

    @property
    def limit(self) -> int:
        return len(self.tokens(0))

    def tokens(self, index: int) -> list[int]:
        return [_token_id(piece) for piece in self._pieces_of(index)]

    def _pieces_of(self, index: int) -> list[str]:
        message: Json = {"content": self.scripted_answer}
        if isinstance(self.scripted_answer, Called):
            message = {"content": "", "tool_calls": [self.tool_call(index)]}
        messages = [{"role": "assistant", **message}]
        rendered = render(_TEMPLATE, messages, add_generation_prompt=False)
        return _TOKEN.findall(rendered.removeprefix(_ASSISTANT).removesuffix("\n"))

    def text(self, at: int, token: int) -> str:
        return self._pieces_of(0)[at].removesuffix(_END)

    def tool_call(self, index: int) -> Json:
        assert isinstance(self.scripted_answer, Called)
        function = {"name": self.scripted_answer.name, "arguments": json.dumps(self.scripted_answer.arguments)}
        return {"id": f"{self.call_id}{index}", "type": "function", "function": function}


def _with_parsed_arguments(message: Json) -> Json:
    if not message.get("tool_calls"):
        return message
    parsed = json.loads(json.dumps(message))
    for call in parsed["tool_calls"]:
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]))
    return dict(parsed)


def _token_id(piece: str) -> int:
    return zlib.crc32(piece.encode()) & 0x7FFFFFFF


def answer_to(body: Json, file: str) -> str | Called:
    """Return the answer of the model to a request, from its tools and its conversation alone."""
    texts = [_text(message) for message in body["messages"]]
    words = _WORD.findall("\n".join(texts))
    final = f"The word is {words[0] if words else 'unknown'}."
    tools: dict[str, Json] = {tool["function"]["name"]: tool["function"] for tool in body.get("tools") or ()}
    name = next((name for name in _TOOLS if name in tools), None)
    forced = body.get("tool_choice")
    if isinstance(forced, dict):
        name = forced["function"]["name"]
        return Called(name, _arguments(tools[name], file, final))
    if "response_format" in body:
        return json.dumps(_filled(body["response_format"].get("json_schema", {}).get("schema", {}), final))
    result_count = _results_since_the_question(body["messages"])
    if "[[ ## next_tool_name ## ]]" in texts[0]:
        return _dspy_step(texts[-1])
    if "[[ ## answer ## ]]" in texts[0]:
        return f"[[ ## reasoning ## ]]\nI read it.\n\n[[ ## answer ## ]]\n{final}\n\n[[ ## completed ## ]]"
    if "</code>" in texts[0]:
        code = 'print(search("the invoice"))' if result_count < CALLS else f"final_answer({final!r})"
        return f"I act.\n<code>\n{code}\n"
    if name is not None and result_count < CALLS:
        return Called(name, _arguments(tools[name], file, final))
    if "final_answer" in tools:
        return Called("final_answer", {"answer": final})
    forced_tool = next(iter(tools), "") if forced == "required" else ""
    return Called(forced_tool, _arguments(tools[forced_tool], file, final)) if forced_tool else final


def _results_since_the_question(messages: list[Json]) -> int:
    """Count the results of tools after the last message of the user; results may be a user's messages themselves."""
    results = 0
    for message in reversed(messages):
        is_result = message["role"] == "tool" or "Observation:" in _text(message)
        if message["role"] == "user" and not is_result:
            break
        results += is_result
    return results


def _dspy_step(text: str) -> str:
    step = text.count("[[ ## observation_") or len(set(re.findall(r"observation_(\d+)", text)))
    name, arguments = ("search", '{"query": "the invoice"}') if step < CALLS else ("finish", "{}")
    fields = {"next_thought": "I go on.", "next_tool_name": name, "next_tool_args": arguments}
    return "\n\n".join(
        itertools.chain((f"[[ ## {key} ## ]]\n{value}" for key, value in fields.items()), ["[[ ## completed ## ]]"])
    )


def _arguments(tool: Json, file: str, final: str) -> Json:
    return {} if not tool.get("parameters") else _filled(tool["parameters"], final, file)


def _filled(schema: Json, final: str, file: str = "note.txt") -> Any:
    """Return a value of a JSON Schema, with required properties only."""
    properties = schema.get("properties", {})
    values: Json = {}
    for name in schema.get("required", list(properties)):
        kind = properties.get(name, {}).get("type", "string")
        if name in ("file_path", "filePath", "path", "absolute_path"):
            values[name] = file
        elif name in ("cmd", "command"):
            values[name] = ["cat", file] if kind == "array" else f"cat {file}"
        elif kind == "string":
            values[name] = "the invoice" if name == "query" else final
        else:
            values[name] = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}.get(
                str(kind), final
            )
    return values


def _text(message: Json) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
