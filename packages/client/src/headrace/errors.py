"""Exceptions of the SDK. All of them derive from `HeadraceError`."""

from __future__ import annotations

from headrace_schemas.values.errors import HeadraceError


class ApiError(HeadraceError):
    """A service refused a request.

    Attributes:
        status: HTTP status of the response.
        code: stable, machine-readable error code.
        param: name of the invalid field, if the service named one.
    """

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(f"{message} ({status}, {code})")
        self.status = status
        self.code = code
        self.param = param


class Unreachable(HeadraceError):
    """A service did not answer within the allowed attempts or time."""


class UsageError(HeadraceError):
    """The request cannot be carried out: a missing file, an invalid setting, or options that contradict each other."""


__all__ = ["ApiError", "HeadraceError", "Unreachable", "UsageError"]
