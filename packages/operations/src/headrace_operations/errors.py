"""Errors that only the `headrace` command and its supervisor raise."""

from __future__ import annotations

from headrace_schemas.values.errors import HeadraceError


class NotRunning(HeadraceError):
    """No `headrace up` runs on this data directory."""


class StartFailed(HeadraceError):
    """A service has invalid settings or was not ready in time. All services were stopped."""
