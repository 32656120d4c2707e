"""The one place that takes secrets out of text, before a person or a file sees it.

By shape: credentials in a URL, and text after a name like `password=`, in any quotes. By value: secrets that the
process knows (`Redactor`). By name: a setting that is named like a secret is never shown.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping

HIDDEN = "(hidden)"
_WORDS = ("key", "password", "passwd", "secret", "token", "credential", "credentials", "sha256")
_NO_SECRETS = ("keys", "tokens")
"""Numbers of something, or tables."""
_SHORTEST = 4
"""Shorter values occur in any text, so they are not redacted."""
_AUTHORITY = re.compile(
    r"(?P<scheme>\b[a-z][a-z0-9+.-]*://)(?P<user>[^\s/@:'\"]*):(?P<secret>[^\s'\"]+)@", re.IGNORECASE
)
_BEARER = re.compile(r"(?P<kind>\bbearer\s+)(?P<secret>[^\s'\",;]+)", re.IGNORECASE)
_NAMED = re.compile(
    r"(?P<name>\b[\w.-]*(?:password|passwd|secret|api_?key|internal_key|access_?key|token)['\"]?\s*[=:]\s*)"
    r"(?P<secret>\"[^\"]*\"|'[^']*'|[^\s&,;)}\]'\"]+)",
    re.IGNORECASE,
)
_COUNTS = re.compile(r"^['\"]?(?:\d{1,6}(?:\.\d+)?|true|false|null|none|\(hidden\)|\*+)['\"]?$", re.IGNORECASE)
"""`tokens: 17` and the like are measurements."""


def redacted(text: str) -> str:
    """`text` without what looks like a secret."""
    if "://" in text:
        text = _AUTHORITY.sub(rf"\g<scheme>\g<user>:{HIDDEN}@", text)
    text = _BEARER.sub(rf"\g<kind>{HIDDEN}", text)
    return _NAMED.sub(_without_value, text)


def is_secret(name: str) -> bool:
    """Whether a setting or variable of this name, misspelt or not, may hold a secret."""
    last = re.split(r"[._\W]+", name.lower())[-1]
    return last not in _NO_SECRETS and bool(difflib.get_close_matches(last, _WORDS, n=1, cutoff=0.65))


def shown(name: str, value: object) -> str:
    """`value` of the setting `name` as a message may show it."""
    if is_secret(name):
        return HIDDEN
    return redacted(repr(_without_secrets(value)))


class Redactor:
    """Takes known secrets out of text, besides what looks like one. Thread-safe; knows nothing at first."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        known = sorted({secret for secret in secrets if len(secret) >= _SHORTEST}, key=len, reverse=True)
        self._known = re.compile("|".join(map(re.escape, known))) if known else None

    def __call__(self, text: str) -> str:
        return redacted(self._known.sub(HIDDEN, text) if self._known else text)


def _without_secrets(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret(str(key)) else _without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_secrets(item) for item in value)
    return value


def _without_value(found: re.Match[str]) -> str:
    secret = found["secret"]
    return found[0] if _COUNTS.match(secret) else f"{found['name']}{HIDDEN}"
