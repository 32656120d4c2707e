"""Digests of conversations, which show that a turn continues another one.

Clients change the history that they send back: `content` null or empty, other spaces in tool arguments, added names,
missing reasoning and ids. So only role, text, and the functions and arguments of tool calls are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b

from headrace_schemas import Message, Turn

SIZE = 8
"""Bytes of one digest. Digests must only distinguish the turns of one session."""


def prefix_digests(messages: Iterable[Message]) -> tuple[bytes, ...]:
    """Return the digest of each non-empty prefix of a conversation, the shortest first."""
    digest = b""
    digests = []
    for message in messages:
        digest = _extend(digest, message)
        digests.append(digest)
    return tuple(digests)


def reply_digests(turn: Turn, history: bytes) -> tuple[bytes, ...]:
    """Return the digest of the conversation with each choice as its next message, in the order of the choices.

    `history` is the digest of the conversation without a choice, the last of its `prefix_digests`.
    """
    return tuple(_extend(history, choice.message) for choice in turn.choices)


def join_digests(digests: Iterable[bytes]) -> bytes:
    return b"".join(digests)


def split_digests(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + SIZE] for at in range(0, len(packed), SIZE))


def _extend(history: bytes, message: Message) -> bytes:
    calls = [(call.function.name, _arguments(call.function.arguments)) for call in message.tool_calls or ()]
    content = json.dumps([message.role, message.text.strip(), calls], separators=(",", ":"))
    return blake2b(history + content.encode(), digest_size=SIZE).digest()


def _arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):  # the model may write invalid JSON
        return text.strip()
