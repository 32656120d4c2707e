"""Check of the judge's settings before its start: rubrics, templates, and the endpoint's key."""

from __future__ import annotations

from headrace_judge import app
from headrace_judge.settings import JudgeSettings
from headrace_runtime.settings.sections import Common


async def check(common: Common, settings: JudgeSettings) -> list[str]:
    """Raise `SettingError` for an invalid setting. The endpoint is not called, because a call may be billed."""
    app.service(settings, common)
    return []
