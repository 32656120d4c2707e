"""Errors that only the command and its supervisor raise."""

from __future__ import annotations

from headrace_schemas.errors import HeadraceError


class NotRunning(HeadraceError):
    """No `headrace up` runs on this data directory."""


class StartFailed(HeadraceError):
    """A service cannot run as it is configured, or is not ready in time. Everything was stopped."""
