"""The JSON of answers, as a vLLM server writes it (vLLM 0.32, `return_token_ids`)."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from headrace_inference.chat.answer import Delta
from headrace_inference.chat.tokenizer import ChatTokenizer
from headrace_inference.engine import Tokens
from headrace_schemas import Message

Json = dict[str, Any]

_PORTION = 256
"""Tokens whose logprobs are written at a time."""

IMPOSSIBLE = -9999.0
"""How OpenAI and vLLM write the logprob of a token that could not be sampled; JSON has no infinity."""


@dataclass(frozen=True)
class Wire:
    """What all parts of one answer have in common. `model` is the version that was really used (P3)."""

    tokenizer: ChatTokenizer
    model: str
    token_ids: bool
    logprobs: bool
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, prompt_ids: Sequence[int], choices: Sequence[bytes], usage: Json) -> bytes:
        body = self._frame("chat.completion", [])
        del body["choices"]
        body["usage"] = usage
        if self.token_ids:
            body["prompt_token_ids"] = prompt_ids
        return b"".join([to_json(body)[:-1], b',"choices":[', b",".join(choices), b"]}"])

    def choice(self, tokens: Tokens, message: Message, finish: str) -> bytes:
        """One choice of a whole answer. Written in portions: the writer keeps the interpreter's lock."""
        spoken = message.model_dump(mode="json", exclude_none=True)
        spoken.setdefault("content", None)
        body: Json = {"index": tokens.choice, "message": spoken, "finish_reason": finish}
        if self.token_ids:
            body["token_ids"] = tokens.token_ids
        if not self.logprobs:
            return to_json(body | {"logprobs": None})
        ends = range(0, len(tokens.token_ids), _PORTION)
        entries = [to_json(self._logprobs(tokens, begin, begin + _PORTION))[1:-1] for begin in ends]
        return b"".join([to_json(body)[:-1], b',"logprobs":{"content":[', b",".join(entries), b"]}}"])

    def opening(self, choice: int, prompt_ids: Sequence[int], *, first: bool) -> bytes:
        """The chunk that opens a choice; the first of all carries the prompt."""
        delta = {"role": "assistant", "content": ""}
        opened: Json = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._frame("chat.completion.chunk", [opened])
        if first and self.token_ids:
            body["prompt_token_ids"] = prompt_ids
        return _event(body)

    def prompt(self, prompt_ids: Sequence[int]) -> bytes:
        """The chunk that carries the prompt when no choice is opened."""
        body = self._frame("chat.completion.chunk", [])
        if self.token_ids:
            body["prompt_token_ids"] = prompt_ids
        return _event(body)

    def chunk(self, tokens: Tokens, delta: Delta, first_call: int, finish: str | None) -> bytes:
        """New tokens of a choice with what they made readable, which may be nothing yet."""
        spoken: Json = {}
        if delta.reasoning:
            spoken["reasoning_content"] = delta.reasoning
        if delta.content:
            spoken["content"] = delta.content
        if delta.calls:
            calls = enumerate(delta.calls, first_call)
            spoken["tool_calls"] = [{"index": at, **call.model_dump(mode="json")} for at, call in calls]
        choice = {"index": tokens.choice, "delta": spoken, "finish_reason": finish}
        return _event(self._frame("chat.completion.chunk", [self._with_tokens(choice, tokens)]))

    def usage(self, usage: Json) -> bytes:
        return _event({**self._frame("chat.completion.chunk", []), "usage": usage})

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _with_tokens(self, choice: Json, tokens: Tokens) -> Json:
        choice["logprobs"] = {"content": self._logprobs(tokens, 0, len(tokens.token_ids))} if self.logprobs else None
        if self.token_ids:
            choice["token_ids"] = tokens.token_ids
        return choice

    def _logprobs(self, tokens: Tokens, begin: int, end: int) -> list[Json]:
        tops = tokens.top or [[]] * len(tokens.token_ids)
        parts = (tokens.token_ids[begin:end], tokens.logprobs[begin:end], tops[begin:end])
        return [
            {**self._token(token, logprob), "top_logprobs": [self._token(*other) for other in top]}
            for token, logprob, top in zip(*parts, strict=True)
        ]

    def _token(self, token: int, logprob: float) -> Json:
        shown = self.tokenizer.token(token)
        return {"token": shown.text, "logprob": max(logprob, IMPOSSIBLE), "bytes": shown.bytes}


DONE = b"data: [DONE]\n\n"


def error_event(message: str, code: str) -> bytes:
    """The last event of a stream that cannot be finished; no `[DONE]` follows."""
    return _event({"error": {"message": message, "type": "server_error", "code": code, "param": None}})


def usage(prompt: int, completion: int, cached: int) -> Json:
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _event(body: Json) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
