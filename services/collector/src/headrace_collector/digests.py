"""Shows that a turn continues another one: by digests of their conversations, and where those cannot.

Clients change the history that they send back: `content` null or empty, other spaces in tool arguments, added names,
missing reasoning and ids. So only role, text, and the functions and arguments of tool calls are compared. System
prompts are left out of conversations: they may hold a clock or the state of a directory, which change with each call.

Several conversations may be equal, and clients send some answers back in another form: with the stop string that the
engine cut, without spaces at the ends or without the reasoning, or with a tool call written as text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from headrace_schemas import Message, Turn
from headrace_schemas.rules.turn_history import token_bytes

SIZE = 8
"""Bytes of one digest. Digests must only distinguish the turns of one session."""

_SYSTEM_ROLES = ("system", "developer")
_IS_SYSTEM = 1
"""Bit of the first byte that only digests of system messages have set."""


def prefix_digests(messages: Iterable[Message], history: bytes = b"") -> tuple[bytes, ...]:
    """Return the digest of the conversation up to each message, the shortest first.

    A prefix that ends with a system message has the digest of this message alone, which no other prefix has.

    Args:
        messages: The messages.
        history: The `conversation_digest` of the messages before them.
    """
    digest = history
    digests = []
    for message in messages:
        if message.role in _SYSTEM_ROLES:
            digests.append(_system_digest(message))
        else:
            digest = _extend(digest, message)
            digests.append(digest)
    return tuple(digests)


def conversation_digest(prefixes: Sequence[bytes], history: bytes = b"") -> bytes:
    """Return the digest of a whole conversation from its `prefix_digests`: that of its last message beside system
    messages, or `history` if there is none."""
    return next((digest for digest in reversed(prefixes) if not digest[0] & _IS_SYSTEM), history)


def reply_digests(turn: Turn, history: bytes) -> tuple[bytes, ...]:
    """Return the digest of the conversation with each choice as its next message, in the order of the choices.

    `history` is the digest of the conversation without a choice, its `conversation_digest`.
    """
    return tuple(_extend(history, choice.message) for choice in turn.choices)


def join_digests(digests: Iterable[bytes]) -> bytes:
    return b"".join(digests)


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + SIZE] for at in range(0, len(packed), SIZE))


def _system_digest(message: Message) -> bytes:
    digest = _extend(_SYSTEM_ROLES[0].encode(), message)
    return bytes([digest[0] | _IS_SYSTEM]) + digest[1:]


def _extend(history: bytes, message: Message) -> bytes:
    calls = [(call.function.name, _arguments(call.function.arguments)) for call in message.tool_calls or ()]
    content = json.dumps([message.role, message.text.strip(), calls], separators=(",", ":"))
    digest = blake2b(history + content.encode(), digest_size=SIZE).digest()
    return bytes([digest[0] & ~_IS_SYSTEM]) + digest[1:]


def _arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):  # the model may write invalid JSON
        return text.strip()


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
