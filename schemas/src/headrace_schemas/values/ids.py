"""Identifiers that Headrace makes, names that callers choose, and names of reward sources.

Ids are UUIDv7 for new facts and UUIDv5 for repeatable facts; response ids contain a session key.

A name in a header, a path segment or a record key is decoded as UTF-8 if its bytes are valid UTF-8, else as Latin-1,
which is the encoding of Python's `http.client`. Percent escapes of a path are decoded once before that; those of a
header or a body stay as they are. No character is replaced, dropped or folded, so names that only look alike (NFC and
NFD, case, fullwidth, zero-width) stay different.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
import unicodedata
import uuid
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TypeVar
from urllib.parse import unquote_to_bytes

from headrace_schemas.values.text import has_surrogates

T = TypeVar("T")
NAMESPACE = uuid.UUID("6f1d3c1e-9c0e-5d0a-8a55-6865616472ab")
"""The UUIDv5 namespace of all derived ids. It must never change, or replayed facts would get new ids."""

SESSION_KEY_LENGTH = 16
RESPONSE_PREFIX = "chatcmpl-"
RESPONSE_ID = re.compile(rf"^{RESPONSE_PREFIX}([a-z2-7]{{{SESSION_KEY_LENGTH}}})-([0-9a-f]{{32}})$")
_TENANT_PREFIX = re.compile(rf"^tenant-[a-z2-7]{{{SESSION_KEY_LENGTH}}}/")
_DEFAULT_TENANT = "default"
_NAME_LENGTH_MAX = 512
RESERVED: dict[str, str] = {"function": "scorer", "learned": "scorer", "judge": "judge"}
"""Service by the first word of the sources (before the colon) that are reserved for it."""
FROM_FEEDBACK = "feedback"
"""First word of the default source of feedback. The scorer computes its rewards from the feedback."""

_COLONS = ":\u02d0\u02f8\u0589\u05c3\u0703\u0704\u16ec\u1803\u1809\u205a\u2236\ua789\ufe30"
"""The colon and characters that look like it."""
_LOOKALIKES = {
    "a": "\u0430\u0251\u03b1",
    "c": "\u0441\u03f2\u1d04",
    "d": "\u0501\u1d05",
    "e": "3\u0435\u0454\u03b5\u1d07",
    "f": "\u0192",
    "g": "\u0261\u0581",
    "i": "\u0456\u0131\u03b9",
    "j": "\u0458\u03f3\u1d0a",
    "l": "1|\u04cf\u01c0",
    "n": "\u0578\u043f\u03b7\u0438",
    "o": "0\u043e\u03bf\u0585\u1d0f",
    "r": "\u0433\u1d26",
    "t": "\u0442\u03c4",
    "u": "\u057d\u03c5\u1d1c",
}
"""Digits and Cyrillic, Greek, Armenian and Latin letters that look like a letter of the reserved words."""
_PLAIN = str.maketrans({alike: letter for letter, lookalikes in _LOOKALIKES.items() for alike in lookalikes})


def uuid7(unix_ms: int | None = None) -> uuid.UUID:
    """Return a time-ordered UUID (RFC 9562 section 5.7). `unix_ms` defaults to the current time."""
    stamp = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    value = int.from_bytes(stamp.to_bytes(6, "big") + os.urandom(10), "big")
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    return uuid.UUID(int=value)


def derived_id(kind: str, *parts: object) -> str:
    """Return the id of a fact that may be produced twice. Equal arguments give equal ids (UUIDv5, RFC 9562 section
    5.5).

    Args:
        kind: the kind of fact, so that facts of different kinds have different ids.
        parts: the values that identify the fact, without NUL characters, which separate the parts.
    """
    texts = [kind, *(str(part) for part in parts)]
    if any("\0" in text for text in texts):
        raise ValueError(f"derived_id: a part of {texts!r} contains a NUL character; remove it first")
    return str(uuid.uuid5(NAMESPACE, "\0".join(texts)))


def session_key(tenant: str, session_id: str) -> str:
    """Return the partition key of all events of one session: 80 bits of SHA-256 in lower-case base32.

    The key hides the user's own id in response ids and keeps them under 64 characters. Two tenants never share a key.
    """
    digest = hashlib.sha256(f"{tenant}\0{session_id}".encode("utf-8", "surrogatepass")).digest()[:10]
    return base64.b32encode(digest).decode().lower()


def tenant_name(tenant: str, name: str) -> str:
    """Return `name` with its tenant as prefix. Different pairs of tenant and name give different results."""
    return f"/{len(tenant)}/{tenant}/{name}" if "/" in tenant else f"{tenant}/{name}"


def ingested_trajectory_id(tenant: str, name: str) -> str:
    """Return an id, unique to the tenant, of a trajectory that the tenant ingests under `name`.

    Names of the tenant `default` stay as they are unless they begin with a tenant's prefix. All other names get the
    prefix of their tenant, unless they already have it.
    """
    if tenant == _DEFAULT_TENANT and not has_tenant_prefix(name):
        return name
    prefix = f"tenant-{session_key(tenant, 'trajectories')}/"
    if name.startswith(prefix):
        return name
    prefixed_name = prefix + name
    if len(prefixed_name) <= _NAME_LENGTH_MAX:
        return prefixed_name
    return prefix + derived_id("ingested-trajectory", name)


def has_tenant_prefix(trajectory_id: str) -> bool:
    """Return whether a trajectory id has the prefix that `ingested_trajectory_id` gives."""
    return _TENANT_PREFIX.match(trajectory_id) is not None


def response_id(key: str, turn_uuid: uuid.UUID | None = None) -> str:
    """Return a new response id, `chatcmpl-<session key>-<uuid7>`. It contains the partition key for feedback."""
    return f"{RESPONSE_PREFIX}{key}-{(turn_uuid or uuid7()).hex}"


def key_of_response(response: str) -> str | None:
    """Return the session key of a response id, or None if Headrace did not create the id."""
    match = RESPONSE_ID.match(response)
    return match.group(1) if match else None


def created_ms(name: str) -> int:
    """Return the time, in milliseconds since 1970, of a name that ends in the 32 digits of a `uuid7`. Raises
    `ValueError` for other names."""
    return uuid.UUID(hex=name[-32:]).int >> 80


NAME = r"^[^\x00-\x1f\x7f-\x9f]{1,512}$"
"""A name that a caller chooses: 1 to 512 characters without control characters, which would break ids and logs."""
_NAME = re.compile(NAME)


def decode_name(raw: bytes) -> str:
    """Decode `raw` as UTF-8 if it is valid UTF-8, otherwise as Latin-1."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError:
        return raw.decode("latin-1")


def decode_segment(raw: bytes) -> str:
    """Decode one segment of a URL's path, including its percent escapes."""
    return decode_name(unquote_to_bytes(raw))


def decode_path(raw: bytes) -> str:
    """Decode a URL's path segment by segment. `%2F` becomes a slash within its segment."""
    return "/".join(map(decode_segment, raw.split(b"/")))


def is_name(text: str) -> bool:
    """Return whether `text` matches `NAME` and has no lone surrogates, which UTF-8 cannot encode."""
    return _NAME.fullmatch(text) is not None and not has_surrogates(text)


def owner_of(source: str) -> str | None:
    """Return the service for which `source` and its metrics are reserved, or None if every producer may use them."""
    return RESERVED.get(_split(source)[0])


def reserved_producer(source: str) -> str | None:
    """Return the only Headrace service that may send rewards of `source`, or None if external producers may send them.

    Services send the rewards of reserved sources. The scorer sends those of `feedback` and its metrics.
    """
    word = _split(source)[0]
    return "scorer" if word == FROM_FEEDBACK else RESERVED.get(word)


def refusal_of(name: str, *, whole_word: bool = True) -> str | None:
    """Return the reason why callers must not use `name`, as the predicate of a sentence, or None if they may.

    Args:
        name: the name of a source, a rater or a metric.
        whole_word: whether to refuse a reserved word without a colon, too. A source needs it, because a metric is
            appended to it after a colon.
    """
    word, has_colon = _split(name)
    if word not in RESERVED or not (whole_word or has_colon):
        return None
    words = ", ".join(sorted(RESERVED))
    return f"is reserved for the {RESERVED[word]}; use another name that begins with none of {words}"


def _split(source: str) -> tuple[str, bool]:
    """Return the part of a source's name before the first colon, normalized so that look-alike characters count as
    equal, and whether there is a colon.
    """
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFKC", source.translate(_PLAIN)).casefold())
    at = next((at for at, character in enumerate(folded) if character in _COLONS), len(folded))
    visible = (character for character in folded[:at] if unicodedata.category(character)[0] not in "CMZ")
    return "".join(visible).translate(_PLAIN), at < len(folded)


def matches(pattern: str, source: str) -> bool:
    """Return whether `source` matches `pattern`."""
    return _compile(pattern).fullmatch(source) is not None


def first_match(values: Mapping[str, T], source: str) -> T | None:
    """Return the value of the first pattern that `source` matches, or None."""
    return next((value for pattern, value in values.items() if matches(pattern, source)), None)


def matches_any(patterns: Iterable[str], source: str) -> bool:
    """Return whether `source` matches at least one of the patterns."""
    return any(matches(pattern, source) for pattern in patterns)


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(_expression(pattern), re.DOTALL)


def _expression(pattern: str) -> str:
    """Translate `pattern` into a regular expression that does not backtrack, as `fnmatch` does."""
    first, *parts = map(re.escape, pattern.split("*"))
    if not parts:
        return first
    *middle, last = parts
    return first + "".join(f"(?>.*?{text})" for text in middle if text) + f".*{last}"
