"""Digests of conversations, with which one turn is recognised as the continuation of another.

Clients change the history that they send back: `content` null or empty, other spaces in tool arguments, names added,
reasoning and ids dropped. So only role, text, and the functions and arguments of tool calls are compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from hashlib import blake2b

from headrace_schemas import Message, Turn

SIZE = 8
"""Bytes of one digest. They only have to tell turns of one session apart."""


def prefixes(messages: Iterable[Message]) -> tuple[bytes, ...]:
    """The digest of each non-empty prefix, shortest first."""
    digest = b""
    found = []
    for message in messages:
        digest = _extend(digest, message)
        found.append(digest)
    return tuple(found)


def replies(turn: Turn, history: bytes) -> tuple[bytes, ...]:
    """Return the digest of the conversation with each choice as its next message, in the order of the choices.

    `history` is the digest of the conversation without one, the last of its `prefixes`.
    """
    return tuple(_extend(history, choice.message) for choice in turn.choices)


def pack(digests: Iterable[bytes]) -> bytes:
    return b"".join(digests)


def unpack(packed: bytes) -> tuple[bytes, ...]:
    return tuple(packed[at : at + SIZE] for at in range(0, len(packed), SIZE))


def _extend(history: bytes, message: Message) -> bytes:
    calls = [(call.function.name, _arguments(call.function.arguments)) for call in message.tool_calls or ()]
    said = json.dumps([message.role, message.text.strip(), calls], separators=(",", ":"))
    return blake2b(history + said.encode(), digest_size=SIZE).digest()


def _arguments(text: str) -> str:
    try:
        return json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):  # the model may write anything
        return text.strip()
