"""Random conversations of an agent, and the requests in which a client of each API sends the same conversation."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
PARAMETERS: Json = {"type": "object", "properties": {"query": {"type": "string"}}}
STOP = "STOP"
TOOLS = ("search", "read")
_TEXTS = ("Hello.", "naïve \u2028 café", "line\nline", '{"a": 1}', "x" * 300, "🙂 more")
_CHOICES = (None, "auto", "required", "none", "search")
"""Values of `tool_choice`: none, the three modes, or the name of a tool."""


@dataclass(frozen=True)
class DrawnCall:
    """A tool call of an earlier answer, and the tool's result."""

    call_id: str
    name: str
    arguments: Json
    result: str


@dataclass(frozen=True)
class DrawnStep:
    """An earlier answer: its reasoning, text and tool calls, and the user's next message."""

    thinking: str
    text: str
    calls: tuple[DrawnCall, ...]
    remark: str


@dataclass(frozen=True)
class DrawnConversation:
    """Content of one request."""

    system: str
    question: str
    steps: tuple[DrawnStep, ...]
    has_tools: bool
    tool_choice: str | None
    is_parallel: bool
    stops: bool
    max_tokens: int
    in_parts: bool
    """Whether texts are sent as lists of parts."""

    @classmethod
    def draw(cls, draw: random.Random) -> DrawnConversation:
        steps = tuple(_step(draw, number) for number in range(draw.randint(0, 3)))
        has_tools = draw.random() < 0.8 or any(step.calls for step in steps)
        return cls(
            system=draw.choice(("", "You search.")),
            question=draw.choice(_TEXTS),
            steps=steps,
            has_tools=has_tools,
            tool_choice=draw.choice(_CHOICES) if has_tools else None,
            is_parallel=draw.random() < 0.7,
            stops=draw.random() < 0.5,
            max_tokens=draw.choice((5, 500)),
            in_parts=draw.random() < 0.5,
        )

    def body(self, api: str) -> Json:
        """Return the body of the request in the format of `api`, without `model` and `stream`."""
        fields = {"chat": self._chat, "messages": self._messages, "responses": self._responses}[api]()
        return {name: value for name, value in fields.items() if value not in (None, "", [])}

    def _chat(self) -> Json:
        messages: list[Json] = [{"role": "system", "content": self._content(self.system)}] if self.system else []
        messages.append({"role": "user", "content": self._content(self.question)})
        for step in self.steps:
            answer: Json = {"role": "assistant", "content": step.text or None}
            if step.thinking:
                answer["reasoning_content"] = step.thinking
            if step.calls:
                answer["tool_calls"] = [
                    {"id": call.call_id, "type": "function", "function": _function(call)} for call in step.calls
                ]
            results = [
                {"role": "tool", "tool_call_id": call.call_id, "content": self._content(call.result)}
                for call in step.calls
            ]
            remark = [{"role": "user", "content": self._content(step.remark)}] if step.remark else []
            messages += [answer, *results, *remark]
        choice: Any = self.tool_choice
        named = {"type": "function", "function": {"name": choice}} if choice in TOOLS else choice
        return {
            "messages": messages,
            "tools": [{"type": "function", "function": function} for function in self._functions()],
            "tool_choice": named,
            "parallel_tool_calls": self._parallel(),
            "stop": [STOP] if self.stops else None,
            "max_completion_tokens": self.max_tokens,
        }

    def _responses(self) -> Json:
        items: list[Json] = [{"role": "user", "content": self._content(self.question, "input_text")}]
        for number, step in enumerate(self.steps):
            part: Json
            if step.thinking:
                part = {"type": "reasoning_text", "text": step.thinking}
                items.append({"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": [part]})
            if step.text:
                part = {"type": "output_text", "text": step.text, "annotations": []}
                items.append({"type": "message", "role": "assistant", "status": "completed", "content": [part]})
            items += [{"type": "function_call", "call_id": call.call_id, **_function(call)} for call in step.calls]
            items += [
                {
                    "type": "function_call_output",
                    "call_id": call.call_id,
                    "output": self._content(call.result, "input_text"),
                }
                for call in step.calls
            ]
            if step.remark:
                items.append({"role": "user", "content": self._content(step.remark, "input_text")})
        choice: Any = self.tool_choice
        return {
            "instructions": self.system,
            "input": items,
            "tools": [{"type": "function", **function} for function in self._functions()],
            "tool_choice": {"type": "function", "name": choice} if choice in TOOLS else choice,
            "parallel_tool_calls": self._parallel(),
            "max_output_tokens": self.max_tokens,
            "include": ["reasoning.encrypted_content"],
        }

    def _messages(self) -> Json:
        cached = {"cache_control": {"type": "ephemeral"}} if self.in_parts else {}
        messages: list[Json] = [{"role": "user", "content": self._content(self.question)}]
        for step in self.steps:
            blocks: list[Json] = []
            if step.thinking:
                blocks.append({"type": "thinking", "thinking": step.thinking, "signature": "c2lnbmVk"})
            if step.text:
                blocks.append({"type": "text", "text": step.text})
            blocks += [
                {"type": "tool_use", "id": call.call_id, "name": call.name, "input": call.arguments}
                for call in step.calls
            ]
            results: list[Json] = [
                {"type": "tool_result", "tool_use_id": call.call_id, "content": self._content(call.result)}
                for call in step.calls
            ]
            remark = [{"type": "text", "text": step.remark, **cached}] if step.remark else []
            messages += [{"role": "assistant", "content": blocks}, {"role": "user", "content": [*results, *remark]}]
        system: Any = [{"type": "text", "text": self.system, **cached}] if self.in_parts else self.system
        tools = [
            {"name": function["name"], "input_schema": function["parameters"], **cached}
            for function in self._functions()
        ]
        choice: Json | None = None
        if self.has_tools and (self.tool_choice is not None or not self.is_parallel):
            kind = "any" if self.tool_choice == "required" else self.tool_choice or "auto"
            choice = {"type": "tool", "name": kind} if kind in TOOLS else {"type": kind}
            if not self.is_parallel and kind != "none":
                choice["disable_parallel_tool_use"] = True
        return {
            "system": system if self.system else None,
            "messages": messages,
            "tools": tools,
            "tool_choice": choice,
            "stop_sequences": [STOP] if self.stops else None,
            "max_tokens": self.max_tokens,
        }

    def _functions(self) -> list[Json]:
        return [{"name": name, "parameters": PARAMETERS} for name in TOOLS] if self.has_tools else []

    def _parallel(self) -> bool | None:
        return False if self.has_tools and not self.is_parallel else None

    def _content(self, text: str, kind: str = "text") -> Any:
        return [{"type": kind, "text": text}] if self.in_parts else text


def _step(draw: random.Random, number: int) -> DrawnStep:
    calls = tuple(
        DrawnCall(f"call_{number}_{at}", draw.choice(TOOLS), {"query": draw.choice(_TEXTS)}, draw.choice(_TEXTS))
        for at in range(draw.choice((0, 1, 1, 3)))
    )
    return DrawnStep(
        thinking=draw.choice(("", "I think.")),
        text=draw.choice(("", *_TEXTS)) if calls else draw.choice(_TEXTS),
        calls=calls,
        remark="" if calls and draw.random() < 0.7 else draw.choice(_TEXTS),
    )


def _function(call: DrawnCall) -> Json:
    return {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)}
