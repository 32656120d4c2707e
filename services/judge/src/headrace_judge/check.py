"""Checks what would stop the judge's start: rubrics, templates, and the endpoint's key."""

from __future__ import annotations

from headrace_judge import app
from headrace_judge.settings import JudgeSettings
from headrace_runtime.settings import Common


async def check(common: Common, settings: JudgeSettings) -> list[str]:
    """Raises `SettingError`. The endpoint is not called: a call may be billed."""
    app.service(settings, common)
    return []
