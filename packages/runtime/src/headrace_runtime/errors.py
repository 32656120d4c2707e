"""Exceptions of services. Their base class and `InvalidEvent` are in `headrace_schemas.values.errors`."""

from __future__ import annotations

from headrace_schemas.values import errors
from headrace_schemas.values.errors import HeadraceError, InvalidEvent


class SettingError(HeadraceError):
    """Raised if a setting is unknown, of the wrong type or unsupported. It stops the start-up with exit status 2."""

    def __init__(self, name: str, value: object, remedy: str) -> None:
        super().__init__(f"setting {name} = {errors.redact_value(name, value)}: {remedy}")
        self.name = name

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle the message and the name but not the value, which may be a secret."""
        return _restore, (str(self), self.name)


def _restore(message: str, name: str) -> SettingError:
    error = SettingError.__new__(SettingError, message)
    error.name = name
    return error


class Unavailable(HeadraceError):
    """Raised if a dependency, such as the bus or the database, does not respond in time. A later retry may succeed."""


class DiskFull(Unavailable):
    """Raised if a disk is full. Services wait without a time limit until an operator frees space."""


class MissingBlob(Unavailable):
    """Raised if the store responds but lacks a blob. A retry may succeed if the blob is new; otherwise the blob is
    lost."""


class CorruptBlob(HeadraceError):
    """Raised if stored bytes do not match the digest in their name. The bytes are not used."""


class Refused(HeadraceError):
    """Raised if a request is invalid. `status` is the HTTP status, `code` a stable identifier, `param` the invalid
    field."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param


def is_panic(error: BaseException) -> bool:
    """Return whether `error` is a panic of a library written in Rust, such as `tokenizers`.

    The class of such errors does not derive from `Exception`, and cannot be imported.
    """
    return type(error).__name__ == "PanicException"


__all__ = [
    "CorruptBlob",
    "DiskFull",
    "HeadraceError",
    "InvalidEvent",
    "MissingBlob",
    "Refused",
    "SettingError",
    "Unavailable",
    "is_panic",
]
