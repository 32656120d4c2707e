"""The branches of the error tree that services raise; its root and `InvalidEvent` live in `headrace_schemas.errors`."""

from __future__ import annotations

from headrace_schemas import redaction
from headrace_schemas.errors import HeadraceError, InvalidEvent


class SettingError(HeadraceError):
    """A setting is unknown, of the wrong type or unsupported. Stops the start-up (P11), exit status 2."""

    def __init__(self, name: str, value: object, remedy: str) -> None:
        super().__init__(f"setting {name} = {redaction.redacted_value(name, value)}: {remedy}")
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        """It may cross a process; its value does not."""
        return _said, (str(self), self.name)


def _said(message: str, name: str) -> SettingError:
    error = SettingError.__new__(SettingError, message)
    error.name = name
    return error


class Unavailable(HeadraceError):
    """Something that we depend on is away or slow; trying again later may help."""


class DiskFull(Unavailable):
    """A disk has no room. Somebody has to make some, however long that takes: it is waited for and ends nobody."""


class MissingBlob(Unavailable):
    """The store answers and has no such blob. One that was just written may show late; then it is gone for good."""


class CorruptBlob(HeadraceError):
    """Stored bytes do not hash to their name. Never loaded, never repaired by guessing."""


class Refused(HeadraceError):
    """A caller's request is wrong. `status` is the HTTP status, `code` a stable word, `param` the field at fault."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


__all__ = [
    "CorruptBlob",
    "DiskFull",
    "HeadraceError",
    "InvalidEvent",
    "MissingBlob",
    "Refused",
    "SettingError",
    "Unavailable",
]
