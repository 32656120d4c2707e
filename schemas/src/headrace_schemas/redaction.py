"""The one place that takes secrets out of text, before a person or a file sees it.

By shape: credentials in a URL, and text after a name like `password=`, in any quotes. By value: secrets that the
process knows (`Redactor`). By name: a setting that is named like a secret is never shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from headrace_schemas.text import closest

HIDDEN = "(hidden)"
_WORDS = ("key", "password", "passwd", "secret", "token", "credential", "credentials", "sha256")
_NO_SECRETS = ("keys", "tokens")
"""Numbers of something, or tables."""
_SHORTEST = 4
"""Shorter values occur in any text, so they are not redacted."""
_LENGTH_MAX = 65_536
"""Characters that are searched for secrets; the rest of a longer text is cut off."""
_CUT = "... ({} more characters)"
_RUN = re.compile(r"[^\s'\"]+")
_USER = re.compile(r"(?<=[a-z0-9+.-])://[^/@:]*+:", re.IGNORECASE)
"""A URL as far as the colon before its password; within one run of `_RUN`."""
_BEARER = re.compile(r"(?P<kind>\bbearer\s++)(?P<secret>[^\s'\",;]++)", re.IGNORECASE)
_NAMED = re.compile(
    r"(?P<name>(?:password|passwd|secret|api_?key|internal_key|access_?key|token)['\"]?\s*+[=:]\s*+)"
    r"(?P<secret>\"[^\"]*+\"?|'[^']*+'?|[^\s&,;)}\]'\"]++)",
    re.IGNORECASE,
)
"""A quote that is not closed goes on to the end: the text may have been cut."""
_NAME_LENGTH_MAX = 512
_COUNTS = re.compile(r"^['\"]?(?:\d{1,6}(?:\.\d+)?|true|false|null|none|\(hidden\)|\*+)['\"]?$", re.IGNORECASE)
"""`tokens: 17` and the like are measurements."""


def redacted(text: str) -> str:
    """Return `text` without what looks like a secret, in time linear in its length, cut to 65,536 characters."""
    cut = len(text) - _LENGTH_MAX
    if cut > 0:
        text = text[:_LENGTH_MAX]
    if "://" in text:
        text = _RUN.sub(lambda run: _without_password(run[0], is_cut=cut > 0 and run.end() == len(text)), text)
    text = _BEARER.sub(rf"\g<kind>{HIDDEN}", text)
    text = _NAMED.sub(_without_value, text)
    return text + _CUT.format(cut) if cut > 0 else text


def is_secret(name: str) -> bool:
    """Whether a setting or variable of this name, misspelt or not, may hold a secret."""
    last = re.split(r"[._\W]+", name[-_NAME_LENGTH_MAX:].lower())[-1]
    return last not in _NO_SECRETS and closest(last, _WORDS, cutoff=0.65) is not None


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


def _without_password(run: str, *, is_cut: bool) -> str:
    """Return `run` without the password of a URL: it may hold `@` and `/` itself, so it ends at the last `@`.

    Of a run whose end `is_cut` off, that `@` may be missing.
    """
    user = _USER.search(run)
    if user is None:
        return run
    end = len(run) if is_cut else run.rfind("@")
    return f"{run[: user.end()]}{HIDDEN}{run[end:]}" if end > user.end() else run


def _without_value(found: re.Match[str]) -> str:
    secret = found["secret"]
    return found[0] if _COUNTS.match(secret) else f"{found['name']}{HIDDEN}"
