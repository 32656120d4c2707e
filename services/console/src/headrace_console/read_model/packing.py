"""Compact forms of ids and of lists of row numbers.

A response id takes 26 bytes in place of 58, and an event id 16 in place of 36. Both can be unpacked. A row of a turn
stores only the last 16 bytes of the turn's response id, because the others are the key of its session.
"""

from __future__ import annotations

import base64
import re
import uuid
from collections.abc import Iterable
from functools import lru_cache

from headrace_schemas.values.ids import RESPONSE_ID, RESPONSE_PREFIX

_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}")
_SESSION_KEY = re.compile(r"[a-z2-7]{16}")
_KEY_BYTES = 10
TAIL_BYTES = 16
"""Bytes of a response id after its session key."""
_RESPONSE_BYTES = 26
_OTHER_BYTES_MIN = 27
_BITS, _MORE = 0x7F, 0x80
_KEYS_CACHED = 4096
"""Number of session keys whose forms are cached, because a batch converts each of its keys many times."""


@lru_cache(maxsize=_KEYS_CACHED)
def _key_bytes(key: str) -> bytes:
    return base64.b32decode(key.upper())


def pack_id(text: str) -> bytes:
    """Return the compact form of an id as bytes. Different ids have different forms."""
    response = RESPONSE_ID.fullmatch(text)
    if response is not None:
        return _key_bytes(response[1]) + bytes.fromhex(response[2])
    if _UUID.fullmatch(text):
        return uuid.UUID(text).bytes
    return text.encode("utf-8", "surrogatepass").ljust(_OTHER_BYTES_MIN, b"\0")  # ids have no NUL characters


def unpack_id(packed: bytes) -> str:
    """Restore an id from its compact form."""
    if len(packed) == _RESPONSE_BYTES:
        return f"{RESPONSE_PREFIX}{unpack_key(packed[:_KEY_BYTES])}-{packed[_KEY_BYTES:].hex()}"
    if len(packed) < _RESPONSE_BYTES:
        return str(uuid.UUID(bytes=bytes(packed)))
    return packed.rstrip(b"\0").decode("utf-8", "surrogatepass")


def pack_key(text: str) -> bytes:
    """Return the compact form of a session key. A text that is no session key gets a form that no key has."""
    return _key_bytes(text) if _SESSION_KEY.fullmatch(text) else text.encode("utf-8", "surrogatepass").ljust(11, b"\0")


@lru_cache(maxsize=_KEYS_CACHED)
def unpack_key(packed: bytes) -> str:
    """Restore a session key from its compact form."""
    return base64.b32encode(packed).decode().lower()


def split_turn(packed: bytes) -> tuple[str | None, bytes]:
    """Split a packed turn id into its session key and the bytes that a row stores.

    The session key is None if the turn id contains none.
    """
    if len(packed) == _RESPONSE_BYTES:
        return unpack_key(packed[:_KEY_BYTES]), packed[_KEY_BYTES:]
    return None, packed + b"\0" if len(packed) == TAIL_BYTES else packed


def join_turn(session_key: str, stored: bytes) -> bytes:
    """Return the packed id of a turn from its session's key and the shortened id that a row stores. The inverse of
    `split_turn`.
    """
    if len(stored) == TAIL_BYTES:
        return pack_key(session_key) + stored
    return stored[:TAIL_BYTES] if len(stored) == TAIL_BYTES + 1 else stored


def pack_numbers(numbers: Iterable[int]) -> bytes:
    """Return row numbers as bytes: differences of successive numbers as variable-length integers, 7 bits per byte.

    A number near the previous one takes one byte.
    """
    packed, previous = bytearray(), 0
    for number in numbers:
        difference, previous = number - previous, number
        rest = 2 * difference if difference >= 0 else -2 * difference - 1
        while rest > _BITS:
            packed.append(rest & _BITS | _MORE)
            rest >>= 7
        packed.append(rest)
    return bytes(packed)


def unpack_numbers(packed: bytes) -> tuple[int, ...]:
    """Restore row numbers from their compact form."""
    numbers, number, rest, shift = [], 0, 0, 0
    for byte in packed:
        rest |= (byte & _BITS) << shift
        shift += 7
        if byte < _MORE:
            number += -(rest + 1) // 2 if rest % 2 else rest // 2
            numbers.append(number)
            rest = shift = 0
    return tuple(numbers)
