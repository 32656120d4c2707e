"""An answer of `POST /v1/messages` as JSON: content blocks, the reason of the end, and usage."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from headrace_gateway.engine_wire import EngineChoice, EngineUsage

Json = dict[str, Any]
SIGNATURE = "aGVhZHJhY2U="
"""The signature of thinking blocks. The gateway does not check the signature of a block that a client sends back."""
_TAIL_BYTES = 1024
"""Bytes of sampled text that are kept to find the stop sequence that ended an answer."""


class StopFinder:
    """Finds the stop sequence that ended an answer. Engines cut it from the text, but its tokens were sampled."""

    def __init__(self, stop_sequences: Sequence[str]) -> None:
        self._sequences = stop_sequences
        self._tail = b""
        self._last_length = 0

    def add(self, choice: EngineChoice) -> None:
        """Take the sampled tokens of a chunk."""
        if not self._sequences or choice.logprobs is None:
            return
        for entry in (choice.logprobs.content or ())[-_TAIL_BYTES:]:
            exact = entry.get("bytes")
            piece = bytes(exact) if exact is not None else (entry.get("token") or "").encode()
            self._last_length = len(piece)
            self._tail = (self._tail + piece)[-_TAIL_BYTES:]

    def completed_sequence(self) -> str | None:
        """Return the sequence that the last token completed, or None."""
        for sequence in self._sequences:
            encoded = sequence.encode()
            if encoded in self._tail[-(len(encoded) + max(self._last_length - 1, 0)) :]:
                return sequence
        return None


def message(
    message_id: str,
    version: str,
    content: Sequence[Json],
    stop_reason: str | None,
    stop_sequence: str | None,
    usage: Json,
) -> Json:
    """Return a `Message`."""
    return {
        "id": message_id,
        "type": "message",
        "role": "assistant",
        "model": version,
        "content": list(content),
        "stop_reason": stop_reason,
        "stop_sequence": stop_sequence,
        "stop_details": None,
        "usage": usage,
    }


def usage_of(usage: EngineUsage | None, prompt_tokens: int) -> Json:
    """Return the `usage` block. `input_tokens` counts the tokens that were not read from the cache.

    Args:
        usage: The engine's count, or None before the end of the answer.
        prompt_tokens: Tokens of the prompt, for an answer that has not ended.
    """
    cached = ((usage.prompt_tokens_details or {}).get("cached_tokens") or 0) if usage else 0
    cached = cached if isinstance(cached, int) else 0
    return {
        "input_tokens": (usage.prompt_tokens if usage else prompt_tokens) - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.completion_tokens if usage else 0,
    }


def tool_input(arguments: str) -> Json:
    """Return the arguments of a call as an object. Arguments that are no JSON object come under `arguments`, and so do
    numbers beyond float64, such as 1e999, which the answer could not hold."""
    if not arguments.strip():
        return {}
    try:
        value = from_json(arguments, allow_inf_nan=False)
        json.dumps(value, allow_nan=False)
    except ValueError:
        return {"arguments": arguments}
    return value if isinstance(value, dict) else {"arguments": arguments}
