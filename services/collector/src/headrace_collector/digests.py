"""Digests of conversations, which show that a turn continues another one.

Clients change the history that they send back: `content` null or empty, other spaces in tool arguments, added names,
missing reasoning and ids. So only role, text, and the functions and arguments of tool calls are compared. System
prompts are left out of conversations: they may hold a clock or the state of a directory, which change with each call.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from headrace_schemas import Message, Turn

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
