"""Base class of all exceptions that Headrace raises on purpose.

The direct subclasses of `HeadraceError` determine how a caller handles the error:

- `InvalidEvent`: the bytes will never become valid; dead-letter them.
- `headrace_runtime.errors.SettingError`: an operator must change a setting; stop the start-up.
- `headrace_runtime.errors.Unavailable`: a dependency does not respond; retry with backoff.
- `headrace_runtime.errors.Refused`: the request is invalid; answer it with an error and continue.
"""

from headrace_schemas.redaction import redacted
from headrace_schemas.text import printable_lines

_LENGTH_MAX = 8_000
"""Maximum number of characters of one message."""


class HeadraceError(Exception):
    """Base class of Headrace's exceptions. A message names the field, its value and the remedy.

    Secrets and terminal control characters are removed from the message, and it is cut to 8,000 characters.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable_lines(redacted(str(message)), _LENGTH_MAX))


class InvalidEvent(HeadraceError):
    """A record's value is not a valid event, so a retry would fail, too.

    `reason` is the short machine-readable reason of the dead letter, for example `invalid_json`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
