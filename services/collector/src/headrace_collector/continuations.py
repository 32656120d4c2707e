"""Shows that a turn continues another one where digests of their conversations cannot.

Several conversations may be equal, and clients send some answers back in another form: with the stop string that the
engine cut, without spaces at the ends or without the reasoning, or with a tool call written as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace_schemas import Message, Turn
from headrace_schemas.rules.turn_history import token_bytes


@dataclass(frozen=True, slots=True)
class TurnContent:
    """The tokens and messages of a turn."""

    prompt: bytes
    """Token ids as int32, so that a prefix of a sequence is a prefix of its bytes."""
    sequences: tuple[bytes, ...]
    """For each choice, prompt and sampled ids."""
    messages: tuple[Message, ...]
    answers: tuple[Message, ...]
    """The message of each choice."""

    @classmethod
    def of(cls, turn: Turn) -> TurnContent:
        prompt = token_bytes(turn.prompt_token_ids)
        sequences = tuple(prompt + token_bytes(choice.token_ids) for choice in turn.choices)
        return cls(prompt, sequences, turn.messages, tuple(choice.message for choice in turn.choices))

    def shared_bytes(self, parent: TurnContent, choice: int) -> int:
        """Return the bytes of exact history that the turns share: all of the parent's history or 0."""
        history = parent.sequences[choice]
        return len(history) if self.prompt.startswith(history) else 0

    def shared_calls(self, parent: TurnContent, choice: int) -> int:
        """Return the number of tool calls of the parent and its answer that the conversation has, by their unique
        ids."""
        answers = [message for message in self.messages if message.role == "assistant"]
        ids = {call.id for message in (*parent.messages, parent.answers[choice]) for call in message.tool_calls or ()}
        return sum(any(_has_call(message, [call_id]) for message in answers) for call_id in ids)

    def rewrites(self, parent: TurnContent, choice: int, position: int) -> bool:
        """Return whether the message at `position` is the parent's answer in another form.

        The messages before must be the parent's request.
        """
        echo, answer = self.messages[position], parent.answers[choice]
        if echo.role != "assistant":
            return False
        if self.shared_bytes(parent, choice) or _has_call(echo, [call.id for call in answer.tool_calls or ()]):
            return True
        one, other = sorted((echo.text.strip(), answer.text.strip()), key=len)
        return bool(one) and (other.startswith(one) or other.endswith(one))


Contents = Mapping[str, TurnContent]
"""The content of turns by their ids."""


def _has_call(message: Message, ids: Iterable[str]) -> bool:
    echoed_ids = {call.id for call in message.tool_calls or ()}
    return any(call_id in echoed_ids or call_id in message.text for call_id in ids)
