"""Base class of all exceptions that Headrace raises on purpose, and redaction of secrets in their messages.

The direct subclasses of `HeadraceError` determine how a caller handles the error:

- `InvalidEvent`: the bytes will never become valid; dead-letter them.
- `headrace_runtime.errors.SettingError`: an operator must change a setting; stop the start-up.
- `headrace_runtime.errors.Unavailable`: a dependency does not respond; retry with backoff.
- `headrace_runtime.errors.Refused`: the request is invalid; answer it with an error and continue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from headrace_schemas.values.text import closest, printable_lines

HIDDEN = "(hidden)"
_WORDS = ("key", "password", "passwd", "secret", "token", "credential", "credentials", "sha256")
_NO_SECRETS = ("keys", "tokens")
"""Names that resemble a secret's but denote counts or tables."""
_SECRET_LENGTH_MIN = 4
"""Shorter values occur in any text, so they are not redacted."""
_SEARCHED_LENGTH_MAX = 65_536
"""Maximum number of characters that are searched for secrets. The rest of a longer text is cut off."""
_CUT = "... ({} more characters)"
_RUN = re.compile(r"[^\s'\"]+")
_USER = re.compile(r"(?<=[a-z0-9+.-])://[^/@:]*+:", re.IGNORECASE)
"""The part of a URL up to the colon before its password, within one run of `_RUN`."""
_BEARER = re.compile(r"(?P<kind>\bbearer\s++)(?P<secret>[^\s'\",;]++)", re.IGNORECASE)
_NAMED = re.compile(
    r"(?P<name>(?:password|passwd|secret|api_?key|internal_key|access_?key|token)['\"]?\s*+[=:]\s*+)"
    r"(?P<secret>\"[^\"]*+\"?|'[^']*+'?|[^\s&,;)}\]'\"]++)",
    re.IGNORECASE,
)
"""A secret after its name. An unclosed quote extends to the end of the text, which may have been cut."""
_NAME_LENGTH_MAX = 512
_COUNTS = re.compile(r"^['\"]?(?:\d{1,6}(?:\.\d+)?|true|false|null|none|\(hidden\)|\*+)['\"]?$", re.IGNORECASE)
"""Values that are no secrets, such as 17 in `tokens: 17`."""


def redact(text: str) -> str:
    """Return `text`, cut to 65,536 characters, without parts that look like secrets.

    The time is linear in its length.
    """
    cut = len(text) - _SEARCHED_LENGTH_MAX
    if cut > 0:
        text = text[:_SEARCHED_LENGTH_MAX]
    if "://" in text:
        text = _RUN.sub(lambda run: _without_password(run[0], is_cut=cut > 0 and run.end() == len(text)), text)
    text = _BEARER.sub(rf"\g<kind>{HIDDEN}", text)
    text = _NAMED.sub(_without_value, text)
    return text + _CUT.format(cut) if cut > 0 else text


def is_secret(name: str) -> bool:
    """Return whether `name`, misspelt or not, is that of a setting or variable that may contain a secret."""
    last = re.split(r"[._\W]+", name[-_NAME_LENGTH_MAX:].lower())[-1]
    return last not in _NO_SECRETS and closest(last, _WORDS, cutoff=0.65) is not None


def redact_value(name: str, value: object) -> str:
    """Return the value of the setting `name` for a message, without secrets."""
    if is_secret(name):
        return HIDDEN
    return redact(repr(_without_secrets(value)))


class Redactor:
    """Thread-safe filter that removes the given secrets from text, besides parts that look like secrets."""

    def __init__(self, secrets: Iterable[str] = ()) -> None:
        values = sorted({secret for secret in secrets if len(secret) >= _SECRET_LENGTH_MIN}, key=len, reverse=True)
        self._secrets = re.compile("|".join(map(re.escape, values))) if values else None

    def __call__(self, text: str) -> str:
        return redact(self._secrets.sub(HIDDEN, text) if self._secrets else text)


def _without_secrets(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: HIDDEN if is_secret(str(key)) else _without_secrets(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_secrets(item) for item in value)
    return value


def _without_password(run: str, *, is_cut: bool) -> str:
    """Return `run` without the password of a URL.

    A password may contain `@` and `/`, so it ends at the last `@`, or at the end of a run that `is_cut`.
    """
    user = _USER.search(run)
    if user is None:
        return run
    end = len(run) if is_cut else run.rfind("@")
    return f"{run[: user.end()]}{HIDDEN}{run[end:]}" if end > user.end() else run


def _without_value(match: re.Match[str]) -> str:
    secret = match["secret"]
    return match[0] if _COUNTS.match(secret) else f"{match['name']}{HIDDEN}"


_LENGTH_MAX = 8_000
"""Maximum number of characters of one message."""


class HeadraceError(Exception):
    """Base class of Headrace's exceptions. A message names the field, its value and the remedy.

    Secrets and terminal control characters are removed from the message, and it is cut to 8,000 characters.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable_lines(redact(str(message)), _LENGTH_MAX))


class InvalidEvent(HeadraceError):
    """A record's value is not a valid event, so a retry would fail, too.

    `reason` is the short machine-readable reason of the dead letter, for example `invalid_json`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
