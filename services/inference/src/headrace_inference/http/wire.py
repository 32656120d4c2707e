"""JSON of responses in the format of a vLLM server (vLLM 0.32, `return_token_ids`)."""

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
from headrace_schemas.http.replica_api import PROMPT_TEXT_FIELD

Json = dict[str, Any]

_PORTION = 256
"""Tokens whose logprobs are serialized in one call."""

IMPOSSIBLE = -9999.0
"""Logprob that OpenAI and vLLM report for a token that could not be sampled. JSON has no infinity."""


@dataclass(frozen=True)
class ResponseFormatter:
    """Formatter of one response.

    `model` is the version that the engine used, which may differ from the requested alias.
    """

    tokenizer: ChatTokenizer
    model: str
    token_ids: bool
    logprobs: bool
    grammar: Json | None = None
    """The grammar that the answers are sampled with (`headrace_schemas.TokenGrammar`)."""
    prompt_text: str | None = None
    """The text of a prompt that came as token ids."""
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def completion(self, prompt_ids: Sequence[int], choices: Sequence[bytes], usage: Json) -> bytes:
        """Return a response that is not streamed. `choices` are already JSON."""
        body = self._frame("chat.completion", [])
        del body["choices"]
        body["usage"] = usage
        body |= self._about_prompt(prompt_ids)
        return b"".join([to_json(body)[:-1], b',"choices":[', b",".join(choices), b"]}"])

    def choice(self, tokens: Tokens, message: Message, finish: str) -> bytes:
        """Return one choice of a response that is not streamed.

        Logprobs are serialized in portions, because the serializer keeps the interpreter's lock.
        """
        fields = message.model_dump(mode="json", exclude_none=True)
        fields.setdefault("content", None)
        body: Json = {"index": tokens.choice, "message": fields, "finish_reason": finish}
        body |= self._token_fields(tokens)
        if not self.logprobs:
            return to_json(body | {"logprobs": None})
        ends = range(0, len(tokens.token_ids), _PORTION)
        entries = [to_json(self._logprobs(tokens, begin, begin + _PORTION))[1:-1] for begin in ends]
        return b"".join([to_json(body)[:-1], b',"logprobs":{"content":[', b",".join(entries), b"]}}"])

    def opening(self, choice: int, prompt_ids: Sequence[int], *, first: bool) -> bytes:
        """Return the chunk that opens a choice. The first one of a stream contains the prompt's token ids."""
        delta = {"role": "assistant", "content": ""}
        opened: Json = {"index": choice, "delta": delta, "logprobs": None, "finish_reason": None}
        body = self._frame("chat.completion.chunk", [opened])
        return _event(body | self._about_prompt(prompt_ids) if first else body)

    def prompt(self, prompt_ids: Sequence[int]) -> bytes:
        """Return the chunk with the prompt's token ids for a stream that opens no choice."""
        return _event(self._frame("chat.completion.chunk", []) | self._about_prompt(prompt_ids))

    def chunk(self, tokens: Tokens, delta: Delta, first_call: int, finish: str | None) -> bytes:
        """Return a chunk with new tokens of a choice and the text that they complete, which may be empty."""
        fields: Json = {}
        if delta.reasoning:
            fields["reasoning_content"] = delta.reasoning
        if delta.content:
            fields["content"] = delta.content
        if delta.calls:
            calls = enumerate(delta.calls, first_call)
            fields["tool_calls"] = [{"index": index, **call.model_dump(mode="json")} for index, call in calls]
        choice = {"index": tokens.choice, "delta": fields, "finish_reason": finish}
        return _event(self._frame("chat.completion.chunk", [self._with_tokens(choice, tokens)]))

    def usage(self, usage: Json) -> bytes:
        """Return the chunk with the usage block."""
        return _event({**self._frame("chat.completion.chunk", []), "usage": usage})

    def _frame(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def _about_prompt(self, prompt_ids: Sequence[int]) -> Json:
        if not self.token_ids:
            return {}
        grammar = {} if self.grammar is None else {"headrace_grammar": self.grammar}
        text = {} if self.prompt_text is None else {PROMPT_TEXT_FIELD: self.prompt_text}
        return {"prompt_token_ids": prompt_ids, **grammar, **text}

    def _with_tokens(self, choice: Json, tokens: Tokens) -> Json:
        choice["logprobs"] = {"content": self._logprobs(tokens, 0, len(tokens.token_ids))} if self.logprobs else None
        return choice | self._token_fields(tokens)

    def _token_fields(self, tokens: Tokens) -> Json:
        if not self.token_ids:
            return {}
        sets = {} if tokens.sets is None else {"headrace_stored_sets": tokens.sets}
        return {"token_ids": tokens.token_ids, **sets}

    def _logprobs(self, tokens: Tokens, begin: int, end: int) -> list[Json]:
        tops = tokens.top or [[]] * len(tokens.token_ids)
        parts = (tokens.token_ids[begin:end], tokens.logprobs[begin:end], tops[begin:end])
        return [
            {**self._token(token, logprob), "top_logprobs": [self._token(*other) for other in top]}
            for token, logprob, top in zip(*parts, strict=True)
        ]

    def _token(self, token: int, logprob: float) -> Json:
        token_text = self.tokenizer.token(token)
        return {"token": token_text.text, "logprob": max(logprob, IMPOSSIBLE), "bytes": token_text.bytes}


DONE = b"data: [DONE]\n\n"


def error_event(message: str, code: str) -> bytes:
    """Return the last event of a stream that failed. No `[DONE]` follows it."""
    return _event({"error": {"message": message, "type": "server_error", "code": code, "param": None}})


def usage(prompt: int, completion: int, cached: int) -> Json:
    """Return the usage block for these numbers of tokens."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def _event(body: Json) -> bytes:
    return b"data: " + to_json(body) + b"\n\n"
