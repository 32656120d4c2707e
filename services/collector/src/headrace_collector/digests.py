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


def prefix_digests(messages: Iterable[Message]) -> tuple[bytes, ...]:
    """Return the digest of each non-empty prefix of a conversation, the shortest first.

    A prefix that ends with a system message has the digest of this message alone, which no other prefix has.
    """
    digest = b""
    digests = []
    for message in messages:
        if message.role in _SYSTEM_ROLES:
            digests.append(_extend(_SYSTEM_ROLES[0].encode(), message))
        else:
            digest = _extend(digest, message)
            digests.append(digest)
    return tuple(digests)


def request_digest(messages: Sequence[Message], prefixes: Sequence[bytes]) -> bytes:
    """Return the digest of a whole conversation from its `prefix_digests`: that of its last message beside system
    messages."""
    conversation = (at for at in reversed(range(len(messages))) if messages[at].role not in _SYSTEM_ROLES)
    last = next(conversation, None)
    return b"" if last is None else prefixes[last]


def reply_digests(turn: Turn, history: bytes) -> tuple[bytes, ...]:
    """Return the digest of the conversation with each choice as its next message, in the order of the choices.

    `history` is the digest of the conversation without a choice, its `request_digest`.
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
