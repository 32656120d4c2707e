"""What the SDK raises on purpose. All are `HeadraceError`."""

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
    """A service did not answer, however often it was asked."""


class UsageError(HeadraceError):
    """What was asked for cannot be: a file, a setting, a combination of options."""


__all__ = ["ApiError", "HeadraceError", "Unreachable", "UsageError"]
