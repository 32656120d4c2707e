"""The root of Headrace's one error tree.

`HeadraceError` is everything that Headrace raises on purpose. Its direct branches tell a caller what to do next:

- `InvalidEvent`: these bytes will never become valid; dead-letter them.
- `headrace_runtime.errors.SettingError`: somebody must change a setting; stop the start-up.
- `headrace_runtime.errors.Unavailable`: a dependency is away; retry with backoff.
- `headrace_runtime.errors.Refused`: a caller's request is wrong; answer it, keep going.
"""

from headrace_schemas.redaction import redacted
from headrace_schemas.text import printable_lines

_LENGTH_MAX = 8_000
"""Characters of one message."""


class HeadraceError(Exception):
    """Root of the tree. The message names the thing, the value and the remedy.

    Whatever text from outside is in it: it holds no secret, nothing that steers a terminal, and at most 8,000
    characters.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(printable_lines(redacted(str(message)), _LENGTH_MAX))


class InvalidEvent(HeadraceError):
    """Bytes on a topic that are not a valid event; retrying cannot help.

    `reason` is the dead letter's short machine-readable reason, e.g. `invalid_json`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
