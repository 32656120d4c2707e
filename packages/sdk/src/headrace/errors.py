"""The errors of the SDK. All are a `HeadraceError`."""

from __future__ import annotations

from headrace_schemas.errors import HeadraceError


class ApiError(HeadraceError):
    """A service refused. `status` is the HTTP status, `code` a stable word, `param` the field at fault."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None) -> None:
        super().__init__(f"{message} ({status}, {code})")
        self.status = status
        self.code = code
        self.param = param


class Unreachable(HeadraceError):
    """A service did not answer within all retries."""


class UsageError(HeadraceError):
    """The request cannot be carried out: a missing file, a wrong setting, options that contradict each other."""


__all__ = ["ApiError", "HeadraceError", "Unreachable", "UsageError"]
