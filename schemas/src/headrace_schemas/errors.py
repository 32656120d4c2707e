"""The root of Headrace's one error tree.

`HeadraceError` is everything that Headrace raises on purpose. Its direct branches tell a caller what to do next:

- `InvalidEvent`: these bytes will never become valid; dead-letter them.
- `headrace_runtime.errors.SettingError`: somebody must change a setting; stop the start-up.
- `headrace_runtime.errors.Unavailable`: a dependency is away; retry with backoff.
- `headrace_runtime.errors.Refused`: a caller's request is wrong; answer it, keep going.
"""

from headrace_schemas.redaction import redacted


class HeadraceError(Exception):
    """Root of the tree. The message names the thing, the value and the remedy, and never a secret."""

    def __init__(self, message: str = "") -> None:
        super().__init__(redacted(str(message)))


class InvalidEvent(HeadraceError):
    """Bytes on a topic that are not a valid event; retrying cannot help.

    `reason` is the dead letter's short machine-readable reason, e.g. `invalid_json`.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
